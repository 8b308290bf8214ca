"""Saves of a run that goes on: copied between two windows, written by a thread, told when they are on disk.

What is written is what the run was when `save` returned; training changes nothing of it. One save is written at a time,
in the order of their steps, and each of them is: a save that comes while another is being written waits for it. A save
that was due and failed ends the run at its next window, one that was asked for is refused. Where there is no room for a
copy, training waits until the save is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from types import TracebackType

from supertuner.core.errors import CheckpointError, RunFolderError
from supertuner.core.events import NoteEvent, WarningEvent
from supertuner.core.types import JSON, bytes_text
from supertuner.models.spec import Tensors
from supertuner.train.checkpoint import durable_save as checkpoint
from supertuner.train.checkpoint.host_copies import HostCopies
from supertuner.train.checkpoint.save_job import SaveAbandonedError, SaveCallback, SaveJob
from supertuner.train.checkpoint.state import collect_constant_state, collect_contents
from supertuner.train.run.training_run import TrainingRun

WARN_AFTER_S = 1.0
"""Training that waits for longer than this until an earlier checkpoint is written is told so, once."""

POLL_S = 0.02
SHOW_PROGRESS_AFTER_S = 0.5
"""Training that waits longer than this shows how far the save is."""
SHARED_SAVE_TIMEOUT_S = 5.0
"""How long a save that others share is waited for once an error ends the run: they may be gone."""


class CheckpointSaver:
    """Of one run, from `with` on. Leaving waits for the save that is being written; an interrupt gives it up.

    Where processes share out what is trained, each of them saves its own part, and they agree between two windows on
    what became of it; otherwise the first saves everything, and the others do nothing here.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._sharded = any(trained.shards is not None for trained in run.trainable_experts.values())
        self._writes = self._sharded or run.process_group.rank == 0
        self._session_id = _broadcast_session_id(run) if self._sharded else ""
        self._save_count = 0
        self._copies = HostCopies()
        self._abandon_reason: str | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last_job: SaveJob | None = None
        self._future: Future[Path] | None = None
        self._constant_state: dict[str, JSON] | None = None
        self._warned_of_waiting = self._noted_lack_of_room = False

    def save(self) -> None:
        """Save the run as it is now; if that fails, it ends."""
        self._start(required=True)

    def save_on_request(self, callback: SaveCallback | None) -> None:
        """Save the run as it is now for somebody who asked; if that fails, it goes on. `answer` is given by the process
        that knows who asked."""
        if self._last_job is None or self._last_job.step != self._run.step:
            self._start(required=False)
        if callback is not None and self._last_job is not None:
            self._last_job.add_callback(callback)

    def report_if_finished(self) -> None:
        """Tell of a save that has ended meanwhile. CheckpointError if it was due, and failed."""
        if self._future is not None and not self._is_running(self._future):
            self._finish(self._future)

    def wait(self) -> None:
        """Until what was begun is on disk, and told. CheckpointError if it was due, and failed."""
        if self._future is None:
            return
        self._wait_showing_progress(self._future)
        self._finish(self._future)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
            elif self._future is not None:
                self._finish_after_error(self._future, at_once=not issubclass(kind, Exception))
        finally:
            self._executor.shutdown()

    def _start(self, *, required: bool) -> None:
        if not self._writes:
            return
        self._wait_for_earlier()
        if self._constant_state is None:
            self._constant_state = collect_constant_state(self._run)
        contents = collect_contents(self._run)
        parts = contents.parts
        copied = self._has_room_for_copy(
            sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())
        )
        if copied:
            parts = {name: self._copies.copy_tensors(tensors) for name, tensors in parts.items()}
        sharding = None
        if self._sharded:
            self._save_count += 1
            process_group, save_id = self._run.process_group, f"{self._session_id}-{self._save_count}"
            sharding = checkpoint.CheckpointSharding(
                process_group.rank, process_group.world_size, save_id, contents.row_offsets
            )
        job = self._last_job = SaveJob(self._run.step, required)
        self._future = self._executor.submit(
            self._write, job, parts, {**self._constant_state, **contents.state}, sharding
        )
        if not copied:
            self.wait()

    def _wait_for_earlier(self) -> None:
        started_s = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - started_s
        if waited_s > WARN_AFTER_S and not self._warned_of_waiting:
            self._warned_of_waiting = True
            text = (
                f"training waited {waited_s:.1f} s at step {self._run.step} until an earlier checkpoint was written; "
                "raise checkpoints.every_steps, or write to a faster disk"
            )
            self._run.sink.emit(WarningEvent("checkpoint", text))

    def _has_room_for_copy(self, nbytes: int) -> bool:
        """Whether a copy leaves at least half of the memory that is free: the next window wants some of it, too. Where
        processes share out what is saved, all those of the node take theirs at the same moment."""
        if not self._run.config.checkpoints.in_background:
            return False
        writer_count = self._run.process_group.local_world_size if self._sharded else 1
        needed, free = writer_count * (nbytes - self._copies.nbytes), self._run.host.memory_available()
        short = free is not None and needed > free // 2
        if self._sharded:
            short = bool(self._run.process_group.all_reduce_max([int(short)])[0])
        if short and not self._noted_lack_of_room:
            self._noted_lack_of_room = True
            text = (
                f"training waits while checkpoints are written: a copy of {bytes_text(writer_count * nbytes)} would take "
                f"more than half of the host memory that is free ({bytes_text(free or 0)})"
            )
            self._run.sink.emit(NoteEvent("checkpoint", text))
        return not short

    def _write(
        self,
        job: SaveJob,
        parts: Mapping[str, Tensors],
        state: Mapping[str, JSON],
        sharding: checkpoint.CheckpointSharding | None,
    ) -> Path:
        """In the thread: everything onto the disk, or an error, and whoever asked is told."""
        run = self._run
        try:
            for log in (run.loss_log, run.validation_log):
                log.sync()
            path = checkpoint.save_checkpoint(
                run.folder / checkpoint.CHECKPOINTS_DIR,
                job.step,
                parts,
                state,
                keep=run.config.checkpoints.keep,
                host=run.host,
                sink=job,
                progress=job,
                raise_if_abandoned=self._raise_if_abandoned,
                sharding=sharding,
            )
        except BaseException as error:  # whatever it is, whoever asked is not left waiting
            job.finish(None, str(error) or type(error).__name__)
            raise
        job.finish(path, "")
        return path

    def _raise_if_abandoned(self) -> None:
        if self._abandon_reason is not None:
            raise SaveAbandonedError(f"the checkpoint was given up: {self._abandon_reason}")

    def _is_running(self, future: Future[Path]) -> bool:
        """Whether it is still being written. Those who share ask each other: if one has failed, the others give up."""
        if not self._sharded:
            return not future.done()
        ended = future.done()
        failed = ended and future.exception() is not None
        running_somewhere, failed_somewhere = self._run.process_group.all_reduce_max([int(not ended), int(failed)])
        if failed_somewhere:
            self._abandon_reason = "another process could not write its part; the log of the run says why"
        return bool(running_somewhere)

    def _wait_showing_progress(self, future: Future[Path]) -> None:
        """Wait, and show how far it is if that takes long."""
        job, started_s, shown, running = self._last_job, time.monotonic(), 0, True
        assert job is not None
        with ExitStack() as open_phase:
            phase = None
            while running:
                wait_for([future], timeout=POLL_S)
                if self._sharded:
                    time.sleep(POLL_S)
                running = self._is_running(future)
                if phase is None and running and time.monotonic() - started_s > SHOW_PROGRESS_AFTER_S and job.nbytes:
                    title = f"saving {checkpoint.checkpoint_name(job.step)}"
                    phase = open_phase.enter_context(self._run.progress.phase(title, nbytes=job.nbytes))
                done = job.done_bytes
                if phase is not None and done > shown:
                    phase.advance(nbytes=done - shown)
                    shown = done

    def _finish(self, future: Future[Path]) -> None:
        """Tell what became of a save that has ended, in all processes that wrote it."""
        error = future.exception()
        if self._sharded and self._abandon_reason is not None:
            own_error = "" if error is None or isinstance(error, SaveAbandonedError) else str(error)
            errors = [one.decode() for one in self._run.process_group.all_gather(own_error.encode())]
            text = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(errors) if one)
            error = error if own_error else CheckpointError(text or str(error))
        self._abandon_reason = None
        self._report_outcome(future, error)

    def _finish_after_error(self, future: Future[Path], *, at_once: bool) -> None:
        """The same while an error ends the run, of which others tell; processes that share the save may be gone."""
        if not at_once:
            wait_for([future], timeout=SHARED_SAVE_TIMEOUT_S if self._sharded else None)
        self._abandon_reason = "the run was stopped at once"
        wait_for([future])
        with suppress(RunFolderError):  # a full disk takes no record either; what ends the run is not hidden by that
            try:
                self._report_outcome(future, future.exception())
            except CheckpointError as failed:
                self._run.sink.emit(WarningEvent("checkpoint", str(failed)))

    def _report_outcome(self, future: Future[Path], error: BaseException | None) -> None:
        assert self._last_job is not None
        self._future = None
        self._copies.release_all()
        for event in self._last_job.events:
            self._run.sink.emit(event)
        if error is None:
            self._run.sink.emit(NoteEvent("checkpoint", f"saved step {self._last_job.step}: {future.result()}"))
        elif self._last_job.required or not isinstance(error, CheckpointError):
            raise error
        else:
            self._run.sink.emit(WarningEvent("request checkpoint", str(error)))


def _broadcast_session_id(run: TrainingRun) -> str:
    """A word that all processes of this job know, and no earlier job."""
    session_id = token_hex(8).encode() if run.process_group.rank == 0 else None
    return run.process_group.broadcast(session_id).decode()

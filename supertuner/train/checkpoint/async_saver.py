"""Saves checkpoints while training goes on: copies the run between two windows, and writes the copy in a thread.

A checkpoint holds the run as it was when `save` returned. Saves are written one at a time, in the order of their steps,
and none is skipped: a save waits for the one before. A scheduled save that fails ends the run at its next window; one
that was requested from outside only reports its failure. If there is not enough memory for a copy, training waits until
the save is written.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Protocol, TypeAlias

import torch

from supertuner.core.errors import CheckpointError, RunFolderError, TrainError
from supertuner.core.events import Event, NoteEvent, Sink, WarningEvent
from supertuner.core.types import JSON, bytes_text
from supertuner.train.checkpoint.durable_save import save_checkpoint
from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR, checkpoint_name
from supertuner.train.checkpoint.state import collect_constant_state, collect_contents
from supertuner.train.checkpoint.write_files import CheckpointContents, CheckpointSharding, SaveAbandonedError
from supertuner.train.run.training_run import TrainingRun

WARN_AFTER_S = 1.0
"""If training waits longer than this for an earlier checkpoint, it warns, once."""
POLL_S = 0.02
SHOW_PROGRESS_AFTER_S = 0.5
"""If training waits longer than this, it shows the progress of the save."""
SHARED_SAVE_TIMEOUT_S = 5.0
"""After an error, how long to wait for a sharded save: the other ranks may be gone."""

SaveCallback: TypeAlias = Callable[[Path | None, str], None]
"""Called once, with the checkpoint's path, or with None and the reason. Possibly by the writer thread."""
SavedCallback: TypeAlias = Callable[[int, Path], None]
"""Called by the training thread for each checkpoint that is on disk, with its step and path."""


class PendingFiles(Protocol):
    """Copies of weights that are written before the checkpoint of the same step."""

    @property
    def nbytes(self) -> int: ...

    def write(self, sink: Sink, raise_if_abandoned: Callable[[], None]) -> Sequence[Path]:
        """Write the files durably. TrainError if that is not possible."""


CollectExport: TypeAlias = Callable[[], PendingFiles | None]
"""Copies what is exported with the checkpoint of this step; None if nothing is. Called on every rank."""


@dataclass(eq=False, slots=True)
class SaveJob:
    """Buffers events of the writer thread; the training thread emits them, and shows progress while it waits for the
    writer. So displays and heartbeats are only used by the training thread."""

    step: int
    required: bool
    """Whether a failure ends the run."""
    events: list[Event] = field(default_factory=list)
    nbytes: int = 0
    """Total bytes that this process has to write; 0 until they are known."""
    done_bytes: int = 0
    """Bytes written so far."""
    _callbacks: list[SaveCallback] = field(default_factory=list)
    _outcome: tuple[Path | None, str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def emit(self, event: Event, /) -> None:
        self.events.append(event)

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> SaveJob:
        self.nbytes += nbytes
        return self

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        self.done_bytes += nbytes

    def __enter__(self) -> SaveJob:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_callback(self, callback: SaveCallback) -> None:
        """Call it when the save has ended; at once if it has ended already."""
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback(*self._outcome)

    def finish(self, path: Path | None, reason: str) -> None:
        with self._lock:
            self._outcome = path, reason
        for callback in self._callbacks:
            callback(path, reason)


class HostCopies:
    """Copies of tensors in host memory, which are written while training changes the tensors. For one thread.

    Memory of released copies is reused: the first touch of a page costs more than the copy, and the memory is needed at
    every checkpoint anyway.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, torch.Size], list[torch.Tensor]] = defaultdict(list)
        self._in_use: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or free."""
        return sum(tensor.nbytes for tensors in (*self._free.values(), self._in_use) for tensor in tensors)

    def copy_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Contiguous copies; the copying is complete when this returns."""
        return {name: self._copy(tensor.detach()) for name, tensor in tensors.items()}

    def release_all(self) -> None:
        """Make the memory of all copies available for the next ones."""
        for tensor in self._in_use:
            self._free[tensor.dtype, tensor.shape].append(tensor)
        self._in_use.clear()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free[tensor.dtype, tensor.shape]
        copy = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._in_use.append(copy)
        return copy.copy_(tensor)


class CheckpointSaver:
    """The saver of one run, a context manager. Leaving waits for the save in progress; an interrupt abandons it.

    If ranks shard the trained weights, each of them saves its own shard, and between windows they agree on the outcome.
    Otherwise rank 0 saves everything, and the other ranks do nothing here.
    """

    def __init__(
        self, run: TrainingRun, on_saved: SavedCallback | None = None, collect_export: CollectExport = lambda: None
    ) -> None:
        self._run, self._on_saved, self._collect_export = run, on_saved, collect_export
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
        """Save the run as it is now; a failure ends the run, at the next `report_if_finished` or `wait`."""
        self._start(required=True)

    def save_on_request(self, callback: SaveCallback | None) -> None:
        """Save the run as it is now, for a request from outside; a failure does not end the run.

        `callback` is None on ranks other than 0, which do not know the request.
        """
        if self._last_job is None or self._last_job.step != self._run.step:
            self._start(required=False)
        if callback is not None and self._last_job is not None:
            self._last_job.add_callback(callback)

    def report_if_finished(self) -> None:
        """Emit the outcome of a save that has ended. CheckpointError if it was a scheduled one and failed."""
        if self._future is not None and not self._is_running(self._future):
            self._finish(self._future)

    def wait(self) -> None:
        """Wait for the save in progress, and emit its outcome. CheckpointError if it was a scheduled one and failed."""
        if self._future is None:
            return
        self._wait_showing_progress(self._future)
        self._finish(self._future)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
            elif self._future is not None:
                self._finish_after_error(self._future, at_once=not issubclass(kind, Exception))
        finally:
            self._executor.shutdown()

    def _start(self, *, required: bool) -> None:
        if self._writes:
            self._wait_for_earlier()
        export = self._collect_export()
        if not self._writes:
            return
        if self._constant_state is None:
            self._constant_state = collect_constant_state(self._run)
        contents, row_offsets = collect_contents(self._run, self._constant_state)
        nbytes = sum(tensor.nbytes for tensors in contents.parts.values() for tensor in tensors.values())
        nbytes += 0 if export is None else export.nbytes
        copied = self._has_room_for_copy(nbytes)
        if copied:
            parts = {name: self._copies.copy_tensors(tensors) for name, tensors in contents.parts.items()}
            contents = replace(contents, parts=parts)
        sharding = None
        if self._sharded:
            self._save_count += 1
            group, save_id = self._run.process_group, f"{self._session_id}-{self._save_count}"
            sharding = CheckpointSharding(group.rank, group.world_size, save_id, row_offsets)
        job = self._last_job = SaveJob(self._run.step, required)
        self._future = self._executor.submit(self._write, job, contents, sharding, export)
        if not copied:
            self.wait()

    def _wait_for_earlier(self) -> None:
        started_s = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - started_s
        if waited_s > WARN_AFTER_S and not self._warned_of_waiting:
            self._warned_of_waiting = True
            waited = f"training waited {waited_s:.1f} s at step {self._run.step}"
            remedy = "raise checkpoints.every_steps, or write to a faster disk"
            text = f"{waited} until an earlier checkpoint was written; {remedy}"
            self._run.context.sink.emit(WarningEvent("checkpoint", text))

    def _has_room_for_copy(self, nbytes: int) -> bool:
        """Whether a copy takes at most half of the free host memory: the next window needs some, too. In a sharded save
        all ranks of the node copy at the same time."""
        if not self._run.config.checkpoints.in_background:
            return False
        writer_count = self._run.process_group.local_world_size if self._sharded else 1
        needed, free = writer_count * (nbytes - self._copies.nbytes), self._run.context.host.memory_available()
        short = free is not None and needed > free // 2
        if self._sharded:
            short = bool(self._run.process_group.all_reduce_max([int(short)])[0])
        if short and not self._noted_lack_of_room:
            self._noted_lack_of_room = True
            share = f"more than half of the free host memory ({bytes_text(free or 0)})"
            reason = f"a copy of {bytes_text(writer_count * nbytes)} would take {share}"
            text = f"training waits while checkpoints are written: {reason}"
            self._run.context.sink.emit(NoteEvent("checkpoint", text))
        return not short

    def _write(
        self,
        job: SaveJob,
        contents: CheckpointContents,
        sharding: CheckpointSharding | None,
        export: PendingFiles | None,
    ) -> Path:
        """Runs in the writer thread: write exports and checkpoint durably, and call the callbacks in any case."""
        run = self._run
        try:
            if export is not None:
                self._write_export(job, export)
            for log in (run.loss_log, run.validation_log):
                log.sync()
            folder, keep = run.context.run_dir / CHECKPOINTS_DIR, run.config.checkpoints.keep
            context, check = replace(run.context, sink=job, progress=job), self._raise_if_abandoned
            path = save_checkpoint(folder, contents, context, keep=keep, raise_if_abandoned=check, sharding=sharding)
        except BaseException as error:  # any error: requests must be answered
            job.finish(None, str(error) or type(error).__name__)
            raise
        job.finish(path, "")
        return path

    def _write_export(self, job: SaveJob, export: PendingFiles) -> None:
        """First, so that a checkpoint implies the exports of its step, also after a kill in between."""
        try:
            paths = export.write(job, self._raise_if_abandoned)
        except TrainError as error:
            raise CheckpointError(f"step {job.step} is not saved: {error}") from error
        job.emit(NoteEvent("export", f"step {job.step}: {', '.join(map(str, paths))}"))

    def _raise_if_abandoned(self) -> None:
        if self._abandon_reason is not None:
            raise SaveAbandonedError(f"the checkpoint was abandoned: {self._abandon_reason}")

    def _is_running(self, future: Future[Path]) -> bool:
        """Whether the save is still being written, by any rank of a sharded one; if one has failed, all abandon it."""
        ended = future.done()
        if not self._sharded:
            return not ended
        failed = ended and future.exception() is not None
        running_somewhere, failed_somewhere = self._run.process_group.all_reduce_max([int(not ended), int(failed)])
        if failed_somewhere:
            self._abandon_reason = "another rank could not write its shard; the log of the run contains the reason"
        return bool(running_somewhere)

    def _wait_showing_progress(self, future: Future[Path]) -> None:
        """Wait for the save; show its progress if that takes long."""
        job, phase, shown, running, started_s = self._last_job, None, 0, True, time.monotonic()
        assert job is not None
        with ExitStack() as open_phase:
            while running:
                wait_for([future], timeout=POLL_S)
                if self._sharded:
                    time.sleep(POLL_S)
                running = self._is_running(future)
                if phase is None and running and time.monotonic() - started_s > SHOW_PROGRESS_AFTER_S and job.nbytes:
                    title = f"saving {checkpoint_name(job.step)}"
                    phase = open_phase.enter_context(self._run.context.progress.phase(title, nbytes=job.nbytes))
                done = job.done_bytes
                if phase is not None and done > shown:
                    phase.advance(nbytes=done - shown)
                    shown = done

    def _finish(self, future: Future[Path]) -> None:
        """Report the outcome of a save that has ended; in a sharded save, the errors of all ranks."""
        error = future.exception()
        if self._sharded and self._abandon_reason is not None:
            own_error = "" if error is None or isinstance(error, SaveAbandonedError) else str(error)
            errors = [content.decode() for content in self._run.process_group.all_gather(own_error.encode())]
            text = "; ".join(f"rank {rank}: {message}" for rank, message in enumerate(errors) if message)
            error = error if own_error else CheckpointError(text or str(error))
        self._abandon_reason = None
        self._report_outcome(future, error)

    def _finish_after_error(self, future: Future[Path], *, at_once: bool) -> None:
        """Report the outcome while another error ends the run, without collectives: other ranks may be gone."""
        if not at_once:
            wait_for([future], timeout=SHARED_SAVE_TIMEOUT_S if self._sharded else None)
        self._abandon_reason = "the run was stopped at once"
        wait_for([future])
        with suppress(RunFolderError):  # a full disk may refuse the event, too; the run's own error must not be hidden
            try:
                self._report_outcome(future, future.exception())
            except CheckpointError as failed:
                self._run.context.sink.emit(WarningEvent("checkpoint", str(failed)))

    def _report_outcome(self, future: Future[Path], error: BaseException | None) -> None:
        assert self._last_job is not None
        self._future = None
        self._copies.release_all()
        for event in self._last_job.events:
            self._run.context.sink.emit(event)
        if error is None:
            self._run.context.sink.emit(NoteEvent("checkpoint", f"saved step {self._last_job.step}: {future.result()}"))
            if self._on_saved is not None:
                self._on_saved(self._last_job.step, future.result())
        elif self._last_job.required or not isinstance(error, CheckpointError):
            raise error
        else:
            self._run.context.sink.emit(WarningEvent("request checkpoint", str(error)))


def _broadcast_session_id(run: TrainingRun) -> str:
    """A random id, the same on all ranks of this job, and different from those of earlier jobs."""
    session_id = token_hex(8).encode() if run.process_group.rank == 0 else None
    return run.process_group.broadcast(session_id).decode()

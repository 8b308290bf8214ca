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
from supertuner.core.events import Noted, Warned
from supertuner.core.types import JSON, bytes_text
from supertuner.models.spec import Tensors
from supertuner.train.checkpoint import save as checkpoint
from supertuner.train.checkpoint.host_copies import HostCopies
from supertuner.train.checkpoint.save_job import Abandoned, Answer, Save
from supertuner.train.checkpoint.state import constants, contents
from supertuner.train.run import Run

WAITED_TOLD_S = 1.0
"""Training that waits for longer than this until an earlier checkpoint is written is told so, once."""

POLL_S = 0.02
SHOWN_AFTER_S = 0.5
"""Training that waits longer than this shows how far the save is."""
OTHERS_S = 5.0
"""How long a save that others share is waited for once an error ends the run: they may be gone."""


class Saver:
    """Of one run, from `with` on. Leaving waits for the save that is being written; an interrupt gives it up.

    Where processes share out what is trained, each of them saves its own part, and they agree between two windows on
    what became of it; otherwise the first saves everything, and the others do nothing here.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._shared = any(trained.parts is not None for trained in run.trained.values())
        self._writes = self._shared or run.parallel.rank == 0
        self._session = _session(run) if self._shared else ""
        self._count = 0
        self._copies = HostCopies()
        self._give_up: str | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Save | None = None
        self._written: Future[Path] | None = None
        self._constant: dict[str, JSON] | None = None
        self._told_waiting = self._told_room = False

    def save(self) -> None:
        """Save the run as it is now; if that fails, it ends."""
        self._begin(due=True)

    def ask(self, answer: Answer | None) -> None:
        """Save the run as it is now for somebody who asked; if that fails, it goes on. `answer` is given by the process
        that knows who asked."""
        if self._last is None or self._last.step != self._run.step:
            self._begin(due=False)
        if answer is not None and self._last is not None:
            self._last.tell(answer)

    def settle(self) -> None:
        """Tell of a save that has ended meanwhile. CheckpointError if it was due, and failed."""
        if self._written is not None and not self._goes_on(self._written):
            self._finish(self._written)

    def wait(self) -> None:
        """Until what was begun is on disk, and told. CheckpointError if it was due, and failed."""
        if self._written is None:
            return
        self._see_to_its_end(self._written)
        self._finish(self._written)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
            elif self._written is not None:
                self._finish_alone(self._written, at_once=not issubclass(kind, Exception))
        finally:
            self._pool.shutdown()

    def _begin(self, *, due: bool) -> None:
        if not self._writes:
            return
        self._wait_for_earlier()
        if self._constant is None:
            self._constant = constants(self._run)
        now = contents(self._run)
        parts = now.parts
        copied = self._has_room(sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values()))
        if copied:
            parts = {name: self._copies.of(tensors) for name, tensors in parts.items()}
        sharers = None
        if self._shared:
            self._count += 1
            place, attempt = self._run.parallel, f"{self._session}-{self._count}"
            sharers = checkpoint.Sharers(place.rank, place.ranks, attempt, now.begins)
        save = self._last = Save(self._run.step, due)
        self._written = self._pool.submit(self._write, save, parts, {**self._constant, **now.state}, sharers)
        if not copied:
            self.wait()

    def _wait_for_earlier(self) -> None:
        begun = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - begun
        if waited_s > WAITED_TOLD_S and not self._told_waiting:
            self._told_waiting = True
            text = (
                f"training waited {waited_s:.1f} s at step {self._run.step} until an earlier checkpoint was written; "
                "raise checkpoints.every_steps, or write to a faster disk"
            )
            self._run.sink.emit(Warned("checkpoint", text))

    def _has_room(self, nbytes: int) -> bool:
        """Whether a copy leaves at least half of the memory that is free: the next window wants some of it, too. Where
        processes share out what is saved, all those of the node take theirs at the same moment."""
        if not self._run.config.checkpoints.in_background:
            return False
        sharers = self._run.parallel.local_ranks if self._shared else 1
        needed, free = sharers * (nbytes - self._copies.nbytes), self._run.host.memory_available()
        short = free is not None and needed > free // 2
        if self._shared:
            short = bool(self._run.parallel.agree([int(short)])[0])
        if short and not self._told_room:
            self._told_room = True
            text = (
                f"training waits while checkpoints are written: a copy of {bytes_text(sharers * nbytes)} would take "
                f"more than half of the host memory that is free ({bytes_text(free or 0)})"
            )
            self._run.sink.emit(Noted("checkpoint", text))
        return not short

    def _write(
        self, save: Save, parts: Mapping[str, Tensors], state: Mapping[str, JSON], sharers: checkpoint.Sharers | None
    ) -> Path:
        """In the thread: everything onto the disk, or an error, and whoever asked is told."""
        run = self._run
        try:
            for log in (run.losses, run.validations):
                log.sync()
            made = checkpoint.save(
                run.folder / checkpoint.FOLDER,
                save.step,
                parts,
                state,
                keep=run.config.checkpoints.keep,
                host=run.host,
                sink=save,
                progress=save,
                go_on=self._require_going_on,
                sharers=sharers,
            )
        except BaseException as error:  # whatever it is, whoever asked is not left waiting
            save.ended(None, str(error) or type(error).__name__)
            raise
        save.ended(made, "")
        return made

    def _require_going_on(self) -> None:
        if self._give_up is not None:
            raise Abandoned(f"the checkpoint was given up: {self._give_up}")

    def _goes_on(self, written: Future[Path]) -> bool:
        """Whether it is still being written. Those who share ask each other: if one has failed, the others give up."""
        if not self._shared:
            return not written.done()
        ended = written.done()
        failed = ended and written.exception() is not None
        going_on, failed_somewhere = self._run.parallel.agree([int(not ended), int(failed)])
        if failed_somewhere:
            self._give_up = "another process could not write its part; the log of the run says why"
        return bool(going_on)

    def _see_to_its_end(self, written: Future[Path]) -> None:
        """Wait, and show how far it is if that takes long."""
        save, begun, shown, goes_on = self._last, time.monotonic(), 0, True
        assert save is not None
        with ExitStack() as open_phase:
            phase = None
            while goes_on:
                wait_for([written], timeout=POLL_S)
                if self._shared:
                    time.sleep(POLL_S)
                goes_on = self._goes_on(written)
                if phase is None and goes_on and time.monotonic() - begun > SHOWN_AFTER_S and save.nbytes:
                    title = f"saving {checkpoint.folder_name(save.step)}"
                    phase = open_phase.enter_context(self._run.progress.phase(title, nbytes=save.nbytes))
                done = save.done
                if phase is not None and done > shown:
                    phase.advance(nbytes=done - shown)
                    shown = done

    def _finish(self, written: Future[Path]) -> None:
        """Tell what became of a save that has ended, in all processes that wrote it."""
        error = written.exception()
        if self._shared and self._give_up is not None:
            own = "" if error is None or isinstance(error, Abandoned) else str(error)
            said = [one.decode() for one in self._run.parallel.gather(own.encode())]
            text = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(said) if one)
            error = error if own else CheckpointError(text or str(error))
        self._give_up = None
        self._tell(written, error)

    def _finish_alone(self, written: Future[Path], *, at_once: bool) -> None:
        """The same while an error ends the run, of which others tell; processes that share the save may be gone."""
        if not at_once:
            wait_for([written], timeout=OTHERS_S if self._shared else None)
        self._give_up = "the run was stopped at once"
        wait_for([written])
        with suppress(RunFolderError):  # a full disk takes no record either; what ends the run is not hidden by that
            try:
                self._tell(written, written.exception())
            except CheckpointError as failed:
                self._run.sink.emit(Warned("checkpoint", str(failed)))

    def _tell(self, written: Future[Path], error: BaseException | None) -> None:
        assert self._last is not None
        self._written = None
        self._copies.give_back()
        for event in self._last.said:
            self._run.sink.emit(event)
        if error is None:
            self._run.sink.emit(Noted("checkpoint", f"saved step {self._last.step}: {written.result()}"))
        elif self._last.due or not isinstance(error, CheckpointError):
            raise error
        else:
            self._run.sink.emit(Warned("request checkpoint", str(error)))


def _session(run: Run) -> str:
    """A word that all processes of this job know, and no earlier job."""
    own = token_hex(8).encode() if run.parallel.rank == 0 else None
    return run.parallel.told(own).decode()

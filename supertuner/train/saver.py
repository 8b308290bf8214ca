"""Saves of a run that goes on: copied between two windows, written by a thread, told when they are on disk.

What is written is what the run was when `save` returned; training changes nothing of it. One save is written at a time,
in the order of their steps, and each of them is: a save that comes while another is being written waits for it. A save
that was due and failed ends the run at its next window, one that was asked for is refused. Where there is no room for a
copy, training waits until the save is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from supertuner.core.errors import CheckpointError
from supertuner.core.events import Event, Noted, Warned
from supertuner.core.types import JSON, bytes_text
from supertuner.models.spec import Tensors
from supertuner.train import checkpoint
from supertuner.train.host_copies import HostCopies
from supertuner.train.run import Run
from supertuner.train.saving import constants, contents

WAITED_TOLD_S = 1.0
"""Training that waits for longer than this until an earlier checkpoint is written is told so, once."""

Answer: TypeAlias = Callable[[Path | None, str], None]
"""Called once: with where the checkpoint is, or None and why there is none. Possibly by the thread that writes."""


class Abandoned(CheckpointError):
    """A save that was given up on the way, since nobody waits for it."""


@dataclass(eq=False, slots=True)
class _Save:
    """One save on its way to the disk."""

    step: int
    due: bool
    """Whether the run ends if it fails."""
    said: list[Event] = field(default_factory=list)
    """What there is to tell, by the thread that trains: sinks need not expect another one."""
    _answers: list[Answer] = field(default_factory=list)
    _outcome: tuple[Path | None, str] | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def emit(self, event: Event, /) -> None:
        self.said.append(event)

    def tell(self, answer: Answer) -> None:
        """Have it called once this is on disk; at once if it is."""
        with self._guard:
            if self._outcome is None:
                self._answers.append(answer)
                return
        answer(*self._outcome)

    def ended(self, made: Path | None, why: str) -> None:
        with self._guard:
            self._outcome = made, why
        for answer in self._answers:
            answer(made, why)


class Saver:
    """Of one run, from `with` on. Leaving waits for the save that is being written; an interrupt gives it up."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._copies = HostCopies()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: _Save | None = None
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
        if self._written is not None and self._written.done():
            self.wait()

    def wait(self) -> None:
        """Until what was begun is on disk, and told. CheckpointError if it was due, and failed."""
        if self._written is None or self._last is None:
            return
        wait_for([self._written])
        written, self._written = self._written, None
        self._copies.give_back()
        for event in self._last.said:
            self._run.sink.emit(event)
        try:
            made = written.result()
        except CheckpointError as error:
            if self._last.due:
                raise
            self._run.sink.emit(Warned("request checkpoint", str(error)))
        else:
            self._run.sink.emit(Noted("checkpoint", f"saved step {self._last.step}: {made}"))

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and not issubclass(kind, Exception):
                self._stop.set()
            self.wait()
        except CheckpointError as failed:
            if kind is None:
                raise
            self._run.sink.emit(Warned("checkpoint", str(failed)))  # what ends the run already is told by others
        finally:
            self._pool.shutdown()

    def _begin(self, *, due: bool) -> None:
        if self._run.parallel.rank != 0:
            return  # where each process has everything, one of them writes
        self._wait_for_earlier()
        if self._constant is None:
            self._constant = constants(self._run)
        parts, state = contents(self._run)
        copied = self._has_room(sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values()))
        if copied:
            parts = {name: self._copies.of(tensors) for name, tensors in parts.items()}
        save = self._last = _Save(self._run.step, due)
        self._written = self._pool.submit(self._write, save, parts, {**self._constant, **state})
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
        """Whether a copy leaves at least half of the memory that is free: the next window wants some of it, too."""
        if not self._run.config.checkpoints.in_background:
            return False
        needed, free = nbytes - self._copies.nbytes, self._run.host.memory_available()
        if free is None or needed <= free // 2:
            return True
        if not self._told_room:
            self._told_room = True
            text = (
                f"training waits while checkpoints are written: a copy of {bytes_text(nbytes)} would take more than "
                f"half of the host memory that is free ({bytes_text(free)})"
            )
            self._run.sink.emit(Noted("checkpoint", text))
        return False

    def _write(self, save: _Save, parts: Mapping[str, Tensors], state: Mapping[str, JSON]) -> Path:
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
                progress=run.progress,
                go_on=self._go_on,
            )
        except CheckpointError as error:
            save.ended(None, str(error))
            raise
        save.ended(made, "")
        return made

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Abandoned("the checkpoint was given up: the run was stopped at once")

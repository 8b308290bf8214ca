"""One save on its way to the disk: how far it is, what there is to tell, and who waits for it.

It is written to by the thread that writes the files, and read by the one that trains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from supertuner.core.errors import CheckpointError
from supertuner.core.events import Event

SaveCallback: TypeAlias = Callable[[Path | None, str], None]
"""Called once: with where the checkpoint is, or None and why there is none. Possibly by the thread that writes."""


class SaveAbandonedError(CheckpointError):
    """A save that was given up on the way, since nobody waits for it."""


@dataclass(eq=False, slots=True)
class SaveJob:
    """It is the sink and the progress of the thread that writes: what is said is told by the thread that trains, and
    how far it is is shown when that one waits. Displays and signs of life are of training, and need expect no other."""

    step: int
    required: bool
    """Whether the run ends if it fails."""
    events: list[Event] = field(default_factory=list)
    nbytes: int = 0
    """What is to be written by this process; 0: that is not known yet."""
    done_bytes: int = 0
    """Of it."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def add_callback(self, callback: SaveCallback) -> None:
        """Have it called once this is on disk; at once if it is."""
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

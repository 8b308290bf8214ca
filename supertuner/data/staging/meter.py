"""The bytes that staging has taken, checked against the budget before each file is stored; threads share one."""

from __future__ import annotations

import threading

from supertuner.core.errors import DoesNotFit
from supertuner.core.host import Host
from supertuner.core.types import MIB, bytes_text
from supertuner.data.staging.budget import Budget, message, reserve

_LOOK_EVERY = 64 * MIB
"""Bytes between two looks at the machine's available memory: other programs take some, too."""


class Meter:
    """Counts raw bytes seen and stored bytes taken. Crossing the budget is DoesNotFit, with an estimate of the rest."""

    def __init__(
        self, dataset: str, bound: Budget, host: Host | None, files: int, raw_total: int, taken: int = 0
    ) -> None:
        """`taken`: what the arena takes beside the files."""
        self._dataset = dataset
        self._bound = bound
        self._host = host
        self._files = files
        self._raw_total = raw_total
        self._lock = threading.Lock()
        self._look_at = _LOOK_EVERY
        self._raw = 0
        self._beside = taken
        self.taken = taken

    def take(self, raw: int, stored: int) -> None:
        """Count a file that is about to be stored; DoesNotFit if it must not be."""
        with self._lock:
            self._raw += raw
            self.taken += stored
            taken = self.taken
            look = taken >= self._look_at
            if look:
                self._look_at = taken + _LOOK_EVERY
        if taken > self._bound.nbytes:
            raise DoesNotFit(message(self._dataset, self._forecast(), self._files, self._bound, estimated=True))
        if look:
            self._look()

    def give_back(self, raw: int, stored: int) -> None:
        """A counted file was not stored after all."""
        with self._lock:
            self._raw -= raw
            self.taken -= stored

    def ran_out(self, why: str) -> str:
        """The message for a file system that was full before the budget was used: others write to it, too."""
        return (
            f"datasets[{self._dataset}] stopped after {bytes_text(self.taken)}: {why}; about "
            f"{bytes_text(self._forecast() - self.taken)} are missing"
        )

    def _forecast(self) -> int:
        """What the whole dataset would take, by what it took so far."""
        files = (self.taken - self._beside) / max(1, self._raw) * self._raw_total
        return max(self.taken, self._beside + int(files))

    def _look(self) -> None:
        left = self._host.memory_available() if self._host else None
        if self._host is None or left is None:
            return
        kept = reserve(self._host.memory_total())
        if left < kept:
            raise DoesNotFit(
                f"datasets[{self._dataset}] stopped after {bytes_text(self.taken)}: only {bytes_text(left)} of memory "
                f"are still available, and {bytes_text(kept)} are kept for other programs; about "
                f"{bytes_text(self._forecast() - self.taken)} are missing; free memory, use fewer files (limit), "
                'or set type: "disk"'
            )

"""Measures the free memory or disk space for an arena, and meters what staging stores against its budget."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from supertuner.core.errors import DoesNotFitError
from supertuner.core.host import HostFacts
from supertuner.core.types import MIB, bytes_text
from supertuner.data.staging import budget as fit

_MEMORY_FILE_SYSTEMS = frozenset(("tmpfs", "ramfs"))
_MEMORY_CHECK_BYTES = 64 * MIB
"""Stored bytes between two checks of the machine's available memory, which other programs use, too."""


def measure_capacity(home: Path, host: HostFacts, memory_limit_gb: float | None) -> fit.StagingCapacity:
    mounts = (host.root / "proc/self/mountinfo").read_text()
    return fit.StagingCapacity(
        in_memory=fit.file_system_type(mounts, os.path.realpath(home)) in _MEMORY_FILE_SYSTEMS,
        free_bytes=host.free_bytes(home),
        memory_total=host.memory_total(),
        memory_available=host.memory_available(),
        limit_bytes=fit.memory_limit_bytes(memory_limit_gb),
    )


class BudgetMeter:
    """Counts raw and stored bytes; all staging threads share one meter.

    Raises DoesNotFitError, with an estimate of the missing bytes, as soon as a file would exceed the budget.
    """

    def __init__(
        self,
        dataset: str,
        budget: fit.StagingBudget,
        host: HostFacts | None,
        files: int,
        raw_total: int,
        overhead_bytes: int = 0,
    ) -> None:
        """`overhead_bytes` is what the arena stores besides the files. With `host`, free memory is checked, too."""
        self._dataset, self._budget, self._host, self._files = dataset, budget, host, files
        self._total_raw_bytes, self._overhead_bytes = raw_total, overhead_bytes
        self._lock = threading.Lock()
        self._next_memory_check = _MEMORY_CHECK_BYTES
        self._raw_bytes, self.stored_bytes = 0, overhead_bytes

    def charge(self, raw_bytes: int, nbytes: int) -> None:
        """Count files that are about to be stored. Raises DoesNotFitError if they must not be stored."""
        with self._lock:
            self._raw_bytes += raw_bytes
            self.stored_bytes += nbytes
            total = self.stored_bytes
            check_memory = total >= self._next_memory_check
            if check_memory:
                self._next_memory_check = total + _MEMORY_CHECK_BYTES
        if total > self._budget.nbytes:
            fit.require_fits(self._dataset, self._forecast(), self._files, self._budget, about="about ")
        if check_memory:
            self._require_memory()

    def refund(self, raw_bytes: int, nbytes: int) -> None:
        """Subtract a counted file that was not stored after all."""
        with self._lock:
            self._raw_bytes -= raw_bytes
            self.stored_bytes -= nbytes

    def out_of_space_message(self, reason: str) -> str:
        """Message for a file system that was full before the budget was used up, because other programs write to it."""
        return (
            f"datasets[{self._dataset}] stopped after {bytes_text(self.stored_bytes)}: {reason}; about "
            f"{bytes_text(self._forecast() - self.stored_bytes)} are missing"
        )

    def _forecast(self) -> int:
        """Estimated stored bytes of the whole dataset, extrapolated from what is stored so far."""
        files = (self.stored_bytes - self._overhead_bytes) / max(1, self._raw_bytes) * self._total_raw_bytes
        return max(self.stored_bytes, self._overhead_bytes + int(files))

    def _require_memory(self) -> None:
        available = self._host.memory_available() if self._host else None
        if self._host is None or available is None:
            return
        reserved = fit.reserved_memory_bytes(self._host.memory_total())
        if available < reserved:
            raise DoesNotFitError(
                f"datasets[{self._dataset}] stopped after {bytes_text(self.stored_bytes)}: only "
                f"{bytes_text(available)} of memory are still available, and {bytes_text(reserved)} are kept for "
                f"other programs; about {bytes_text(self._forecast() - self.stored_bytes)} are missing; free memory, "
                'use fewer files (limit), or set type: "disk"'
            )

"""The bytes that staging has taken, checked against the budget before each file is stored; threads share one."""

from __future__ import annotations

import threading

from supertuner.core.errors import DoesNotFitError
from supertuner.core.host import HostFacts
from supertuner.core.types import MIB, bytes_text
from supertuner.data.staging.budget import StagingBudget, does_not_fit_message, reserved_memory_bytes

_MEMORY_CHECK_BYTES = 64 * MIB
"""Bytes between two looks at the machine's available memory: other programs take some, too."""


class BudgetMeter:
    """Counts raw bytes seen and stored bytes taken. Crossing the budget is DoesNotFit, with an estimate of the rest."""

    def __init__(
        self,
        dataset: str,
        budget: StagingBudget,
        host: HostFacts | None,
        files: int,
        raw_total: int,
        overhead_bytes: int = 0,
    ) -> None:
        """`taken`: what the arena takes beside the files."""
        self._dataset = dataset
        self._budget = budget
        self._host = host
        self._files = files
        self._total_raw_bytes = raw_total
        self._lock = threading.Lock()
        self._next_memory_check = _MEMORY_CHECK_BYTES
        self._raw_bytes = 0
        self._overhead_bytes = overhead_bytes
        self.stored_bytes = overhead_bytes

    def charge(self, raw_bytes: int, nbytes: int) -> None:
        """Count a file that is about to be stored; DoesNotFit if it must not be."""
        with self._lock:
            self._raw_bytes += raw_bytes
            self.stored_bytes += nbytes
            total = self.stored_bytes
            check_memory = total >= self._next_memory_check
            if check_memory:
                self._next_memory_check = total + _MEMORY_CHECK_BYTES
        if total > self._budget.nbytes:
            raise DoesNotFitError(
                does_not_fit_message(self._dataset, self._forecast(), self._files, self._budget, estimated=True)
            )
        if check_memory:
            self._require_memory()

    def refund(self, raw_bytes: int, nbytes: int) -> None:
        """A counted file was not stored after all."""
        with self._lock:
            self._raw_bytes -= raw_bytes
            self.stored_bytes -= nbytes

    def out_of_space_message(self, reason: str) -> str:
        """The message for a file system that was full before the budget was used: others write to it, too."""
        return (
            f"datasets[{self._dataset}] stopped after {bytes_text(self.stored_bytes)}: {reason}; about "
            f"{bytes_text(self._forecast() - self.stored_bytes)} are missing"
        )

    def _forecast(self) -> int:
        """What the whole dataset would take, by what it took so far."""
        files = (self.stored_bytes - self._overhead_bytes) / max(1, self._raw_bytes) * self._total_raw_bytes
        return max(self.stored_bytes, self._overhead_bytes + int(files))

    def _require_memory(self) -> None:
        available = self._host.memory_available() if self._host else None
        if self._host is None or available is None:
            return
        reserved = reserved_memory_bytes(self._host.memory_total())
        if available < reserved:
            raise DoesNotFitError(
                f"datasets[{self._dataset}] stopped after {bytes_text(self.stored_bytes)}: only {bytes_text(available)} of memory "
                f"are still available, and {bytes_text(reserved)} are kept for other programs; about "
                f"{bytes_text(self._forecast() - self.stored_bytes)} are missing; free memory, use fewer files (limit), "
                'or set type: "disk"'
            )

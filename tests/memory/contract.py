"""The contract of a memory driver: one test suite for the emulator, for the fake libcuda behind cuda.py, and for a GPU.

A test file provides a fixture `bench` (see `DriverBench`) and a class that inherits `DriverContract`. Sources: CUDA's
documentation of cuMemAdvise, cuMemPrefetchAsync, cuMemRangeGetAttribute and cuMemDiscardBatchAsync; where it is silent,
docs/emulator.md. A test that only the emulator passes shows a bug in the emulator.
"""

from __future__ import annotations

from tests.memory.bench import DriverBench
from tests.memory.contract_advice import AdviceContract
from tests.memory.contract_allocation import AllocationContract
from tests.memory.contract_movement import MovementContract

__all__ = ["DriverBench", "DriverContract"]


class DriverContract(AllocationContract, MovementContract, AdviceContract):
    """All tests of the contract."""

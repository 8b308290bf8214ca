"""The laws of a memory driver: one suite for the software superchip, for the fake libcuda below cuda.py, and for a GPU.

A test file gives a fixture `bench` (see `Bench`) and a class that inherits `Laws`. A law asks the driver what the
machine can do and skips where it does not apply, so every profile runs all of them. Sources: CUDA's documentation of
cuMemAdvise, cuMemPrefetchAsync, cuMemRangeGetAttribute and cuMemDiscardBatchAsync; where it is silent, docs/model.md.
A law that holds only in the model is a bug in the model.
"""

from __future__ import annotations

from tests.memory.bench import DriverBench
from tests.memory.laws_of_advice import AdviceLaws
from tests.memory.laws_of_allocation import AllocationLaws
from tests.memory.laws_of_movement import MovementLaws

__all__ = ["DriverBench", "DriverLaws"]


class DriverLaws(AllocationLaws, MovementLaws, AdviceLaws):
    """All of them."""

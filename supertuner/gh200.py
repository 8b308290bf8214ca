"""The seeds' names, for scripts that were written against them. Nothing of ours imports this file.

    from supertuner.gh200 import optimize_batch_for_gh200, prefer_cpu_residency

What differs from the seeds: every call says what became of it, the ramp changes only where a window begins and knows
how many processes there are, and hints do something on stock PyTorch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from supertuner.memory.hints.api import (
    Counted,
    Outcome,
    Status,
    gh200_uvm_enabled,
    hints_enabled,
    optimize_batch_for_gh200,
    prefer_cpu_residency,
    prefer_cpu_residency_batch,
    prefer_gpu_residency,
    prefer_gpu_residency_batch,
    prefetch_batch_to_device,
    prefetch_to_device,
    set_uvm_hint_override,
)
from supertuner.optim.schedule import Ramp, accumulation, window_samples

__all__ = [
    "Counted",
    "GH200GradientRamp",
    "Outcome",
    "Status",
    "gh200_uvm_enabled",
    "hints_enabled",
    "optimize_batch_for_gh200",
    "prefer_cpu_residency",
    "prefer_cpu_residency_batch",
    "prefer_gpu_residency",
    "prefer_gpu_residency_batch",
    "prefetch_batch_to_device",
    "prefetch_to_device",
    "set_uvm_hint_override",
]


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive windows of equally many micro-batches."""

    begin: int
    """The first micro-batch."""
    steps: int


class GH200GradientRamp:
    """How many micro-batches a window takes, for a loop that sets `gradient_accumulation_steps` before each of them.

        ramp = GH200GradientRamp(4, 32, 400, train_batch_size=1, world_size=1)
        accelerator.gradient_accumulation_steps = ramp.gradient_accumulation_steps(micro_batch)

    A function of the micro-batch alone: nothing to save, and a resumed loop goes on alike. It is constant inside a
    window, so no gradient is weighted by a number that was not the window's. All micro-batches are taken to be full.
    """

    def __init__(
        self,
        initial_effective_batch_size: int,
        target_effective_batch_size: int,
        batch_rampup_steps: int,
        train_batch_size: int = 1,
        world_size: int = 1,
    ) -> None:
        samples = batch_rampup_steps * train_batch_size
        self.ramp = Ramp(initial_effective_batch_size, target_effective_batch_size, samples)
        self._parts = _parts(self.ramp, train_batch_size, world_size)

    def gradient_accumulation_steps(self, micro_batch: int) -> int:
        """Of the window that micro-batch `micro_batch` of each process is in; the first is 0."""
        return self._part(micro_batch).steps

    def begins_window(self, micro_batch: int) -> bool:
        part = self._part(micro_batch)
        return (micro_batch - part.begin) % part.steps == 0

    def ends_window(self, micro_batch: int) -> bool:
        """Whether the optimizer steps after it."""
        return self.begins_window(micro_batch + 1)

    def _part(self, micro_batch: int) -> _Part:
        assert micro_batch >= 0, f"micro-batch {micro_batch}"
        return self._parts[bisect_right(self._parts, micro_batch, key=lambda part: part.begin) - 1]


def _parts(ramp: Ramp, batch_size: int, processes: int) -> tuple[_Part, ...]:
    """The ramp, window by window, as far as it grows; the last part goes on for ever."""
    found: list[_Part] = []
    micro = consumed = 0
    while True:
        steps = accumulation(window_samples(consumed, ramp), batch_size, processes)
        if not found or found[-1].steps != steps:
            found.append(_Part(micro, steps))
        if consumed >= ramp.samples:
            return tuple(found)
        micro, consumed = micro + steps, consumed + steps * batch_size * processes

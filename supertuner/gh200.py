"""The names of the GH200 forks, for scripts written against them. No module of this package imports this file.

    from supertuner.gh200 import optimize_batch_for_gh200, prefer_cpu_residency

Differences from the forks: every call returns its outcome, the ramp changes only at the start of a window and takes the
world size into account, and hints work with stock PyTorch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from supertuner.memory.hints.api import (
    BatchHintSummary,
    HintOutcome,
    HintStatus,
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
from supertuner.optim.schedule import BatchRamp, accumulation_steps, window_samples

__all__ = [
    "BatchHintSummary",
    "GH200GradientRamp",
    "HintOutcome",
    "HintStatus",
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
class _RampSegment:
    """Consecutive windows with the same number of micro-batches."""

    first_micro_batch: int
    accumulation_steps: int


class GH200GradientRamp:
    """The number of micro-batches per window, for a loop that sets `gradient_accumulation_steps` before each of them.

        ramp = GH200GradientRamp(4, 32, 400, train_batch_size=1, world_size=1)
        accelerator.gradient_accumulation_steps = ramp.gradient_accumulation_steps(micro_batch)

    It is a function of the micro-batch index alone: there is no state to save, and a resumed loop gets the same values.
    It is constant inside a window, so that all gradients of a window have the same weight. All micro-batches are
    assumed to be full.
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
        self.ramp = BatchRamp(initial_effective_batch_size, target_effective_batch_size, samples)
        self._segments = _ramp_segments(self.ramp, train_batch_size, world_size)

    def gradient_accumulation_steps(self, micro_batch: int) -> int:
        """The number of micro-batches of the window that contains micro-batch `micro_batch` of each rank, from 0."""
        return self._segment_at(micro_batch).accumulation_steps

    def begins_window(self, micro_batch: int) -> bool:
        segment = self._segment_at(micro_batch)
        return (micro_batch - segment.first_micro_batch) % segment.accumulation_steps == 0

    def ends_window(self, micro_batch: int) -> bool:
        """Whether the optimizer step follows this micro-batch."""
        return self.begins_window(micro_batch + 1)

    def _segment_at(self, micro_batch: int) -> _RampSegment:
        assert micro_batch >= 0, f"micro-batch {micro_batch}"
        return self._segments[bisect_right(self._segments, micro_batch, key=lambda part: part.first_micro_batch) - 1]


def _ramp_segments(ramp: BatchRamp, batch_size: int, world_size: int) -> tuple[_RampSegment, ...]:
    """The segments of the ramp; the last one has no end."""
    segments: list[_RampSegment] = []
    micro_batch = consumed = 0
    while True:
        steps = accumulation_steps(window_samples(consumed, ramp), batch_size, world_size)
        if not segments or segments[-1].accumulation_steps != steps:
            segments.append(_RampSegment(micro_batch, steps))
        if consumed >= ramp.samples:
            return tuple(segments)
        micro_batch, consumed = micro_batch + steps, consumed + steps * batch_size * world_size

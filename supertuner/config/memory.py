"""Settings of the unified-memory engine: the seeds' `gh200_optimizations`, and what happens when GPU memory is full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.block import MEMORY_ENGINE, Block, Remark


class Gh200Optimizations(Block):
    enable_uvm_hints: Annotated[bool | None, MEMORY_ENGINE] = None
    """Force residency hints on or off; unset: on where the machine supports them and something asks for them."""
    enable_batch_size_rampup: bool = False
    """Grow the effective batch size at the beginning of training."""
    initial_effective_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Samples per optimizer step where the ramp starts; a ramp needs it."""
    target_effective_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Samples per optimizer step where the ramp ends; unset: what `train` says."""
    batch_rampup_steps: Annotated[int, Field(ge=1)] = 400
    """Length of the ramp in micro-batches of `train.batch_size` samples."""

    def contradictions(self) -> Iterator[Remark]:
        initial, target = self.initial_effective_batch_size, self.target_effective_batch_size
        if initial is not None and target is not None and target < initial:
            yield Remark(
                "target_effective_batch_size",
                f"{target} is below initial_effective_batch_size {initial}; a ramp goes up",
                ("initial_effective_batch_size",),
            )
        if self.enable_batch_size_rampup and initial is None:
            message = "is missing: enable_batch_size_rampup is true, and a ramp starts somewhere"
            yield Remark("initial_effective_batch_size", message, ("initial_effective_batch_size",))

    def doubts(self) -> Iterator[Remark]:
        for name in ("initial_effective_batch_size", "target_effective_batch_size"):
            if getattr(self, name) is not None and not self.enable_batch_size_rampup:
                yield Remark(name, "has no effect while enable_batch_size_rampup is false")


class Overflow(Block):
    enabled: Annotated[bool, MEMORY_ENGINE] = False
    """Let allocations beyond GPU memory continue in managed memory instead of failing."""
    oversubscription_ratio: Annotated[float, Field(ge=1.0, le=100.0), MEMORY_ENGINE] = 5.0
    """Hard limit of all live bytes, as a multiple of GPU memory."""
    access_pattern: Annotated[Literal["gpu_first", "balanced", "cpu_first"], MEMORY_ENGINE] = "gpu_first"
    """Which memory an allocation prefers once there is a choice."""


class MemorySettings(Block):
    overflow: Overflow = Overflow()
    """What happens when GPU memory is full."""

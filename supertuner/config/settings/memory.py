"""Settings of the unified-memory engine: the seeds' `gh200_optimizations`, and what happens when GPU memory is full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue


class Gh200Optimizations(SettingsBlock):
    enable_uvm_hints: bool | None = None
    """Force residency hints on or off; unset: on where the machine supports them and something asks for them."""
    enable_batch_size_rampup: bool = False
    """Grow the effective batch size at the beginning of training."""
    initial_effective_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Samples per optimizer step where the ramp starts; a ramp needs it."""
    target_effective_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Samples per optimizer step where the ramp ends; unset: what `train` says."""
    batch_rampup_steps: Annotated[int, Field(ge=1)] = 400
    """Length of the ramp in micro-batches of `train.batch_size` samples."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        initial, target = self.initial_effective_batch_size, self.target_effective_batch_size
        if initial is not None and target is not None and target < initial:
            yield SettingsIssue(
                "target_effective_batch_size",
                f"{target} is below initial_effective_batch_size {initial}; a ramp goes up",
                ("initial_effective_batch_size",),
            )
        if self.enable_batch_size_rampup and initial is None:
            message = "is missing: enable_batch_size_rampup is true, and a ramp starts somewhere"
            yield SettingsIssue("initial_effective_batch_size", message, ("initial_effective_batch_size",))

    def warnings(self) -> Iterator[SettingsIssue]:
        for name in ("initial_effective_batch_size", "target_effective_batch_size"):
            if getattr(self, name) is not None and not self.enable_batch_size_rampup:
                yield SettingsIssue(name, "has no effect while enable_batch_size_rampup is false")


AccessPattern: TypeAlias = Literal["gpu_first", "balanced", "cpu_first"]


class TensorClassPatterns(SettingsBlock):
    weights: AccessPattern | None = None
    """Frozen weights."""
    state: AccessPattern | None = None
    """Gradients and optimizer state of what is trained."""


class OverflowSettings(SettingsBlock):
    enabled: bool = False
    """Let allocations beyond GPU memory continue in managed memory instead of failing."""
    oversubscription_ratio: Annotated[float, Field(ge=1.0, le=100.0)] = 5.0
    """Hard limit of all live bytes, as a multiple of GPU memory; beyond it an allocation fails."""
    access_pattern: AccessPattern = "gpu_first"
    """Where managed memory prefers to be: the GPU; wherever it is used; or the host, read over the link."""
    class_patterns: TensorClassPatterns = TensorClassPatterns()
    """Another access pattern for a class of tensors; unset: as all the others."""
    gpu_reserve_gb: Annotated[float | None, Field(ge=0)] = None
    """GPU memory that stays free: an allocation that would leave less is managed; unset: 5 % of it."""
    host_floor_gb: Annotated[float | None, Field(ge=0)] = None
    """Host memory that spilling leaves free, or else an allocation fails; unset: 10 % of it."""

    def warnings(self) -> Iterator[SettingsIssue]:
        for name in sorted(self.model_fields_set - {"enabled"}):
            if not self.enabled and getattr(self, name) != type(self).model_fields[name].default:
                yield SettingsIssue(name, "has no effect while enabled is false")


class MemorySettings(SettingsBlock):
    overflow: OverflowSettings = OverflowSettings()
    """What happens when GPU memory is full."""

"""Settings of residency hints, the batch-size ramp (the GH200 forks' `gh200_optimizations`), and memory overflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue


class Gh200Optimizations(SettingsBlock):
    enable_uvm_hints: bool | None = None
    """Turn residency hints on or off. Unset: on if the machine supports them and another setting needs them."""
    enable_batch_size_rampup: bool = False
    """Increase the effective batch size at the beginning of training."""
    initial_effective_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Samples per optimizer step at the start of the ramp; required for a ramp."""
    target_effective_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Samples per optimizer step at the end of the ramp. Unset: `train.batch_size` ×
    `train.gradient_accumulation_steps`."""
    batch_rampup_steps: Annotated[int, Field(ge=1)] = 400
    """Length of the ramp in micro-batches of `train.batch_size` samples."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        initial, target = self.initial_effective_batch_size, self.target_effective_batch_size
        if initial is not None and target is not None and target < initial:
            message = f"{target} is below initial_effective_batch_size {initial}; the ramp must not decrease"
            yield SettingsIssue("target_effective_batch_size", message, ("initial_effective_batch_size",))
        if self.enable_batch_size_rampup and initial is None:
            message = "is missing: enable_batch_size_rampup is true, and the ramp needs a start"
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
    """Gradients and optimizer state."""


class OverflowSettings(SettingsBlock):
    enabled: bool = False
    """Let allocations that exceed GPU memory use managed memory instead of failing."""
    oversubscription_ratio: Annotated[float, Field(ge=1.0, le=100.0)] = 5.0
    """Hard limit of all allocated bytes, as a multiple of GPU memory; an allocation beyond it fails."""
    access_pattern: AccessPattern = "gpu_first"
    """Preferred location of managed memory: the GPU ("gpu_first"); none, the driver migrates pages ("balanced"); or the
    host, which the GPU reads over the link ("cpu_first")."""
    class_patterns: TensorClassPatterns = TensorClassPatterns()
    """Access patterns for classes of tensors. Unset: `access_pattern`."""
    gpu_reserve_gb: Annotated[float | None, Field(ge=0)] = None
    """GPU memory to keep free, in GB of 2^30 bytes: an allocation that would leave less uses managed memory. Unset: 5 %
    of GPU memory."""
    host_floor_gb: Annotated[float | None, Field(ge=0)] = None
    """Host memory to keep free, in GB of 2^30 bytes: an allocation that would leave less fails. Unset: 10 % of host
    memory."""

    def warnings(self) -> Iterator[SettingsIssue]:
        for name in sorted(self.model_fields_set - {"enabled"}):
            if not self.enabled and getattr(self, name) != type(self).model_fields[name].default:
                yield SettingsIssue(name, "has no effect while enabled is false")


class MemorySettings(SettingsBlock):
    overflow: OverflowSettings = OverflowSettings()
    """What happens when GPU memory is full."""

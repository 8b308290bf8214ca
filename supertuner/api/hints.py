"""Residency hints for tensors in any torch program. Every function returns the outcome of its hint, and never raises
because a machine does not support one.

Calling a function requests its hint. `enable(False)`, or `gh200_optimizations.enable_uvm_hints: false` in the
configuration of a run or in the environment, turns all of them off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from supertuner.memory.hints.api import (
    BatchHintSummary,
    DeviceLike,
    HintOutcome,
    HintStatus,
    ResidencyHints,
    requested_hints,
    set_uvm_hint_override,
)
from supertuner.memory.hints.policy import named_tensors

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchHintSummary",
    "HintOutcome",
    "HintStatus",
    "accessed_by",
    "enable",
    "place_batch",
    "prefer_cpu",
    "prefer_gpu",
    "prefetch",
    "read_mostly",
]


def enable(on: bool | None) -> None:
    """Turn hints on or off for this process, whatever the configuration says; None: as configured."""
    set_uvm_hint_override(on)


def prefetch(tensor: torch.Tensor, device: DeviceLike = None) -> HintOutcome:
    """Start migrating a tensor's pages to a device; None: the current GPU.

    Pages of ordinary memory are waited for, to verify that they have moved.
    """
    return _issue(lambda hints: hints.prefetch(tensor, device))


def prefer_cpu(tensor: torch.Tensor) -> HintOutcome:
    """Prefer host memory for a tensor. Moves nothing."""
    return _issue(lambda hints: hints.prefer_cpu(tensor))


def prefer_gpu(tensor: torch.Tensor) -> HintOutcome:
    """Prefer GPU memory for a tensor. Moves nothing."""
    return _issue(lambda hints: hints.prefer_gpu(tensor))


def accessed_by(tensor: torch.Tensor, device: DeviceLike = None) -> HintOutcome:
    """Map a tensor for a device without migrating it; None: the current GPU."""
    return _issue(lambda hints: hints.accessed_by(tensor, device))


def read_mostly(tensor: torch.Tensor) -> HintOutcome:
    """Let each processor that reads a tensor have its own copy."""
    return _issue(lambda hints: hints.read_mostly(tensor))


def place_batch(batch: object) -> BatchHintSummary:
    """Prefetch every tensor of a batch (nested dicts, lists, dataclasses) to the current GPU, as the trainer does.

    Does not wait for the pages. Returns the outcomes with their counts.
    """
    hints = requested_hints()
    if isinstance(hints, HintOutcome):
        return BatchHintSummary.from_counts({(hints.status, hints.reason): sum(1 for _ in named_tensors(batch))})
    return BatchHintSummary.from_counts(hints.place_batch(batch))


def _issue(hint: Callable[[ResidencyHints], HintOutcome]) -> HintOutcome:
    hints = requested_hints()
    return hints if isinstance(hints, HintOutcome) else hint(hints)

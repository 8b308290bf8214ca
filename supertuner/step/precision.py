"""Number formats of the forward and backward pass, and the loss scale that fp16 needs.

Trained parameters are always fp32; autocast computes in bf16 or fp16. The smallest numbers of fp16 are too large for
gradients, so with fp16 the loss is multiplied by a scale before the backward pass, and gradients are divided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from supertuner.core.errors import CheckpointError
from supertuner.core.types import JSON

PrecisionName: TypeAlias = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def latent_storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format in which latents are cached: bf16 for 16-bit runs, because large latents overflow fp16."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


@dataclass(frozen=True, slots=True)
class ComputePrecision:
    name: PrecisionName
    device: torch.device
    caches_casts: bool = True
    """Whether autocast keeps casts of trained weights until the forward pass ends. Must be off where weights are
    gathered block by block (FSDP): the kept casts would add up to a copy of the whole model."""

    @property
    def dtype(self) -> torch.dtype:
        """The format of computation, and of weights that are not trained."""
        return DTYPES[self.name]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of every forward pass."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=self.caches_casts)

    def scaler(self) -> LossScaler | None:
        return LossScaler() if self.name == "fp16" else None


class LossScaler:
    """The loss scale of fp16: halved after an overflow, doubled after 2,000 consecutive windows without one.

    Its state is two numbers on the host, updated from the one host synchronization of a window. It is the same on any
    device and complete in a checkpoint.
    """

    INITIAL_SCALE = 65536.0
    MAX_SCALE = 2.0**24
    MIN_SCALE = 1.0
    GROWTH_INTERVAL = 2000

    def __init__(self) -> None:
        self.scale = self.INITIAL_SCALE
        self.streak = 0
        """Windows since the last overflow or growth."""

    @property
    def can_decrease(self) -> bool:
        """Whether an overflow can still be caused by the scale: it is above its minimum."""
        return self.scale > self.MIN_SCALE

    def update(self, overflowed: bool) -> None:
        """Adapt the scale to the outcome of a window."""
        if overflowed:
            self.scale, self.streak = max(self.scale / 2, self.MIN_SCALE), 0
        elif self.streak + 1 >= self.GROWTH_INTERVAL:
            self.scale, self.streak = min(self.scale * 2, self.MAX_SCALE), 0
        else:
            self.streak += 1

    def state(self) -> dict[str, JSON]:
        return {"scale": self.scale, "streak": self.streak}

    def load(self, state: Mapping[str, JSON]) -> None:
        scale, streak = state.get("scale"), state.get("streak")
        if not isinstance(scale, int | float) or not isinstance(streak, int) or scale <= 0 or streak < 0:
            raise CheckpointError(
                f"the saved state of the loss scaler is {dict(state)}; it needs a scale above 0 and a streak of "
                "at least 0; resume from another checkpoint"
            )
        self.scale, self.streak = float(scale), streak

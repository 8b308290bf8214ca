"""Number formats of the forward and backward pass, and the loss scale that fp16 needs.

What is trained is fp32 always; bf16 and fp16 are what autocast computes in. fp16's smallest numbers are too large for
gradients, so its loss is multiplied before the backward pass and gradients are divided after it.
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
    """Latents of runs in 16 bits are kept in bf16: fp16 has no room for large ones."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


@dataclass(frozen=True, slots=True)
class ComputePrecision:
    name: PrecisionName
    device: torch.device
    caches_casts: bool = True
    """Trained weights that were cast for one layer are kept for others until the forward pass is over. Where weights
    come and go block by block, that would be a copy of all of them."""

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in, and what weights that are not trained are kept in."""
        return DTYPES[self.name]

    def autocast(self) -> AbstractContextManager[Any]:
        """Around every forward pass."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=self.caches_casts)

    def scaler(self) -> LossScaler | None:
        return LossScaler() if self.name == "fp16" else None


class LossScaler:
    """fp16's loss scale: halved by an overflow, doubled after 2,000 windows in a row without one.

    Plain numbers on the host, decided by the one check of a window: its state is complete and the same on any device.
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
        """Whether an overflow may still be the scale's fault."""
        return self.scale > self.MIN_SCALE

    def update(self, overflowed: bool) -> None:
        """Learn from a window."""
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
            raise CheckpointError(f"the loss scaler's state is {dict(state)}; it has a scale above 0 and a streak")
        self.scale, self.streak = float(scale), streak

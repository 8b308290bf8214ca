"""What goes into one forward pass: clean latents, their noise, noise levels, and what the model is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """Samples of one shape. Noise and levels are functions of each sample's position, not of the batch it is in."""

    latents: torch.Tensor
    noise: torch.Tensor
    """fp32, of the latents' shape."""
    levels: torch.Tensor
    """fp32, one per sample: 0 is clean, 1 is noise."""
    text: Mapping[str, torch.Tensor]
    conditions: Mapping[str, torch.Tensor]
    names: tuple[str, ...] = ()
    """Which samples these are, for people."""

    def __len__(self) -> int:
        return len(self.levels)

    def to(self, device: torch.device) -> StepBatch:
        """The same batch on a device; the copies are begun, not waited for."""
        if self.latents.device == device:
            return self

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            latents=moved(self.latents),
            noise=moved(self.noise),
            levels=moved(self.levels),
            text={name: moved(one) for name, one in self.text.items()},
            conditions={name: moved(one) for name, one in self.conditions.items()},
        )

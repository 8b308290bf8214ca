"""What goes into one forward pass: clean latents, their noise, noise levels, and what the model is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """Samples of one shape. Noise and levels are functions of each sample's position, not of the batch it is in."""

    latents: torch.Tensor
    noise: torch.Tensor
    """fp32, of the latents' shape."""
    sigmas: torch.Tensor
    """fp32, one per sample: 0 is clean, 1 is noise."""
    text: Mapping[str, torch.Tensor]
    conditions: Mapping[str, torch.Tensor]
    positions: tuple[int, ...] = ()
    """Which samples these are: their positions in the order."""
    loss_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What samples count beside their noise level, where they differ in it: `weight`, one number per sample; `mask`,
    one for each place of the latents; `prior`, whether a sample keeps what the model knew."""
    idle: bool = False
    """It is computed only because other processes compute now, and needs this one's part of the model: another process
    has the same samples, and they count there."""

    def __len__(self) -> int:
        return len(self.sigmas)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.latents, self.noise, self.sigmas)
        yield from (*self.text.values(), *self.conditions.values(), *self.loss_inputs.values())

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor under a name that says what it is; text, conditions and counts keep theirs behind a dot."""
        tensors_by_name = {"latents": self.latents, "noise": self.noise, "levels": self.sigmas}
        tensors_by_name.update({f"text.{name}": one for name, one in self.text.items()})
        tensors_by_name.update({f"conditions.{name}": one for name, one in self.conditions.items()})
        tensors_by_name.update({f"counts.{name}": one for name, one in self.loss_inputs.items()})
        return tensors_by_name

    def to(self, device: torch.device) -> StepBatch:
        """The same batch on a device; the copies are begun, not waited for."""
        if self.latents.device == device:
            return self
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> StepBatch:
        """The same batch in memory that a GPU fetches from without the CPU."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def map_tensors(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> StepBatch:
        """The same batch with each tensor changed into another."""
        return replace(
            self,
            latents=transform(self.latents),
            noise=transform(self.noise),
            sigmas=transform(self.sigmas),
            text={name: transform(one) for name, one in self.text.items()},
            conditions={name: transform(one) for name, one in self.conditions.items()},
            loss_inputs={name: transform(one) for name, one in self.loss_inputs.items()},
        )

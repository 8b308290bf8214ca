"""The inputs of one forward pass: clean latents, noise, sigmas, text and conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """Samples of one shape. A sample's noise and sigma depend on its position in the run, not on the batch it is in."""

    latents: torch.Tensor
    noise: torch.Tensor
    """fp32, with the shape of the latents."""
    sigmas: torch.Tensor
    """fp32, one per sample: 0 is clean, 1 is pure noise."""
    text: Mapping[str, torch.Tensor]
    conditions: Mapping[str, torch.Tensor]
    positions: tuple[int, ...] = ()
    """The samples' positions in the order of the run."""
    loss_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Optional inputs of the loss: `weight`, one number per sample; `mask`, one number per element of the latents'
    space and time; `prior`, one flag per sample: the target is the untrained model's prediction (prior
    preservation)."""
    idle: bool = False
    """Whether this batch only takes part in other processes' forward and backward passes, which need this process's
    shard of the model. Its samples belong to another process and count there."""

    def __len__(self) -> int:
        return len(self.sigmas)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.latents, self.noise, self.sigmas)
        yield from (*self.text.values(), *self.conditions.values(), *self.loss_inputs.values())

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, for example `latents` or `text.embeds`."""
        tensors = {"latents": self.latents, "noise": self.noise, "levels": self.sigmas}
        for group, members in (("text", self.text), ("conditions", self.conditions), ("counts", self.loss_inputs)):
            tensors.update({f"{group}.{name}": tensor for name, tensor in members.items()})
        return tensors

    def to(self, device: torch.device) -> StepBatch:
        """The same batch on a device. The copies are started and may still be in progress on return."""
        if self.latents.device == device:
            return self
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> StepBatch:
        """The same batch in pinned host memory."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def map_tensors(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> StepBatch:
        """The same batch with `transform` applied to every tensor."""
        return replace(
            self,
            latents=transform(self.latents),
            noise=transform(self.noise),
            sigmas=transform(self.sigmas),
            text={name: transform(tensor) for name, tensor in self.text.items()},
            conditions={name: transform(tensor) for name, tensor in self.conditions.items()},
            loss_inputs={name: transform(tensor) for name, tensor in self.loss_inputs.items()},
        )

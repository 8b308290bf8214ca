"""Lion: the sign of an average of gradients as the update (Chen et al., arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    """Weights w, gradient g, average m: c = β₁m + (1 - β₁)g; w ← w - lr (sign c + λw); m ← β₂m + (1 - β₂)g.

    The weight decay λ is decoupled. Each weight's update depends only on its own gradients.
    """

    def __init__(
        self, weights: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(weights, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the training step computes the gradients"
        for group in self.param_groups:
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_device.setdefault(parameter.device, []).append(parameter)
            for parameters in by_device.values():
                self._update(parameters, group)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update weights of one device by one operator per formula for all tensors."""
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        averages = [self.state[parameter]["exp_avg"] for parameter in parameters]
        updates = torch._foreach_lerp(averages, gradients, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
        torch._foreach_lerp_(averages, gradients, 1 - beta2)

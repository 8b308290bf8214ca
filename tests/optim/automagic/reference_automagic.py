"""A slow reference implementation of Automagic: one tensor after the other, every rate an fp32 number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

EPSILON = 1e-30


@dataclass
class ReferenceAutomagic:
    """The same algorithm as `supertuner.optim.automagic`, for comparison."""

    bump: float = 1e-6
    lowest: float = 1e-7
    highest: float = 1e-3
    start: float = 1e-6
    weight_decay: float = 0.0
    beta2: float = 0.999
    clip: float = 1.0

    def __post_init__(self) -> None:
        self.states: dict[str, dict[str, torch.Tensor]] = {}

    def step(
        self, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], factor: float = 1.0
    ) -> None:
        for name, gradient in gradients.items():
            self._step(name, weights[name], gradient, factor)

    def _step(self, name: str, weight: torch.Tensor, gradient: torch.Tensor, factor: float) -> None:
        g = gradient.reshape(len(gradient), -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
        first = name not in self.states
        if first:
            zeros = {"row": torch.zeros(g.shape[0]), "column": torch.zeros(g.shape[1])}
            self.states[name] = {**zeros, "sign": torch.ones(g.shape), "rate": torch.full(g.shape, self.start)}
        state = self.states[name]
        squares = g * g + EPSILON
        state["row"] = self.beta2 * state["row"] + (1 - self.beta2) * squares.mean(1)
        state["column"] = self.beta2 * state["column"] + (1 - self.beta2) * squares.mean(0)
        moment = torch.outer(state["row"], state["column"]) / state["row"].mean()
        update = g / moment.sqrt()
        rms = float(update.square().mean().sqrt())
        update = update / max(1.0, rms / self.clip)
        if not first:
            moved = state["rate"] + self.bump * torch.sign(update) * state["sign"]
            state["rate"] = moved.clamp(self.lowest, self.highest)
        state["sign"] = torch.where(update < 0, -1.0, 1.0)
        change = factor * state["rate"] * (update + self.weight_decay * weight.reshape(g.shape))
        weight.sub_(change.reshape(weight.shape))

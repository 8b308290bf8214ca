"""Automagic as one writes it down: one tensor after the other, every rate an fp32 number, nothing clever. Slow."""

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
        self.memory: dict[str, dict[str, torch.Tensor]] = {}

    def step(
        self, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], factor: float = 1.0
    ) -> None:
        for name, gradient in gradients.items():
            self._step(name, weights[name], gradient, factor)

    def _step(self, name: str, weight: torch.Tensor, gradient: torch.Tensor, factor: float) -> None:
        g = gradient.reshape(len(gradient), -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
        first = name not in self.memory
        if first:
            zeros = {"row": torch.zeros(g.shape[0]), "column": torch.zeros(g.shape[1])}
            self.memory[name] = {**zeros, "sign": torch.ones(g.shape), "rate": torch.full(g.shape, self.start)}
        mine = self.memory[name]
        squares = g * g + EPSILON
        mine["row"] = self.beta2 * mine["row"] + (1 - self.beta2) * squares.mean(1)
        mine["column"] = self.beta2 * mine["column"] + (1 - self.beta2) * squares.mean(0)
        moment = torch.outer(mine["row"], mine["column"]) / mine["row"].mean()
        update = g / moment.sqrt()
        rms = float(update.square().mean().sqrt())
        update = update / max(1.0, rms / self.clip)
        if not first:
            moved = mine["rate"] + self.bump * torch.sign(update) * mine["sign"]
            mine["rate"] = moved.clamp(self.lowest, self.highest)
        mine["sign"] = torch.where(update < 0, -1.0, 1.0)
        change = factor * mine["rate"] * (update + self.weight_decay * weight.reshape(g.shape))
        weight.sub_(change.reshape(weight.shape))

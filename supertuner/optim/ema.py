"""An exponential moving average of what is trained, in fp32: what is validated and exported where it is asked for.

After update n (the first is 0):    average ← d · average + (1 - d) · weights,    d = min(decay, (1 + n) / (10 + n))

The second bound keeps early averages near the weights instead of near the random start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from supertuner.core.errors import CheckpointError


class EmaWeights:
    """Averages by name, beside the parameters that they follow."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        assert 0 < decay < 1, f"decay {decay}"
        self.decay = decay
        self.updates = 0
        self._parameters = dict(parameters)
        self.averages = {name: p.detach().to(torch.float32, copy=True) for name, p in parameters.items()}

    def update(self) -> None:
        """Take in the weights as they are now."""
        self.update_subset(self._parameters)
        self.updates += 1

    @torch.no_grad()
    def update_subset(self, names: Collection[str]) -> None:
        """The part of an update that is of these weights; whoever takes them in piece by piece counts the update."""
        current = [self._parameters[name].detach().float() for name in names]
        torch._foreach_lerp_([self.averages[name] for name in names], current, 1 - self.current_decay())

    def current_decay(self) -> float:
        """The decay of the next update."""
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    def state(self) -> tuple[dict[str, torch.Tensor], int]:
        """Copies of the averages on the CPU, and the number of updates behind them."""
        copies = {name: one.to("cpu", copy=True).contiguous() for name, one in self.averages.items()}
        return copies, self.updates

    def load(self, averages: Mapping[str, torch.Tensor], updates: int) -> None:
        """Go on from a saved state, to the bit. Nothing is changed if it does not fit."""
        wrong = sorted(
            name
            for name in self.averages.keys() | averages.keys()
            if name not in self.averages
            or name not in averages
            or averages[name].shape != self.averages[name].shape
            or averages[name].dtype != torch.float32
        )
        if wrong:
            raise CheckpointError(
                f"the moving average of {wrong[0]} is missing, too many or of another shape ({len(wrong)} such); "
                "the checkpoint is of another model or adapter"
            )
        for name, average in self.averages.items():
            average.copy_(averages[name])
        self.updates = updates

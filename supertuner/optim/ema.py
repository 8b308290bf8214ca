"""An exponential moving average of the trained parameters in fp32, for validation and export.

Update n = 0, 1, …:    average ← d · average + (1 - d) · weights,    d = min(decay, (1 + n) / (10 + n))

The second bound keeps early averages near the current weights instead of near the random initial values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from supertuner.core.errors import CheckpointError


class EmaWeights:
    """The moving averages of named parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        assert 0 < decay < 1, f"decay {decay}"
        self.decay = decay
        self.updates = 0
        self._parameters = dict(parameters)
        self.averages = {name: p.detach().to(torch.float32, copy=True) for name, p in parameters.items()}

    def update(self) -> None:
        """Update the averages with the current weights."""
        self.update_subset(self._parameters)
        self.updates += 1

    @torch.no_grad()
    def update_subset(self, names: Collection[str]) -> None:
        """Update the averages of these parameters only. The caller increments `updates` after the last subset."""
        current = [self._parameters[name].detach().float() for name in names]
        torch._foreach_lerp_([self.averages[name] for name in names], current, 1 - self.current_decay())

    def current_decay(self) -> float:
        """The decay d of the next update."""
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    def state(self) -> tuple[dict[str, torch.Tensor], int]:
        """Copies of the averages on the CPU, and the number of updates so far."""
        copies = {name: average.to("cpu", copy=True).contiguous() for name, average in self.averages.items()}
        return copies, self.updates

    def load(self, averages: Mapping[str, torch.Tensor], updates: int) -> None:
        """Restore a saved state to the bit, or change nothing and raise CheckpointError if it does not match."""
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
                f"{len(wrong)} moving averages do not match the trained parameters; that of {wrong[0]} is missing, "
                "unexpected or of another shape; the checkpoint belongs to another model or adapter"
            )
        for name, average in self.averages.items():
            average.copy_(averages[name])
        self.updates = updates

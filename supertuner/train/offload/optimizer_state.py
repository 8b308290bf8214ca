"""What is remembered of each trained parameter between steps, wherever it is: an optimizer's memory, an average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.ema import Ema
from supertuner.optim.table import Optimizer
from supertuner.train.offload.host_buffers import Key

HOST = torch.device("cpu")
AVERAGE = "average"


@dataclass(frozen=True, eq=False, slots=True)
class TrainedState:
    optimizer: Optimizer
    ema: Ema | None

    def entries(self, name: str) -> Iterator[tuple[Key, torch.Tensor]]:
        """All tensors of a parameter, but for counts of steps that optimizers keep on the host anyway."""
        on_host = () if self.optimizer.inner.param_groups[0].get("fused") else ("step",)
        for key, value in self._memory(name).items():
            if isinstance(value, torch.Tensor) and key not in on_host:
                yield (name, f"state.{key}"), value
        if self.ema is not None:
            yield (name, AVERAGE), self.ema.averages[name]

    def change(self, name: str, change: Callable[[Key, torch.Tensor], torch.Tensor]) -> None:
        """Put other tensors in their places: the same values in another memory."""
        changed = {key: change(key, tensor) for key, tensor in self.entries(name)}
        if self.ema is not None:
            self.ema.averages[name] = changed.pop((name, AVERAGE))
        old = self._memory(name)
        new = {key: changed.get((name, f"state.{key}"), value) for key, value in old.items()}
        if all(new[key] is value for key, value in old.items()):
            return
        self.optimizer.inner.state[self.optimizer.parameters[name]] = new
        if isinstance(self.optimizer.inner, Automagic):
            self.optimizer.inner.states_replaced()

    def move(self, device: torch.device) -> None:
        """Have all of it on a device, for good."""
        for name in self.optimizer.parameters:
            self.change(name, lambda _, tensor: tensor.to(device))

    def _memory(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.inner.state.get(self.optimizer.parameters[name], {})
        return found

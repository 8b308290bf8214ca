"""The tensors kept for each trained parameter between steps, in any memory: optimizer state and moving average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import ExpertOptimizer

BufferKey: TypeAlias = tuple[str, str]
"""(parameter's name, role): the role is `weight`, `gradient`, `average` or e.g. `state.exp_avg`."""
HOST = torch.device("cpu")
EMA_KEY = "average"


@dataclass(frozen=True, eq=False, slots=True)
class ParameterState:
    optimizer: ExpertOptimizer
    ema: EmaWeights | None

    def tensor_entries(self, name: str) -> Iterator[tuple[BufferKey, torch.Tensor]]:
        """All tensors of a parameter, without step counts that the optimizer keeps on the host anyway."""
        on_host = () if self.optimizer.torch_optimizer.param_groups[0].get("fused") else ("step",)
        for key, value in self._optimizer_entries(name).items():
            if isinstance(value, torch.Tensor) and key not in on_host:
                yield (name, f"state.{key}"), value
        if self.ema is not None:
            yield (name, EMA_KEY), self.ema.averages[name]

    def replace_tensors(self, name: str, replacement: Callable[[BufferKey, torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor of a parameter by one with the same values in another memory."""
        changed = {key: replacement(key, tensor) for key, tensor in self.tensor_entries(name)}
        if self.ema is not None:
            self.ema.averages[name] = changed.pop((name, EMA_KEY))
        old = self._optimizer_entries(name)
        new = {key: changed.get((name, f"state.{key}"), value) for key, value in old.items()}
        if all(new[key] is value for key, value in old.items()):
            return
        self.optimizer.torch_optimizer.state[self.optimizer.parameters[name]] = new
        if isinstance(self.optimizer.torch_optimizer, Automagic):
            self.optimizer.torch_optimizer.states_replaced()

    def move_to(self, device: torch.device) -> None:
        """Move the tensors of all parameters to a device."""
        for name in self.optimizer.parameters:
            self.replace_tensors(name, lambda _, tensor: tensor.to(device))

    def _optimizer_entries(self, name: str) -> dict[str, Any]:
        entries: dict[str, Any] = self.optimizer.torch_optimizer.state.get(self.optimizer.parameters[name], {})
        return entries

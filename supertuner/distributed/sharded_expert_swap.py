"""Experts whose weights are shared out and that take turns: one has its parts on the device, the others in host memory.

Whoever calls an expert has its parts brought, be it a window, a held-out loss or a sampler in the middle of a picture;
those of the others go home first, and what the optimizer remembers of them with them. No value changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from supertuner.step.window import ExpertState
from supertuner.step.parameter_state import HOST, ParameterState

MoveModule = Callable[[nn.Module, torch.device], object]
"""Have all of a module on a device."""


@dataclass(eq=False, slots=True)
class ShardedSwappableExpert:
    """An expert that is on the device only while it is needed."""

    expert_state: ExpertState
    on_moved: Callable[[], None]
    """Called after a move: who knows the weights by their place in memory learns the new one."""
    on_device: bool = True


class ShardedExpertSwap:
    """The guests of one device. At most one of them is there."""

    def __init__(self, device: torch.device, move_module: MoveModule = nn.Module.to) -> None:
        self._device, self._move_module = device, move_module
        self._experts: list[ShardedSwappableExpert] = []
        self.swap_count = 0

    def add(self, expert_state: ExpertState, on_moved: Callable[[], None]) -> None:
        """An expert that is on the device now; it waits at home until it is called."""
        expert = ShardedSwappableExpert(expert_state, on_moved)
        self._experts.append(expert)
        self._move_expert(expert, on_device=False)
        expert_state.module.register_forward_pre_hook(
            partial(self._on_forward, expert), prepend=True
        )  # before FSDP's own

    def _on_forward(self, expert: ShardedSwappableExpert, _module: nn.Module, _inputs: Any) -> None:
        if not expert.on_device:
            for other in self._experts:
                if other.on_device:
                    self._move_expert(other, on_device=False)
            self._move_expert(expert, on_device=True)
            self.swap_count += 1
        for (
            parameter
        ) in expert.expert_state.parameters.values():  # as they were lent an average, so they get theirs back
            if parameter.device != self._device:
                parameter.data = parameter.data.to(self._device)

    def _move_expert(self, expert: ShardedSwappableExpert, *, on_device: bool) -> None:
        device = self._device if on_device else HOST
        self._move_module(expert.expert_state.module, device)
        expert.on_moved()
        ParameterState(expert.expert_state.optimizer, expert.expert_state.ema).move_to(device)
        expert.on_device = on_device

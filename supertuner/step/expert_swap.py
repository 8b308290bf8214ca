"""Experts that take turns on the device: the one that computes is there, the others are in host memory.

Every forward pass of an expert brings it to the device first: in a window, a held-out loss, or a sampler in the middle
of an image. The other experts go to host memory first. No value changes. An expert in host memory is complete
there: it can be saved, averaged and read as usual.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from supertuner.step.parameter_state import HOST


class SwappableExpert(Protocol):
    """An expert that can move. It knows how its weights are stored: whole under a plan, or sharded by FSDP."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""

    @property
    def swapped_parameters(self) -> Collection[nn.Parameter]:
        """The trained parameters that move with it."""

    def move_to_device(self) -> None:
        """Bring weights, optimizer state and averages to the device. Computation queued later waits for them."""

    def move_to_host(self, *, trained: bool) -> None:
        """Move all of it to host memory. `trained`: a pass with gradients ran since it came to the device."""


class ExpertSwap:
    """The experts that share one device. At most one of them is on it; at the beginning none is."""

    def __init__(self) -> None:
        self._experts: dict[str, tuple[SwappableExpert, RemovableHandle]] = {}
        self._on_device: str | None = None
        self._trained = False
        """Whether a pass with gradients ran since the expert came. (Fused optimizers do not raise tensor versions.)"""
        self.swap_count = 0

    def add(self, name: str, expert: SwappableExpert) -> None:
        """Take over an expert that is in host memory."""
        hook = expert.module.register_forward_pre_hook(partial(self._on_forward, name), prepend=True)  # before FSDP's
        self._experts[name] = expert, hook

    def remove(self, name: str) -> None:
        """Stop moving this expert; it stays where it is."""
        if name in self._experts:
            self._experts.pop(name)[1].remove()
            if self._on_device == name:
                self._on_device = None

    def activate(self, name: str) -> None:
        """Bring this expert to the device, after the others have left it."""
        for other, (expert, _) in self._experts.items():
            if other == name:
                continue
            if other == self._on_device:
                expert.move_to_host(trained=self._trained)
            else:
                _move_parameters(expert, HOST)
        expert, _ = self._experts[name]
        if self._on_device != name:
            expert.move_to_device()
            self._on_device, self._trained = name, False
            self.swap_count += 1
        _move_parameters(expert, expert.device)

    def _on_forward(self, name: str, _module: nn.Module, _inputs: Any) -> None:
        self.activate(name)
        self._trained |= torch.is_grad_enabled()


def _move_parameters(expert: SwappableExpert, device: torch.device) -> None:
    """Parameters whose values were replaced for a while (by averages, then by their own again) may be elsewhere."""
    for parameter in expert.swapped_parameters:
        if parameter.device != device:
            parameter.data = parameter.data.to(device)

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

from supertuner.step.window import Trainee
from supertuner.train.offload.optimizer_state import HOST, TrainedState

Move = Callable[[nn.Module, torch.device], object]
"""Have all of a module on a device."""


@dataclass(eq=False, slots=True)
class Guest:
    """An expert that is on the device only while it is needed."""

    trainee: Trainee
    moved: Callable[[], None]
    """Called after a move: who knows the weights by their place in memory learns the new one."""
    here: bool = True


class Turns:
    """The guests of one device. At most one of them is there."""

    def __init__(self, device: torch.device, move: Move = nn.Module.to) -> None:
        self._device, self._move = device, move
        self._guests: list[Guest] = []
        self.changes = 0

    def add(self, trainee: Trainee, moved: Callable[[], None]) -> None:
        """An expert that is on the device now; it waits at home until it is called."""
        guest = Guest(trainee, moved)
        self._guests.append(guest)
        self._send(guest, here=False)
        trainee.module.register_forward_pre_hook(partial(self._called, guest), prepend=True)  # before FSDP's own

    def _called(self, guest: Guest, _module: nn.Module, _inputs: Any) -> None:
        if not guest.here:
            for other in self._guests:
                if other.here:
                    self._send(other, here=False)
            self._send(guest, here=True)
            self.changes += 1
        for parameter in guest.trainee.parameters.values():  # as they were lent an average, so they get theirs back
            if parameter.device != self._device:
                parameter.data = parameter.data.to(self._device)

    def _send(self, guest: Guest, *, here: bool) -> None:
        device = self._device if here else HOST
        self._move(guest.trainee.module, device)
        guest.moved()
        TrainedState(guest.trainee.optimizer, guest.trainee.ema).move(device)
        guest.here = here

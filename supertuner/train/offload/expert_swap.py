"""Experts that take turns on the device: the one that computes is there, the others wait in host memory.

Whoever calls an expert has it brought, be it a window, a held-out loss or a sampler in the middle of a picture; the
others go home first. Frozen weights have a copy at home for good and are only dropped; what is trained is sent. An
expert at home is complete there: it can be saved, averaged and looked at as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from supertuner.plan.placement.plan import Stepping
from supertuner.train.offload.apply import Acting
from supertuner.train.offload.optimizer_state import HOST
from supertuner.train.offload.param_storage import Leaf, leaves


@dataclass(frozen=True, eq=False, slots=True)
class _Visit:
    """A trained parameter on the device: where it came from, and as what."""

    source: torch.Tensor
    there: torch.Tensor
    version: int


@dataclass(eq=False, slots=True)
class Guest:
    """An expert that is on the device only while it is needed."""

    acting: Acting
    here: bool = True
    learnt: bool = False
    """Whether it was trained since it came. (Fused steps do not count as versions of a tensor.)"""
    _frozen: list[tuple[Leaf, torch.Tensor]] = field(default_factory=list)
    """With its copy at home."""
    _trained: dict[str, nn.Parameter] = field(default_factory=dict)
    _visits: dict[str, _Visit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make its home, and send it there."""
        acting = self.acting
        trained = {id(parameter) for parameter in acting.trainee.parameters.values()}
        staying = {id(parameter) for parameter in acting.staying()}
        for name, parameter in acting.trainee.module.named_parameters():
            for leaf in leaves(parameter) if id(parameter) in staying - trained else ():
                self._frozen.append((leaf, acting.homes.settle(name, leaf)))
        self._trained = {name: p for name, p in acting.trainee.parameters.items() if id(p) in staying}
        self.leave()

    def come(self) -> None:
        """Bring it to the device; the computation waits for it."""
        device, carrier = self.acting.carrier.device, self.acting.carrier
        places = [leaf for leaf, _ in self._frozen]
        homes = [home for _, home in self._frozen]
        for parameter in self._trained.values():
            places.append(Leaf(parameter, None))
            homes.append(parameter.data)
        there = [torch.empty_like(home, device=device) for home in homes]
        carrier.await_(carrier.fetch(list(zip(there, homes, strict=True))))
        for place, tensor in zip(places, there, strict=True):
            place.put(tensor)
        arrived = zip(self._trained.items(), homes[len(self._frozen) :], there[len(self._frozen) :], strict=True)
        self._visits = {name: _Visit(home, tensor, parameter._version) for (name, parameter), home, tensor in arrived}
        if self.acting.plan.stepping is Stepping.GPU:
            self.acting.state.move(device)
        self.here = True

    def stay(self) -> None:
        """It is needed, and here; whatever was put into it meanwhile, an average or its own weights, comes too."""
        device = self.acting.carrier.device
        for parameter in self._trained.values():
            if parameter.device != device:
                parameter.data = parameter.data.to(device)

    def wait(self) -> None:
        """It is at home, and another is needed; what somebody put back into it meanwhile goes home too."""
        for parameter in self._trained.values():
            if parameter.device != HOST:
                parameter.data = parameter.data.to(HOST)

    def leave(self) -> None:
        """Go home. Only copies of what has changed are made."""
        pairs = []
        for leaf, home in self._frozen:
            leaf.put(home)
        for name, parameter in self._trained.items():
            visit, now = self._visits.get(name), parameter.data
            if visit is not None and now.data_ptr() != visit.there.data_ptr():
                parameter.data = now.to(HOST)  # lent by somebody who will put the weights back: not into their home
            elif visit is not None and not self.learnt and visit.version == parameter._version:
                parameter.data = visit.source
            else:
                home = self.acting.homes.of((name, "weight"), now)
                pairs.append((home, now))
                parameter.data = home
        self.acting.homes.send(pairs)
        if self.acting.plan.stepping is Stepping.GPU:
            self.acting.state.move(HOST)
        self.acting.homes.arrived()
        self.acting.ring.release()
        self._visits.clear()
        self.here = self.learnt = False


class Turns:
    """The guests of one device. At most one of them is there."""

    def __init__(self) -> None:
        self._guests: dict[str, tuple[Guest, RemovableHandle]] = {}
        self.changes = 0

    def add(self, name: str, guest: Guest) -> None:
        hook = guest.acting.trainee.module.register_forward_pre_hook(partial(self._called, guest))
        self._guests[name] = guest, hook

    def drop(self, name: str) -> None:
        """It is a guest no more, and stays where it is."""
        if name in self._guests:
            self._guests.pop(name)[1].remove()

    def turn(self, guest: Guest) -> None:
        for other, _ in self._guests.values():
            if other is not guest:
                other.leave() if other.here else other.wait()
        if guest.here:
            guest.stay()
            return
        guest.come()
        self.changes += 1

    def _called(self, guest: Guest, _module: nn.Module, _inputs: Any) -> None:
        self.turn(guest)
        guest.learnt |= torch.is_grad_enabled()

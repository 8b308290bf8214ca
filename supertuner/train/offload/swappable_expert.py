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

from supertuner.plan.placement.plan import OptimizerPlacement
from supertuner.train.offload.apply import OffloadedExpert
from supertuner.step.parameter_state import HOST
from supertuner.train.offload.param_storage import StoredTensor, stored_tensors


@dataclass(frozen=True, eq=False, slots=True)
class _DeviceVisit:
    """A trained parameter on the device: where it came from, and as what."""

    source: torch.Tensor
    device_tensor: torch.Tensor
    version: int


@dataclass(eq=False, slots=True)
class SwappableExpert:
    """An expert that is on the device only while it is needed."""

    offloaded: OffloadedExpert
    on_device: bool = True
    trained_since_arrival: bool = False
    """Whether it was trained since it came. (Fused steps do not count as versions of a tensor.)"""
    _frozen: list[tuple[StoredTensor, torch.Tensor]] = field(default_factory=list)
    """With its copy at home."""
    _trained: dict[str, nn.Parameter] = field(default_factory=dict)
    _visits: dict[str, _DeviceVisit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make its home, and send it there."""
        offloaded = self.offloaded
        trained_ids = {id(parameter) for parameter in offloaded.expert_state.parameters.values()}
        resident_ids = {id(parameter) for parameter in offloaded.resident_parameters()}
        for name, parameter in offloaded.expert_state.module.named_parameters():
            for stored in stored_tensors(parameter) if id(parameter) in resident_ids - trained_ids else ():
                self._frozen.append((stored, offloaded.host_buffers.move_to_host(name, stored)))
        self._trained = {name: p for name, p in offloaded.expert_state.parameters.items() if id(p) in resident_ids}
        self.move_to_host()

    def move_to_device(self) -> None:
        """Bring it to the device; the computation waits for it."""
        device, transfer = self.offloaded.transfer.device, self.offloaded.transfer
        targets = [leaf for leaf, _ in self._frozen]
        host_tensors = [home for _, home in self._frozen]
        for parameter in self._trained.values():
            targets.append(StoredTensor(parameter, None))
            host_tensors.append(parameter.data)
        device_tensors = [torch.empty_like(home, device=device) for home in host_tensors]
        transfer.wait_on_device(transfer.copy_to_device(list(zip(device_tensors, host_tensors, strict=True))))
        for target, tensor in zip(targets, device_tensors, strict=True):
            target.put(tensor)
        arrived = zip(
            self._trained.items(), host_tensors[len(self._frozen) :], device_tensors[len(self._frozen) :], strict=True
        )
        self._visits = {
            name: _DeviceVisit(home, tensor, parameter._version) for (name, parameter), home, tensor in arrived
        }
        if self.offloaded.plan.stepping is OptimizerPlacement.GPU:
            self.offloaded.parameter_state.move_to(device)
        self.on_device = True

    def sync_to_device(self) -> None:
        """It is needed, and here; whatever was put into it meanwhile, an average or its own weights, comes too."""
        device = self.offloaded.transfer.device
        for parameter in self._trained.values():
            if parameter.device != device:
                parameter.data = parameter.data.to(device)

    def sync_to_host(self) -> None:
        """It is at home, and another is needed; what somebody put back into it meanwhile goes home too."""
        for parameter in self._trained.values():
            if parameter.device != HOST:
                parameter.data = parameter.data.to(HOST)

    def move_to_host(self) -> None:
        """Go home. Only copies of what has changed are made."""
        pairs = []
        for stored, host_tensor in self._frozen:
            stored.put(host_tensor)
        for name, parameter in self._trained.items():
            visit, current = self._visits.get(name), parameter.data
            if visit is not None and current.data_ptr() != visit.device_tensor.data_ptr():
                parameter.data = current.to(HOST)  # lent by somebody who will put the weights back: not into their home
            elif visit is not None and not self.trained_since_arrival and visit.version == parameter._version:
                parameter.data = visit.source
            else:
                host_tensor = self.offloaded.host_buffers.buffer_for((name, "weight"), current)
                pairs.append((host_tensor, current))
                parameter.data = host_tensor
        self.offloaded.host_buffers.copy_to_host(pairs)
        if self.offloaded.plan.stepping is OptimizerPlacement.GPU:
            self.offloaded.parameter_state.move_to(HOST)
        self.offloaded.host_buffers.synchronize()
        self.offloaded.ring.release_slots()
        self._visits.clear()
        self.on_device = self.trained_since_arrival = False


class ExpertSwap:
    """The guests of one device. At most one of them is there."""

    def __init__(self) -> None:
        self._experts: dict[str, tuple[SwappableExpert, RemovableHandle]] = {}
        self.swap_count = 0

    def add(self, name: str, expert: SwappableExpert) -> None:
        hook = expert.offloaded.expert_state.module.register_forward_pre_hook(partial(self._on_forward, expert))
        self._experts[name] = expert, hook

    def remove(self, name: str) -> None:
        """It is a guest no more, and stays where it is."""
        if name in self._experts:
            self._experts.pop(name)[1].remove()

    def activate(self, expert: SwappableExpert) -> None:
        for other, _ in self._experts.values():
            if other is not expert:
                other.move_to_host() if other.on_device else other.sync_to_host()
        if expert.on_device:
            expert.sync_to_device()
            return
        expert.move_to_device()
        self.swap_count += 1

    def _on_forward(self, expert: SwappableExpert, _module: nn.Module, _inputs: Any) -> None:
        self.activate(expert)
        expert.trained_since_arrival |= torch.is_grad_enabled()

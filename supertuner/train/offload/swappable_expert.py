"""How an expert under an offload plan moves between device and host memory (`step/expert_swap.py` decides when).

Frozen weights keep a copy in host memory for good, so on the way back they are only dropped; trained weights are copied
back, unless nothing has changed them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import nn

from supertuner.plan.placement.plan import OptimizerPlacement
from supertuner.step.parameter_state import HOST
from supertuner.train.offload.apply import OffloadedExpert
from supertuner.train.offload.param_storage import StoredTensor, stored_tensors


@dataclass(frozen=True, eq=False, slots=True)
class _DeviceVisit:
    """A trained parameter while it is on the device."""

    source: torch.Tensor
    """The host tensor that it was copied from."""
    device_tensor: torch.Tensor
    version: int
    """The parameter's version at arrival: in-place changes raise it."""


@dataclass(eq=False, slots=True)
class PlannedSwappableExpert:
    """Creating it moves the expert to host memory."""

    offloaded: OffloadedExpert
    _frozen: list[tuple[StoredTensor, torch.Tensor]] = field(default_factory=list)
    """Each frozen tensor with its copy in host memory. Streamed blocks are not among them: they live there anyway."""
    _trained: dict[str, nn.Parameter] = field(default_factory=dict)
    _visits: dict[str, _DeviceVisit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        offloaded = self.offloaded
        trained_ids = {id(parameter) for parameter in offloaded.expert_state.parameters.values()}
        resident_ids = {id(parameter) for parameter in offloaded.resident_parameters()}
        for name, parameter in self.module.named_parameters():
            for stored in stored_tensors(parameter) if id(parameter) in resident_ids - trained_ids else ():
                self._frozen.append((stored, offloaded.host_buffers.move_to_host(name, stored)))
        self._trained = {name: p for name, p in offloaded.expert_state.parameters.items() if id(p) in resident_ids}
        self.move_to_host(trained=True)

    @property
    def module(self) -> nn.Module:
        return self.offloaded.expert_state.module

    @property
    def device(self) -> torch.device:
        return self.offloaded.transfer.device

    @property
    def swapped_parameters(self) -> Collection[nn.Parameter]:
        return self._trained.values()

    def move_to_device(self) -> None:
        transfer = self.offloaded.transfer
        trained = {name: (StoredTensor(p), p.data) for name, p in self._trained.items()}
        entries = [*self._frozen, *trained.values()]
        pairs = [(torch.empty_like(host, device=self.device), host) for _, host in entries]
        transfer.wait_on_device(transfer.copy_to_device(pairs))
        for (stored, _), (device_tensor, _) in zip(entries, pairs, strict=True):
            stored.put(device_tensor)
        self._visits = {
            name: _DeviceVisit(host, stored.get(), self._trained[name]._version)
            for name, (stored, host) in trained.items()
        }
        if self.offloaded.plan.stepping is OptimizerPlacement.GPU:
            self.offloaded.parameter_state.move_to(self.device)

    def move_to_host(self, *, trained: bool) -> None:
        pairs = []
        for stored, host_tensor in self._frozen:
            stored.put(host_tensor)
        for name, parameter in self._trained.items():
            visit, current = self._visits.get(name), parameter.data
            if visit is not None and current.data_ptr() != visit.device_tensor.data_ptr():
                # Other values stand in for the weights for a while (an average). They must not overwrite the weights'
                # host buffer: the weights themselves are put back later.
                parameter.data = current.to(HOST)
            elif visit is not None and not trained and visit.version == parameter._version:
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

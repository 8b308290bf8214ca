"""Moves weights, gradients and optimizer state for the optimizer step, which runs on the device, on the device piece by
piece, or on the host.

Each tensor has a permanent place; for a step, tensors are brought together and then returned. Between windows all of
them are complete in their places, where checkpoints, averages and exports read them.

                 gradients                         optimizer state, averages           the step runs on
    gpu          with their weights                device                              device
    streamed     with their weights                host                                device, one piece at a time
    host         host, as soon as they are made    host                                host, on all of its cores
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from supertuner.plan.placement.memory_needs import PER_PARAMETER_OPTIMIZERS
from supertuner.plan.placement.plan import OptimizerPlacement
from supertuner.step.parameter_state import HOST, BufferKey, ParameterState
from supertuner.train.offload.offloaded_blocks import OffloadedBlocks
from supertuner.train.offload.param_storage import is_plain
from supertuner.train.offload.tensor_host_buffers import HostBuffers
from supertuner.train.offload.transfer import DeviceTransfer, TransferEvent
from supertuner.train.offload.weight_ring import WeightRing


@dataclass(eq=False, slots=True)
class _PieceOnDevice:
    """Host tensors of some parameters, and their copies on the device."""

    keys: list[BufferKey] = field(default_factory=list)
    host_tensors: list[torch.Tensor] = field(default_factory=list)
    device_tensors: list[torch.Tensor] = field(default_factory=list)
    event: TransferEvent = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class PlannedOptimizerOffload:
    """The optimizer offload of one expert under a plan. (`step.train_step.OptimizerOffload` documents the methods.)"""

    parameters: Mapping[str, nn.Parameter]
    parameter_state: ParameterState
    placement: OptimizerPlacement
    parameters_by_piece: Sequence[Collection[str]]
    """Names of parameters, piece by piece."""
    host_weights: Collection[str]
    """Names of parameters whose weights live in host memory, because their block is streamed."""
    transfer: DeviceTransfer
    host_buffers: HostBuffers
    ring: WeightRing
    """Its slots are out of date when weights in host memory have changed."""
    blocks: OffloadedBlocks | None
    """Its last block's parameters may point at the device after the last backward pass."""
    _host_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of this window in host memory."""
    _device_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Device weights while the host updates their copies."""
    _synced_versions: dict[str, int] = field(default_factory=dict)
    """Version of a parameter when its host copy was last equal."""
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def install(self) -> None:
        """Register hooks that send gradients to host memory as soon as they are made, if the step needs them there."""
        for name, parameter in self.parameters.items():
            if name in self.host_weights or self.placement is OptimizerPlacement.HOST:
                hook = partial(_gradient_hook, weakref.ref(self), name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ── OptimizerOffload ─────────────────────────────────────────────────────────────────────────────────────────

    def gradients_ready(self) -> None:
        if self.blocks is not None:
            self.blocks.return_weights()
        changed = []
        host_stepped = self.parameters if self.placement is OptimizerPlacement.HOST else self._host_gradients
        for name in host_stepped:  # for a step on the host also parameters without gradient: their average is there
            parameter = self.parameters[name]
            if name not in self.host_weights:
                device_tensor = self._device_weights[name] = parameter.data
                host_tensor = self.host_buffers.buffer_for((name, "weight"), device_tensor)
                if self._synced_versions.get(name) != parameter._version:
                    changed.append((host_tensor, device_tensor))
                parameter.data = host_tensor
            parameter.grad = self._host_gradients.get(name)
        self._host_gradients.clear()
        self.host_buffers.copy_to_host(changed)
        self.host_buffers.synchronize()

    def resident_chunks(self) -> Iterator[Collection[str]]:
        if self.placement is OptimizerPlacement.HOST:
            self.parameter_state.move_to(HOST)  # no copies, except for state that was created before the plan
            yield self.parameters
        elif self.placement is OptimizerPlacement.STREAMED or self.host_weights:
            per_parameter = self.parameter_state.optimizer.name in PER_PARAMETER_OPTIMIZERS
            yield from self._step_piece_by_piece(self.parameters_by_piece if per_parameter else [self.parameters])
        else:
            yield self.parameters
        if self.host_weights:
            self.ring.invalidate()

    def end_window(self) -> None:
        pairs = []
        for name, device_tensor in self._device_weights.items():
            parameter = self.parameters[name]
            pairs.append((device_tensor, parameter.data))
            self._synced_versions[name] = parameter._version
            parameter.data = device_tensor
        if pairs:
            self.transfer.wait_on_device(self.transfer.copy_to_device(pairs))
        self._device_weights.clear()
        self.host_buffers.synchronize()  # checkpoints and exports read host memory next

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def offload_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Send a micro-batch's gradient to host memory.

        Gradients of earlier micro-batches are fetched and added on the device first, in the order in which autograd
        would have added them: the sum has the same bits.
        """
        gradient = parameter.grad
        assert gradient is not None
        if name in self._host_gradients:
            (accumulated,), event = self.host_buffers.copy_to_device([self._host_gradients[name]])
            self.transfer.wait_on_device(event)
            gradient = accumulated.add_(gradient)
        host_tensor = self._host_gradients[name] = self.host_buffers.buffer_for((name, "gradient"), gradient)
        self.host_buffers.copy_to_host([(host_tensor, gradient)])
        parameter.grad = None

    def _step_piece_by_piece(self, pieces: Sequence[Collection[str]]) -> Iterator[Collection[str]]:
        """Fetch each piece while the one before is updated, and send it back while the next one is.

        Yields the names of each piece while its tensors are on the device; the caller runs the optimizer.
        """
        next_piece = self._start_fetch(pieces[0])
        for number, names in enumerate(pieces):
            piece = next_piece
            next_piece = self._start_fetch(pieces[number + 1]) if number + 1 < len(pieces) else _PieceOnDevice()
            if piece.keys:
                self.transfer.wait_on_device(piece.event)
            self._use_device_copies(names, piece)
            with self._limit_optimizer_to(names):
                yield names
            self._send_to_host(names, piece)

    @contextmanager
    def _limit_optimizer_to(self, names: Collection[str]) -> Iterator[None]:
        parameter_ids = {id(self.parameters[name]) for name in names}
        groups = self.parameter_state.optimizer.torch_optimizer.param_groups
        all_parameters = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = [parameter for parameter in parameters if id(parameter) in parameter_ids]
            yield
        finally:
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = parameters

    def _start_fetch(self, names: Collection[str]) -> _PieceOnDevice:
        """Start fetching the tensors of these parameters that are in host memory."""
        entries = [entry for name in names for entry in self._host_tensors(name)]
        piece = _PieceOnDevice([key for key, _ in entries], [tensor for _, tensor in entries])
        if entries:
            piece.device_tensors, piece.event = self.host_buffers.copy_to_device(piece.host_tensors)
        return piece

    def _host_tensors(self, name: str) -> Iterator[tuple[BufferKey, torch.Tensor]]:
        parameter = self.parameters[name]
        if name in self.host_weights:
            yield (name, "weight"), parameter.data
            if parameter.grad is not None:
                yield (name, "gradient"), parameter.grad
        for key, tensor in self.parameter_state.tensor_entries(name):
            if self.host_buffers.is_buffer(key, tensor):
                yield key, tensor

    def _use_device_copies(self, names: Collection[str], piece: _PieceOnDevice) -> None:
        """Replace the host tensors by their device copies."""
        device_tensor_by_key = dict(zip(piece.keys, piece.device_tensors, strict=True))

        def device_tensor(key: BufferKey, tensor: torch.Tensor) -> torch.Tensor:
            return device_tensor_by_key[key] if key in device_tensor_by_key else tensor.to(self.transfer.device)

        for name in names:
            if (name, "weight") in device_tensor_by_key:
                parameter = self.parameters[name]
                parameter.grad = None  # torch refuses a gradient on another device than its parameter
                parameter.data = device_tensor_by_key[name, "weight"]
                parameter.grad = device_tensor_by_key.get((name, "gradient"))
            self.parameter_state.replace_tensors(name, device_tensor)

    def _send_to_host(self, names: Collection[str], piece: _PieceOnDevice) -> None:
        """Send changed weights and state back to host memory, and drop the gradients."""
        weights = []
        rows = zip(piece.keys, piece.host_tensors, piece.device_tensors, strict=True)
        for (name, role), host_tensor, device_tensor in rows:
            if role == "weight":
                weights.append((host_tensor, device_tensor))
                self.parameters[name].grad = None
                self.parameters[name].data = host_tensor
        self.host_buffers.copy_to_host(weights)
        if self.placement is not OptimizerPlacement.STREAMED:
            return
        pairs = []

        def host_copy(key: BufferKey, tensor: torch.Tensor) -> torch.Tensor:
            if not is_plain(tensor):
                return tensor.to(HOST)
            if self.host_buffers.is_buffer(key, tensor):
                return tensor
            buffer = self.host_buffers.buffer_for(key, tensor)
            pairs.append((buffer, tensor))
            return buffer

        for name in names:
            self.parameter_state.replace_tensors(name, host_copy)
        self.host_buffers.copy_to_host(pairs)


def _gradient_hook(offload_ref: weakref.ref[PlannedOptimizerOffload], name: str, parameter: torch.Tensor) -> None:
    """The hook of a parameter. The reference is weak: torch stores such hooks where Python's collector cannot see them,
    so parameter and offload would keep each other alive for ever."""
    offload = offload_ref()
    assert offload is not None, "the offload lives as long as its expert is trained"
    offload.offload_gradient(name, parameter)

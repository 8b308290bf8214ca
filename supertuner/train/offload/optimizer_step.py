"""Where what is trained is stepped: on the device, on the device piece by piece, or on the host.

Weights, gradients, the optimizer's memory and averages each have a home; for a step they come together where it is
made, and go home again. Between windows everything is at home and complete: checkpoints, averages and exports read it
there.

                 gradients                         optimizer's memory, averages        the step
    gpu          with their weights                device                              device
    streamed     with their weights                host                                device, a piece at a time
    host         host, as soon as they are made    host                                host, by all of its cores
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from supertuner.optim.optimizer_registry import ExpertOptimizer
from supertuner.plan.placement.memory_needs import PER_PARAMETER_OPTIMIZERS
from supertuner.plan.placement.plan import OptimizerPlacement
from supertuner.train.offload.host_buffers import BufferKey, HostBuffers
from supertuner.step.parameter_state import HOST, ParameterState
from supertuner.train.offload.param_storage import is_plain
from supertuner.train.offload.transfer import DeviceTransfer, TransferEvent


@dataclass(eq=False, slots=True)
class _PieceOnDevice:
    """What of some parameters is on its way to the device."""

    keys: list[BufferKey] = field(default_factory=list)
    host_tensors: list[torch.Tensor] = field(default_factory=list)
    device_tensors: list[torch.Tensor] = field(default_factory=list)
    event: TransferEvent = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class PlannedOptimizerOffload:
    """Keeps what is trained of one expert; see `step.window.Keeper`."""

    parameters: Mapping[str, nn.Parameter]
    optimizer: ExpertOptimizer
    parameter_state: ParameterState
    placement: OptimizerPlacement
    parameters_by_piece: Sequence[Collection[str]]
    """Names of parameters, block by block: what is a piece."""
    host_weights: Collection[str]
    """Parameters whose weights are at home in host memory."""
    transfer: DeviceTransfer
    host_buffers: HostBuffers
    invalidate_device_copies: Callable[[], None]
    """Weights at home have changed: copies of them elsewhere are worthless."""
    return_streamed_weights: Callable[[], None]
    """The last block is done: its weights go home."""
    _host_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of this window, at home."""
    _device_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights on the device while the host steps their copies."""
    _synced_versions: dict[str, int] = field(default_factory=dict)
    """The version of a parameter when its copy at home was last the same."""
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def install(self) -> None:
        """Gradients of weights that are at home, or stepped there, go there as soon as they are made."""
        for name, parameter in self.parameters.items():
            if name in self.host_weights or self.placement is OptimizerPlacement.HOST:
                hook = partial(_gradient_hook, weakref.ref(self), name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ── the keeper's verbs ───────────────────────────────────────────────────────────────────────────────────────

    def gradients_ready(self) -> None:
        self.return_streamed_weights()
        changed = []
        host_stepped = self.parameters if self.placement is OptimizerPlacement.HOST else self._host_gradients
        for name in host_stepped:  # on the host also what has no gradient: its average is there
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
            self.parameter_state.move_to(HOST)  # all of it is there already, unless it was made before there was a plan
            yield self.parameters
        elif self.placement is OptimizerPlacement.STREAMED or self.host_weights:
            pieces = [names for names in self.parameters_by_piece if names]
            yield from self._step_piece_by_piece(
                pieces if self.optimizer.name in PER_PARAMETER_OPTIMIZERS else [tuple(self.parameters)]
            )
        else:
            yield self.parameters
        if self.host_weights:
            self.invalidate_device_copies()

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
        self.host_buffers.synchronize()  # whoever saves or looks reads what is at home

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def offload_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Send a micro-batch's gradient home, with those before it added as autograd would have added them."""
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
        """Each piece comes to the device while the one before is stepped, and goes home while the next is."""
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
        groups = self.optimizer.torch_optimizer.param_groups
        all_parameters = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = [parameter for parameter in parameters if id(parameter) in parameter_ids]
            yield
        finally:
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = parameters

    def _start_fetch(self, names: Collection[str]) -> _PieceOnDevice:
        """Begin to fetch what of these parameters is at home."""
        piece = _PieceOnDevice()
        for name in names:
            for key, tensor in self._host_tensors(name):
                piece.keys.append(key)
                piece.host_tensors.append(tensor)
        if piece.keys:
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
        """Put what has come in the places of what is at home."""
        device_tensor_by_key = dict(zip(piece.keys, piece.device_tensors, strict=True))

        def device_tensor(key: BufferKey, tensor: torch.Tensor) -> torch.Tensor:
            return device_tensor_by_key[key] if key in device_tensor_by_key else tensor.to(self.transfer.device)

        for name in names:
            if (name, "weight") in device_tensor_by_key:
                parameter = self.parameters[name]
                parameter.grad = None  # one on another device would not be let beside it
                parameter.data = device_tensor_by_key[name, "weight"]
                parameter.grad = device_tensor_by_key.get((name, "gradient"))
            self.parameter_state.replace_tensors(name, device_tensor)

    def _send_to_host(self, names: Collection[str], piece: _PieceOnDevice) -> None:
        """What changed goes home; gradients are used up."""
        weights = []
        for (name, role), host_tensor, device_tensor in zip(
            piece.keys, piece.host_tensors, piece.device_tensors, strict=True
        ):
            if role == "weight":
                weights.append((host_tensor, device_tensor))
                self.parameters[name].grad = None
                self.parameters[name].data = host_tensor
        self.host_buffers.copy_to_host(weights)
        if self.placement is OptimizerPlacement.STREAMED:
            self._send_state_to_host(names)

    def _send_state_to_host(self, names: Collection[str]) -> None:
        """Send home what the optimizer remembers of these parameters, and their averages."""
        pairs = []

        def host_copy(key: BufferKey, tensor: torch.Tensor) -> torch.Tensor:
            if not is_plain(tensor):
                return tensor.to(HOST)
            if self.host_buffers.is_buffer(key, tensor):
                return tensor
            home = self.host_buffers.buffer_for(key, tensor)
            pairs.append((home, tensor))
            return home

        for name in names:
            self.parameter_state.replace_tensors(name, host_copy)
        self.host_buffers.copy_to_host(pairs)


def _gradient_hook(offload_ref: weakref.ref[PlannedOptimizerOffload], name: str, parameter: torch.Tensor) -> None:
    """A parameter's hook. Weak: torch keeps such hooks where Python finds no circles, and parameter and keeper would
    hold each other for ever."""
    offload = offload_ref()
    assert offload is not None, "the keeper lives as long as its expert is trained"
    offload.offload_gradient(name, parameter)

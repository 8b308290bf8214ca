"""Runs the blocks of a module as a plan says: weights fetched ahead, activations kept, sent to host or recomputed.

Each block's call is wrapped from outside, around its hooks and around compiled code; names, parameters and classes stay
as they are, and `remove` leaves nothing behind. The position within a pass is known from the calls themselves: a block
begins its forward pass when it is called, and its backward pass when the gradient of its output is computed. autograd
runs nodes in the reverse order of their creation, so a block's backward pass ends where that of the block before
begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from supertuner.plan.placement.plan import ActivationPolicy
from supertuner.train.offload import activations
from supertuner.train.offload.param_storage import is_plain, stored_tensors
from supertuner.train.offload.prefetch_order import BlockPass, next_uses
from supertuner.train.offload.weight_ring import WeightRing

BlockCall = Callable[..., Any]


@dataclass(frozen=True, eq=False, slots=True)
class _PackedSubclass:
    """A saved tensor of a subclass, such as an 8-bit weight: its inner tensors, packed."""

    tensor_class: Any
    context: Any
    parts: dict[str, Any]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False, slots=True)
class OffloadedBlocks:
    """All blocks of a module, in the order of the forward pass."""

    modules: Sequence[nn.Module]
    policies: Sequence[ActivationPolicy]
    ring: WeightRing
    offloader: activations.ActivationOffloader
    current_pass: BlockPass = BlockPass.SAMPLING
    current_block: int = -1
    """The block that computes now."""
    _block_on_device: int | None = None
    """The streamed block whose device weights stay in place during its whole backward pass."""
    _inputs: activations.BlockInputs = field(default_factory=activations.BlockInputs)
    _original_calls: list[BlockCall] = field(default_factory=list)

    def install(self) -> None:
        """From now on every call of a block goes through `_call_block`.

        If a module has a `_compiled_call_impl`, nn.Module calls it instead of its own code: torch.compile uses it. No
        other place outside of a module's hooks works without a change of its class.
        """
        for number, module in enumerate(self.modules):
            before: BlockCall | None = module._compiled_call_impl
            self._original_calls.append(before or module._call_impl)
            module._compiled_call_impl = partial(self._call_block, number, before or module._call_impl)

    def remove(self) -> None:
        for module, inner in zip(self.modules, self._original_calls, strict=True):
            module._compiled_call_impl = None if inner == module._call_impl else inner
        self._original_calls.clear()
        self.return_weights()
        self.offloader.release_all_blocks()
        self.ring.release_slots()

    # ── forward ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _call_block(self, number: int, inner: BlockCall, *args: Any, **kwargs: Any) -> Any:
        with_gradients = torch.is_grad_enabled()
        if number == 0:
            self.offloader.release_all_blocks()
        self._begin_block(number, BlockPass.FORWARD if with_gradients else BlockPass.SAMPLING)
        if not with_gradients:
            return self._run(number, inner, args, kwargs)
        if self.policies[number] is ActivationPolicy.RECOMPUTE:
            output = self._run_checkpointed(number, inner, args, kwargs)
        else:
            output = self._run_saving(number, inner, args, kwargs)
        if self.policies[number] is not ActivationPolicy.KEEP:
            torch.clear_autocast_cache()  # it keeps copies of trained weights until the end of the forward pass
        self._register_backward_hooks(number, output, (args, kwargs))
        return output

    def _run(self, number: int, inner: BlockCall, args: Any, kwargs: Any) -> Any:
        """Wait until the block's weights are on the device, if they are streamed, and run it."""
        if number not in self.ring.streamed or number == self._block_on_device:
            return inner(*args, **kwargs)
        self.ring.wait_for_block(number, self.current_pass)
        self.ring.use_device_weights(number)
        try:
            return inner(*args, **kwargs)
        finally:  # torch.utils.checkpoint ends recomputing early with an exception of its own
            self.ring.use_host_weights(number)

    def _run_checkpointed(self, number: int, inner: BlockCall, args: Any, kwargs: Any) -> Any:
        calls = 0

        def run(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            *args, kwargs = inputs
            if calls > 1:  # recomputed in the backward pass
                self._begin_block(number, BlockPass.BACKWARD)
                self._hold_weights(number)
            return self._run(number, inner, args, kwargs)

        # Keyword arguments are passed as one more positional one: checkpoint finds the devices whose random states it
        # must keep by the tensors in its positional arguments.
        return checkpoint(run, *args, kwargs, use_reentrant=False)

    def _run_saving(self, number: int, inner: BlockCall, args: Any, kwargs: Any) -> Any:
        sends, streamed = self.policies[number] is ActivationPolicy.SEND, number in self.ring.streamed
        if not sends and not streamed:
            return inner(*args, **kwargs)
        storages, keep_addresses = None, set[int]()
        if sends:
            storages = self.offloader.begin_block(number)
            keep_addresses = self._inputs.shared_addresses(activations.iter_tensors((args, kwargs)))
            keep_addresses |= _storage_addresses(self.modules[number])
        pack = partial(self._pack, number, storages, keep_addresses)
        with saved_tensors_hooks(pack, self._unpack):
            output = self._run(number, inner, args, kwargs)
        if sends:
            self.offloader.end_block(number)
        return output

    # ── saved tensors ────────────────────────────────────────────────────────────────────────────────────────────

    def _pack(
        self,
        number: int,
        storages: dict[int, activations.OffloadedStorage] | None,
        keep_addresses: activations.StorageAddresses,
        tensor: torch.Tensor,
    ) -> Any:
        if number in self.ring.streamed:
            if not is_plain(tensor):
                names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
                parts = {name: self._pack(number, None, keep_addresses, getattr(tensor, name)) for name in names}
                return _PackedSubclass(type(tensor), context, parts, tensor.shape, tensor.stride())
            if self.ring.is_in_slot(tensor):
                return activations.StreamedWeightRef(number, activations.TensorView.from_tensor(tensor))
        return tensor if storages is None else self.offloader.pack(number, tensor, storages, keep_addresses)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, activations.OffloadedView):
            return self.offloader.unpack(packed)
        if isinstance(packed, activations.StreamedWeightRef):
            return packed.view.in_storage(self.ring.block_storage(packed.block, BlockPass.BACKWARD))
        if isinstance(packed, _PackedSubclass):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            tensor: torch.Tensor = packed.tensor_class.__tensor_unflatten__(
                parts, packed.context, packed.shape, packed.stride
            )
            return tensor
        assert isinstance(packed, torch.Tensor)
        return packed

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _register_backward_hooks(self, number: int, output: Any, inputs: Any) -> None:
        """Detect the start of the block's backward pass: outputs that are its inputs passed through are ignored."""
        input_ids = set(map(id, activations.iter_tensors(inputs)))
        for tensor in activations.iter_tensors(output):
            if tensor.requires_grad and id(tensor) not in input_ids:
                tensor.register_hook(partial(self._on_output_gradient, number))  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, number: int, _: torch.Tensor) -> None:
        self._begin_block(number, BlockPass.BACKWARD)

    def _begin_block(self, number: int, new_pass: BlockPass) -> None:
        if new_pass is BlockPass.BACKWARD and self.current_pass is BlockPass.BACKWARD and number >= self.current_block:
            return  # this block's backward pass has begun already: block numbers decrease in a backward pass
        self.return_weights()
        if new_pass is BlockPass.BACKWARD:
            for finished in range(number + 1, len(self.modules)):
                self.offloader.release_block(finished)
        self.current_pass, self.current_block = new_pass, number
        self.ring.begin_block(number, new_pass)
        if new_pass is BlockPass.BACKWARD:
            self.offloader.prefetch_block(number)
            if number in self.ring.streamed and self.ring.streamed[number].trained:
                self._hold_weights(number)
        for use in next_uses(number, len(self.modules), new_pass, self.ring.prefetch_depth):
            if use.backward:
                self.offloader.prefetch_block(use.block)

    def _hold_weights(self, number: int) -> None:
        """Keep a streamed block's weights on the device until another block begins, or the backward pass ends.

        Trained weights: autograd accumulates a gradient on the device of its parameter. Recomputed blocks:
        torch.utils.checkpoint saves the parameters themselves, not their tensors, until the backward pass of the block
        ends.
        """
        if number in self.ring.streamed and number != self._block_on_device:
            self.return_weights()
            self.ring.wait_for_block(number, BlockPass.BACKWARD)
            self.ring.use_device_weights(number)
            self._block_on_device = number
            if torch._C._current_graph_task_id() != -1:  # no other block begins after block 0
                Variable._execution_engine.queue_callback(self.return_weights)

    def return_weights(self) -> None:
        """No block computes any more: point the parameters of a held block at host memory again."""
        if self._block_on_device is not None:
            self.ring.use_host_weights(self._block_on_device)
            self._block_on_device = None


def _storage_addresses(module: nn.Module) -> activations.StorageAddresses:
    """Storage addresses of the module's parameters and buffers."""
    tensors: Iterable[torch.Tensor] = (*module.parameters(), *module.buffers())
    return {stored.get().untyped_storage().data_ptr() for tensor in tensors for stored in stored_tensors(tensor)}

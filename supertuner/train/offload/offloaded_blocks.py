"""The blocks of a module as a plan has them run: weights fetched ahead, activations kept, sent or recomputed.

Each block's call is wrapped from outside, around its hooks and around compiled code; names, parameters and classes stay
as they are, and `remove` leaves nothing behind. Where a pass is, is told by the calls themselves: a block begins its
forward pass when it is called, and its backward pass when the gradient of its output is there. autograd runs nodes in
the reverse order of their making, so a block's backward pass ends where that of the block before begins.
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
from supertuner.train.offload.activations import (
    ActivationOffloader,
    BlockInputs,
    OffloadedStorage,
    OffloadedView,
    StorageAddresses,
    StreamedWeightRef,
    TensorView,
    iter_tensors,
)
from supertuner.train.offload.param_storage import is_plain, stored_tensors
from supertuner.train.offload.prefetch_order import BlockPass, next_uses
from supertuner.train.offload.weight_ring import WeightRing

BlockCall = Callable[..., Any]


@dataclass(frozen=True, eq=False, slots=True)
class _PackedSubclass:
    """A saved weight in a class of its own, such as one of 8 bits: what it is made of, packed."""

    tensor_class: Any
    context: Any
    parts: dict[str, Any]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False, slots=True)
class OffloadedBlocks:
    """All blocks of a module, in the order of the forward pass, at work."""

    modules: Sequence[nn.Module]
    policies: Sequence[ActivationPolicy]
    ring: WeightRing
    activation_offloader: ActivationOffloader
    prefetch_depth: int
    current_pass: BlockPass = BlockPass.SAMPLING
    current_block: int = -1
    """The block that computes."""
    _block_on_device: int | None = None
    """The block whose weights are in place for all of its backward pass."""
    _inputs: BlockInputs = field(default_factory=BlockInputs)
    _original_calls: list[BlockCall] = field(default_factory=list)

    def install(self) -> None:
        """From now on every call of a block goes through `_called`.

        `_compiled_call_impl` is what nn.Module calls instead of its own, where there is one: torch.compile's place. It
        is the only one outside of a module's hooks that changes no class.
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
        self.activation_offloader.release_all_blocks()
        self.ring.release_slots()

    # ── forward ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _call_block(self, number: int, inner: BlockCall, *args: Any, **kwargs: Any) -> Any:
        with_gradients = torch.is_grad_enabled()
        if number == 0:
            self.activation_offloader.release_all_blocks()
        self._begin_block(number, BlockPass.FORWARD if with_gradients else BlockPass.SAMPLING)
        if not with_gradients:
            return self._run(number, inner, args, kwargs)
        if self.policies[number] is ActivationPolicy.RECOMPUTE:
            output = self._run_checkpointed(number, inner, args, kwargs)
        else:
            output = self._run_saving(number, inner, args, kwargs)
        if self.policies[number] is not ActivationPolicy.KEEP:
            torch.clear_autocast_cache()  # it holds copies of trained weights to the end of the forward pass
        self._register_backward_hooks(number, output, (args, kwargs))
        return output

    def _run(self, number: int, inner: BlockCall, args: Any, kwargs: Any) -> Any:
        """The block itself, with its weights in place."""
        if number not in self.ring.streamed or number == self._block_on_device:
            return inner(*args, **kwargs)
        self.ring.wait_for_block(number, self.current_pass)
        self.ring.use_device_weights(number)
        try:
            return inner(*args, **kwargs)
        finally:  # recomputing ends with an exception of torch's own, as soon as it has what is needed
            self.ring.use_host_weights(number)

    def _run_checkpointed(self, number: int, inner: BlockCall, args: Any, kwargs: Any) -> Any:
        calls = 0

        def run(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            *args, kwargs = given
            if calls > 1:  # the backward pass asks again
                self._begin_block(number, BlockPass.BACKWARD)
                self._hold_weights(number)
            return self._run(number, inner, args, kwargs)

        # Keywords are given as one more argument: by the tensors in arguments checkpoint knows of which devices it has
        # to keep the random numbers.
        return checkpoint(run, *args, kwargs, use_reentrant=False)

    def _run_saving(self, number: int, inner: BlockCall, args: Any, kwargs: Any) -> Any:
        sends, streamed = self.policies[number] is ActivationPolicy.SEND, number in self.ring.streamed
        if not sends and not streamed:
            return inner(*args, **kwargs)
        storages: dict[int, OffloadedStorage] = {}
        keep_addresses: StorageAddresses = set()
        if sends:
            storages = self.activation_offloader.begin_block(number)
            keep_addresses = self._inputs.shared_addresses(iter_tensors((args, kwargs))) | _storage_addresses(
                self.modules[number]
            )
        pack = partial(self._pack, number, storages if sends else None, keep_addresses)
        with saved_tensors_hooks(pack, self._unpack):
            output = self._run(number, inner, args, kwargs)
        if sends:
            self.activation_offloader.end_block(number)
        return output

    # ── what is saved ────────────────────────────────────────────────────────────────────────────────────────────

    def _pack(
        self,
        number: int,
        storages: dict[int, OffloadedStorage] | None,
        keep_addresses: StorageAddresses,
        tensor: torch.Tensor,
    ) -> Any:
        if number in self.ring.streamed:
            if not is_plain(tensor):
                names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
                parts = {name: self._pack(number, None, keep_addresses, getattr(tensor, name)) for name in names}
                return _PackedSubclass(type(tensor), context, parts, tensor.shape, tensor.stride())
            if self.ring.is_in_slot(tensor):
                return StreamedWeightRef(number, TensorView.from_tensor(tensor))
        return tensor if storages is None else self.activation_offloader.pack(number, tensor, storages, keep_addresses)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, OffloadedView):
            return self.activation_offloader.unpack(packed)
        if isinstance(packed, StreamedWeightRef):
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
        """Notice when the block's backward pass begins. What it only passes on says nothing about it."""
        input_ids = set(map(id, iter_tensors(inputs)))
        for tensor in iter_tensors(output):
            if tensor.requires_grad and id(tensor) not in input_ids:
                tensor.register_hook(partial(self._on_output_gradient, number))  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, number: int, _: torch.Tensor) -> None:
        self._begin_block(number, BlockPass.BACKWARD)

    def _begin_block(self, number: int, new_pass: BlockPass) -> None:
        if new_pass is BlockPass.BACKWARD and self.current_pass is BlockPass.BACKWARD and number >= self.current_block:
            return  # it is at work, or over: a backward pass goes down
        self.return_weights()
        if new_pass is BlockPass.BACKWARD:
            for finished in range(number + 1, len(self.modules)):
                self.activation_offloader.release_block(finished)
        self.current_pass, self.current_block = new_pass, number
        self.ring.begin_block(number, new_pass)
        if new_pass is BlockPass.BACKWARD:
            self.activation_offloader.prefetch_block(number)
            if number in self.ring.streamed and self.ring.streamed[number].trained:
                self._hold_weights(number)
        for use in next_uses(number, len(self.modules), new_pass, self.prefetch_depth):
            if use.backward:
                self.activation_offloader.prefetch_block(use.block)

    def _hold_weights(self, number: int) -> None:
        """Put a streamed block's weights in place until another block begins, or the backward pass is over.

        Where they are trained, autograd may copy a gradient to where the parameter is; where the block is recomputed,
        torch's checkpoint keeps parameters themselves, not what they were, until the block's backward pass is over.
        """
        if number in self.ring.streamed and number != self._block_on_device:
            self.return_weights()
            self.ring.wait_for_block(number, BlockPass.BACKWARD)
            self.ring.use_device_weights(number)
            self._block_on_device = number
            if torch._C._current_graph_task_id() != -1:  # the first block has no block before it that would end it
                Variable._execution_engine.queue_callback(self.return_weights)

    def return_weights(self) -> None:
        """No block computes: all weights that were lent are at home."""
        if self._block_on_device is not None:
            self.ring.use_host_weights(self._block_on_device)
            self._block_on_device = None


def _storage_addresses(module: nn.Module) -> StorageAddresses:
    """Where the module's own tensors are."""
    tensors: Iterable[torch.Tensor] = (*module.parameters(), *module.buffers())
    return {leaf.get().untyped_storage().data_ptr() for one in tensors for leaf in stored_tensors(one)}

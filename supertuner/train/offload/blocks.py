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

from supertuner.plan.placement.plan import Fate
from supertuner.train.offload.activations import Borrowed, Inputs, Part, Sender, Sent, Storages, View, tensors_in
from supertuner.train.offload.param_storage import is_plain, leaves
from supertuner.train.offload.prefetch_order import Pass, soon
from supertuner.train.offload.weight_ring import Ring

Call = Callable[..., Any]


@dataclass(frozen=True, eq=False, slots=True)
class _Inside:
    """A saved weight in a class of its own, such as one of 8 bits: what it is made of, packed."""

    kind: Any
    context: Any
    parts: dict[str, Any]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Blocks:
    """All blocks of a module, in the order of the forward pass, at work."""

    modules: Sequence[nn.Module]
    fates: Sequence[Fate]
    ring: Ring
    sender: Sender
    ahead: int
    now: Pass = Pass.SAMPLING
    at: int = -1
    """The block that computes."""
    _lent: int | None = None
    """The block whose weights are in place for all of its backward pass."""
    _inputs: Inputs = field(default_factory=Inputs)
    _inner: list[Call] = field(default_factory=list)

    def install(self) -> None:
        """From now on every call of a block goes through `_called`.

        `_compiled_call_impl` is what nn.Module calls instead of its own, where there is one: torch.compile's place. It
        is the only one outside of a module's hooks that changes no class.
        """
        for number, module in enumerate(self.modules):
            before: Call | None = module._compiled_call_impl
            self._inner.append(before or module._call_impl)
            module._compiled_call_impl = partial(self._called, number, before or module._call_impl)

    def remove(self) -> None:
        for module, inner in zip(self.modules, self._inner, strict=True):
            module._compiled_call_impl = None if inner == module._call_impl else inner
        self._inner.clear()
        self.rest()
        self.sender.done_all()
        self.ring.release()

    # ── forward ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _called(self, number: int, inner: Call, *args: Any, **kwargs: Any) -> Any:
        learning = torch.is_grad_enabled()
        if number == 0:
            self.sender.done_all()
        self._begin(number, Pass.FORWARD if learning else Pass.SAMPLING)
        if not learning:
            return self._run(number, inner, args, kwargs)
        if self.fates[number] is Fate.RECOMPUTE:
            made = self._recomputed(number, inner, args, kwargs)
        else:
            made = self._saving(number, inner, args, kwargs)
        if self.fates[number] is not Fate.KEEP:
            torch.clear_autocast_cache()  # it holds copies of trained weights to the end of the forward pass
        self._watch(number, made, (args, kwargs))
        return made

    def _run(self, number: int, inner: Call, args: Any, kwargs: Any) -> Any:
        """The block itself, with its weights in place."""
        if number not in self.ring.streamed or number == self._lent:
            return inner(*args, **kwargs)
        self.ring.need(number, self.now)
        self.ring.lend(number)
        try:
            return inner(*args, **kwargs)
        finally:  # recomputing ends with an exception of torch's own, as soon as it has what is needed
            self.ring.take_back(number)

    def _recomputed(self, number: int, inner: Call, args: Any, kwargs: Any) -> Any:
        calls = 0

        def run(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            *args, kwargs = given
            if calls > 1:  # the backward pass asks again
                self._begin(number, Pass.BACKWARD)
                self._lend(number)
            return self._run(number, inner, args, kwargs)

        # Keywords are given as one more argument: by the tensors in arguments checkpoint knows of which devices it has
        # to keep the random numbers.
        return checkpoint(run, *args, kwargs, use_reentrant=False)

    def _saving(self, number: int, inner: Call, args: Any, kwargs: Any) -> Any:
        sends, streamed = self.fates[number] is Fate.SEND, number in self.ring.streamed
        if not sends and not streamed:
            return inner(*args, **kwargs)
        own: dict[int, Sent] = {}
        staying: Storages = set()
        if sends:
            own = self.sender.begin(number)
            staying = self._inputs.shared(tensors_in((args, kwargs))) | _stored(self.modules[number])
        pack = partial(self._pack, number, own if sends else None, staying)
        with saved_tensors_hooks(pack, self._unpack):
            made = self._run(number, inner, args, kwargs)
        if sends:
            self.sender.end(number)
        return made

    # ── what is saved ────────────────────────────────────────────────────────────────────────────────────────────

    def _pack(self, number: int, own: dict[int, Sent] | None, staying: Storages, tensor: torch.Tensor) -> Any:
        if number in self.ring.streamed:
            if not is_plain(tensor):
                names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
                parts = {name: self._pack(number, None, staying, getattr(tensor, name)) for name in names}
                return _Inside(type(tensor), context, parts, tensor.shape, tensor.stride())
            if self.ring.slot_of(tensor):
                return Borrowed(number, View.of(tensor))
        return tensor if own is None else self.sender.pack(number, tensor, own, staying)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Part):
            return self.sender.unpack(packed)
        if isinstance(packed, Borrowed):
            return packed.view.within(self.ring.storage(packed.block, Pass.BACKWARD))
        if isinstance(packed, _Inside):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            made: torch.Tensor = packed.kind.__tensor_unflatten__(parts, packed.context, packed.shape, packed.stride)
            return made
        assert isinstance(packed, torch.Tensor)
        return packed

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, number: int, made: Any, given: Any) -> None:
        """Notice when the block's backward pass begins. What it only passes on says nothing about it."""
        passed_on = set(map(id, tensors_in(given)))
        for tensor in tensors_in(made):
            if tensor.requires_grad and id(tensor) not in passed_on:
                tensor.register_hook(partial(self._gradient, number))  # type: ignore[no-untyped-call]

    def _gradient(self, number: int, _: torch.Tensor) -> None:
        self._begin(number, Pass.BACKWARD)

    def _begin(self, number: int, now: Pass) -> None:
        if now is Pass.BACKWARD and self.now is Pass.BACKWARD and number >= self.at:
            return  # it is at work, or over: a backward pass goes down
        self.rest()
        if now is Pass.BACKWARD:
            for over in range(number + 1, len(self.modules)):
                self.sender.done(over)
        self.now, self.at = now, number
        self.ring.begin(number, now)
        if now is Pass.BACKWARD:
            self.sender.bring(number)
            if number in self.ring.streamed and self.ring.streamed[number].trained:
                self._lend(number)
        for use in soon(number, len(self.modules), now, self.ahead):
            if use.backward:
                self.sender.bring(use.block)

    def _lend(self, number: int) -> None:
        """Put a streamed block's weights in place until another block begins, or the backward pass is over.

        Where they are trained, autograd may copy a gradient to where the parameter is; where the block is recomputed,
        torch's checkpoint keeps parameters themselves, not what they were, until the block's backward pass is over.
        """
        if number in self.ring.streamed and number != self._lent:
            self.rest()
            self.ring.need(number, Pass.BACKWARD)
            self.ring.lend(number)
            self._lent = number
            if torch._C._current_graph_task_id() != -1:  # the first block has no block before it that would end it
                Variable._execution_engine.queue_callback(self.rest)

    def rest(self) -> None:
        """No block computes: all weights that were lent are at home."""
        if self._lent is not None:
            self.ring.take_back(self._lent)
            self._lent = None


def _stored(module: nn.Module) -> Storages:
    """Where the module's own tensors are."""
    tensors: Iterable[torch.Tensor] = (*module.parameters(), *module.buffers())
    return {leaf.get().untyped_storage().data_ptr() for one in tensors for leaf in leaves(one)}

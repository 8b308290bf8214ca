"""Watches operators on fake tensors and writes down every tensor's birth and death, and the work that is done.

It stands above the fake tensors and sees what autograd and Python call, in order. Where a real device differs from
fake tensors (memory that a kernel takes while it runs, sums made in place), `Device` says how.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from supertuner.plan.placement.step_table import Work
from supertuner.plan.trace.record import AFTER, BEFORE, Kind, Pass, Stretch, Trace

aten = torch.ops.aten
Operator: TypeAlias = Any
"""torch's OpOverload."""

FLOPS: Final[Mapping[Operator, Callable[..., int]]] = {
    **flop_registry,
    # torch counts attention on GPUs only; on the CPU it is the same product.
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


class Device(Protocol):
    """How a kind of device computes, and uses memory beside what operators return."""

    @property
    def name(self) -> str:
        """`cuda`, `cpu`."""

    @property
    def granule(self) -> int:
        """Every tensor takes a multiple of so many bytes."""

    def behaving(self) -> AbstractContextManager[None]:
        """Inside, fake tensors on the CPU go the ways that they would go on this device."""

    def standing(self) -> Sequence[int]:
        """Bytes of what its libraries take for themselves when they are first used, and keep."""

    def workspace(self, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Bytes of what an operator takes when it begins and gives back when it ends."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A device that does what torch's CPU code does."""

    name: str = "cpu"
    granule: int = 1

    def behaving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def standing(self) -> Sequence[int]:
        return ()

    def workspace(self, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        return ()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Between `with` and its end, everything that is computed is recorded."""

    def __init__(self, device: Device, threads: int = 2) -> None:
        """`threads`: how many compute in this process by the end of it. Autograd's engine has one of its own."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self._threads = threads
        self.clock = 0
        self.blocks = [BEFORE, AFTER]
        self.nbytes: list[int] = []
        self.birth: list[int] = []
        self.death: list[int] = []
        self.kind: list[int] = []
        self.block: list[int] = []
        self.during: list[int] = []
        self._ids: dict[int, int] = {}
        """Address of a live storage → which tensor it is."""
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._places: dict[str, int] = {BEFORE: 0, AFTER: 1}
        self._owners: dict[int, int] = {}
        """id of a parameter → its block."""
        self._inside: list[int] = []
        """Blocks whose forward pass is running, the innermost last."""
        self._ranges: list[tuple[int, int, int]] = []
        self._entered = False
        self._pass = Pass.FORWARD
        self._backward = False
        self._stretches: list[Stretch] = []
        self._open: _Open | None = None
        self._alone: tuple[int, int, int] | None = None
        self._stands: list[int] = []
        """What the device takes once."""
        self.backward_began: list[int] = []
        """For each micro-batch, when its backward pass began."""
        self.inputs: list[tuple[int, int]] = []
        """(tensor, block): what was given to a block in the forward pass."""

    # What is known beforehand

    def watch(self, module: nn.Module, blocks: Mapping[str, nn.Module], prefix: str = "") -> None:
        """Follow these blocks of a module, and count its parameters and buffers as they are now. A prefix tells the
        names of several modules apart."""
        for name, block in blocks.items():
            self._places[f"{prefix}{name}"] = len(self.blocks)
            self.blocks.append(f"{prefix}{name}")
            block.register_forward_pre_hook(self._enter(len(self.blocks) - 1), with_kwargs=True)
            block.register_forward_hook(self._leave, always_call=True)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            place = self.place_of(f"{prefix}{name}")
            self._owners[id(tensor)] = place
            kind = Kind.TRAINED if tensor.requires_grad else Kind.FROZEN
            self.known(tensor, kind, place)
        if not self._stands:
            self._stands = [self._take(nbytes, 0, at=0) for nbytes in self.device.standing()[: self._threads]]

    def place_of(self, name: str) -> int:
        """The block that a parameter of this name is in."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if (found := self._places.get(".".join(parts[:end]))) is not None:
                return found
        return self._places[BEFORE]

    def known(self, tensor: torch.Tensor, kind: Kind, place: int = 0) -> None:
        """A tensor that is there before the step, or one that is seen already and whose class is known only now."""
        for plain in plain_tensors(tensor):
            number = self._ids.get(plain.untyped_storage()._cdata)
            if number is None:
                number = self._add(plain, place, at=0)
            self.kind[number] = kind
            self.block[number] = place

    def born(self, number: int, at: int) -> None:
        self.birth[number] = at

    def number(self, tensor: torch.Tensor) -> int | None:
        """Which tensor this is; None: none that was seen."""
        return self._ids.get(tensor.untyped_storage()._cdata)

    # Which pass it is

    def micro_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches as they are; asking for one begins a forward pass, asking after the last the update."""
        for batch in batches:
            self._pass, self._backward = Pass.FORWARD, False
            self._entered = False
            self._ranges.clear()
            yield batch
        self._pass, self._backward = Pass.UPDATE, False

    def _enter(self, place: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(place)
            self._entered = True
            if not self._backward:
                self._ranges.append((torch.autograd._get_sequence_nr(), 1 << 63, place))  # type: ignore[attr-defined]
                for leaf in tree_iter((args, kwargs)):
                    if isinstance(leaf, torch.Tensor) and (number := self.number(leaf)) is not None:
                        self.inputs.append((number, place))

        return enter

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        place = self._inside.pop()
        if not self._backward and self._ranges and self._ranges[-1][2] == place:
            begin, _, _ = self._ranges[-1]
            self._ranges[-1] = (begin, torch.autograd._get_sequence_nr(), place)  # type: ignore[attr-defined]

    def _where(self) -> tuple[int, Pass]:
        node: Any = torch._C._current_autograd_node()
        if node is not None and not self._backward:
            self._backward = True
            self.backward_began.append(self.clock)
        if not self._backward:
            place = self._inside[-1] if self._inside else self._places[AFTER if self._entered else BEFORE]
            return place, self._pass
        behind = self._behind(node) if node is not None else self._places[AFTER]
        if node is not None and torch.is_grad_enabled():  # the backward pass itself needs no graph of its own
            return self._inside[-1] if self._inside else behind, Pass.RECOMPUTE
        return behind, Pass.BACKWARD

    def _behind(self, node: Any) -> int:
        """The block whose forward pass made this node of the graph."""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._owners.get(id(variable), self._places[BEFORE])
        number = node._sequence_nr()
        low, high = 0, len(self._ranges)
        while low < high:  # the last block that began before the node
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._ranges[middle][0] <= number else (low, middle)
        if low == 0:
            return self._places[BEFORE]
        _, end, place = self._ranges[low - 1]
        return place if number < end else self._places[AFTER]

    # What operators do

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return _scalar(args[0])  # a value that nobody has: the step goes on as with an ordinary one
        if func.namespace == "prim":  # where a tensor is, and the like
            return func(*args, **kwargs)
        place, during = self._where()
        if self._open is None or (self._open.place, self._open.during) != (place, during):
            self._close()
            self._open = _Open(place, during, self.clock)
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is aten.add.Tensor and during is Pass.BACKWARD and self._engine_adds(given, kwargs):
            self._work(func, args, kwargs, given, [given[0]])
            return given[0]
        taken = [self._take(nbytes, place) for nbytes in self.device.workspace(func, args, kwargs)]
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        fresh = False
        for tensor in made:
            if self.number(tensor) is None:
                self._add(tensor, place)
                fresh = True
        for number in taken:
            self._free(number)
        if fresh or func._schema.is_mutable:
            self._work(func, args, kwargs, given, made, result)
        return result

    def _engine_adds(self, given: Sequence[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
        """Whether this is autograd's engine adding up two gradients, of which nobody else holds the first. It does so
        in place; but not with fake tensors, because they are a subclass. Who holds a tensor can be counted, and what
        is counted in this case was seen once, in `learn`."""
        first = given[0]
        held = (
            first._use_count(),  # type: ignore[attr-defined]
            torch._C._storage_Use_Count(first.untyped_storage()._cdata),
            sys.getrefcount(first),
        )
        if self._alone is None:
            self._alone = held
        plain = len(given) == 2 and not kwargs and first.shape == given[1].shape and first.dtype == given[1].dtype
        return held == self._alone and plain and is_non_overlapping_and_dense_or_false(first)

    def learn(self) -> None:
        """See how often a gradient is held that nobody but the engine has; leaves no record."""
        given = torch.empty(1, requires_grad=True)
        with self:
            between = given * 2
            torch.autograd.backward(between.sin() + between.cos())
        assert self._alone is not None, "the engine added up no gradients"
        del between, given
        self._forget()

    def _forget(self) -> None:
        self._open, self._backward, self.clock = None, False, 0
        self._stretches, self.backward_began = [], []
        for column in (self.nbytes, self.birth, self.death, self.kind, self.block, self.during):
            column.clear()
        self._ids.clear()
        self._watched.clear()

    def _work(
        self,
        func: Operator,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        result: Any = None,
    ) -> None:
        assert self._open is not None
        formula = FLOPS.get(func._overloadpacket)
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
        elements = 0 if formula is not None else max((one.numel() for one in (*made, *given)), default=0)
        nbytes = 0
        for tensor in (*given, *made):
            nbytes += tensor.numel() * tensor.element_size()
            if (number := self.number(tensor)) is not None:
                self._open.touched[number] = None
        self._open.add(flops, elements, nbytes)

    # Births and deaths

    def _add(self, tensor: torch.Tensor, place: int, at: int | None = None) -> int:
        storage = tensor.untyped_storage()
        number = self._take(storage.nbytes(), place, at)
        address = storage._cdata
        self._ids[address] = number
        self._watched[number] = weakref.ref(storage, lambda _: self._gone(number, address))
        return number

    def _gone(self, number: int, address: int) -> None:
        self._ids.pop(address, None)
        self._watched.pop(number, None)
        self._free(number)

    def _take(self, nbytes: int, place: int, at: int | None = None) -> int:
        if at is None:
            self.clock += 1
        self.nbytes.append(nbytes)
        self.birth.append(self.clock if at is None else at)
        self.death.append(-1)
        self.kind.append(Kind.TEMPORARY)
        self.block.append(place)
        self.during.append(self._open.during if self._open is not None else Pass.FORWARD)
        return len(self.nbytes) - 1

    def _free(self, number: int) -> None:
        self.clock += 1
        self.death[number] = self.clock

    def _close(self) -> None:
        if self._open is not None:
            self._stretches.append(self._open.closed(self.clock))
            self._open = None

    # What came of it

    def worked(self) -> Work:
        """All work so far."""
        self._close()
        return sum((one.work for one in self._stretches), Work())

    def trace(self, phase: str, *, micro_batches: int = 1, notes: Sequence[str] = ()) -> Trace:
        """Everything so far. Tensors that are still there outlive the step."""
        self._close()
        self._watched.clear()
        end = self.clock + 1
        kind = np.array(self.kind, dtype=np.uint8)
        birth = np.array(self.birth, dtype=np.int64)
        death = np.array(self.death, dtype=np.int64)
        death[death < 0] = end
        during = np.array(self.during, dtype=np.uint8)
        kind[_used_later(kind, birth, death, during, self.backward_began, self._stretches)] = Kind.ACTIVATION
        birth[kind == Kind.STATE] = 0
        order = self._order()
        renumbered = np.argsort(order)
        given = np.array(sorted(set(self.inputs)), dtype=np.int64).reshape(-1, 2)
        given[:, 1] = renumbered[given[:, 1]]
        return Trace(
            phase=phase,
            device=self.device.name,
            granule=self.device.granule,
            blocks=tuple(self.blocks[place] for place in order),
            nbytes=np.array(self.nbytes, dtype=np.int64),
            birth=birth,
            death=death,
            kind=kind,
            block=renumbered[np.array(self.block, dtype=np.int64)].astype(np.int16),
            stretches=tuple(
                Stretch(int(renumbered[s.block]), s.during, s.begin, s.end, s.work, s.touched) for s in self._stretches
            ),
            end=end,
            inputs=given.astype(np.int32),
            micro_batches=micro_batches,
            notes=tuple(notes),
        )

    def _order(self) -> list[int]:
        """The blocks as the forward pass first came to them."""
        first = {one.block: number for number, one in reversed(list(enumerate(self._stretches)))}
        return [0, *sorted(range(2, len(self.blocks)), key=lambda place: first.get(place, len(first) + place)), 1]


class Answering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where code asks for the value of a fake tensor, it is told an ordinary one: 1, or `truth`."""

    def __init__(self, truth: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._truth = truth

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return _scalar(args[0], self._truth)
        return func(*args, **(kwargs or {}))


class _Open:
    """A stretch that goes on."""

    __slots__ = ("begin", "during", "elements", "flops", "nbytes", "operators", "place", "touched")

    def __init__(self, place: int, during: Pass, begin: int) -> None:
        self.place, self.during, self.begin = place, during, begin
        self.touched: dict[int, None] = {}
        self.flops = self.elements = self.nbytes = self.operators = 0

    def add(self, flops: int, elements: int, nbytes: int) -> None:
        self.flops += flops
        self.elements += elements
        self.nbytes += nbytes
        self.operators += 1

    def closed(self, end: int) -> Stretch:
        work = Work(float(self.flops), float(self.elements), float(self.nbytes), self.operators)
        return Stretch(self.place, self.during, self.begin, end, work, tuple(self.touched))


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or those that a wrapper (8-bit weights) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor.data) is torch.Tensor:
        yield tensor
        return
    for name in flatten()[0]:
        yield from plain_tensors(getattr(tensor, name))


def _scalar(tensor: torch.Tensor, truth: bool = True) -> Any:
    """A value that nobody has, as an ordinary one."""
    return truth if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1


def _used_later(
    kind: Any, birth: Any, death: Any, during: Any, began: Sequence[int], stretches: Sequence[Stretch]
) -> Any:
    """Which tensors are activations: of the forward pass, alive when the backward pass begins; made again, and alive
    when the stretch that made them again ends. What was there before the step (libraries' workspaces) is none."""
    found = np.zeros(len(kind), dtype=bool)
    plain = (kind == Kind.TEMPORARY) & (birth > 0)
    for at in began:
        found |= plain & (during == Pass.FORWARD) & (birth <= at) & (death > at)
    for one in stretches:
        if one.during is Pass.RECOMPUTE:
            again = plain & (during == Pass.RECOMPUTE) & (birth > one.begin) & (birth <= one.end)
            found |= again & (death > one.end)
    return found

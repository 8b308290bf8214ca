"""Records every allocation and release of fake tensors, and the work of the operators, while a step runs.

The recorder is a dispatch mode above the fake tensors: it sees every operator that autograd and Python call, in order.
What differs on a real device (workspaces of kernels, other dispatch) comes from a `TracedDevice`.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.trace.execution_trace import OUTSIDE_BLOCKS, ExecutionTrace, StepPass, TensorKind, TraceSpan
from supertuner.plan.trace.fake_results import FakeResultCache, has_wrapper, tensors_in

aten = torch.ops.aten
Operator: TypeAlias = Any
"""torch's OpOverload, which has no public type."""

FLOP_FORMULAS: Final[Mapping[Operator, Callable[..., int]]] = {
    **flop_registry,
    # torch counts attention on GPUs only; the CPU computes the same products.
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


@dataclass(frozen=True, slots=True)
class TracedDevice:
    """How a kind of device dispatches operators, and which memory it uses besides their results.

    This one has no workspaces and dispatches as torch's CPU code; subclasses describe real devices.
    """

    name: str = "cpu"
    """`cuda`, `cpu`."""
    alignment_bytes: int = 1
    """Every tensor occupies a multiple of this many bytes."""
    results: FakeResultCache = field(default_factory=FakeResultCache, repr=False, compare=False)
    """Known results of operators, which all traces for the device share."""

    def emulate_dispatch(self) -> AbstractContextManager[None]:
        """Inside, operators on fake CPU tensors dispatch as on this device."""
        return nullcontext()

    def library_workspaces(self) -> Sequence[int]:
        """Sizes of workspaces that libraries allocate at their first use and keep, one per thread."""
        return ()

    def operator_workspaces(self, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Sizes of buffers that an operator allocates and frees while it runs."""
        return ()


PLAIN_CPU: Final = TracedDevice()
BEFORE, AFTER = 0, 1
"""Numbers of the blocks that stand for operators outside all modules, while a trace is recorded."""


class TraceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records everything that is computed inside its `with` block."""

    def __init__(self, device: TracedDevice, threads: int = 2) -> None:
        """`threads`: threads that run operators: 2 with a backward pass, which autograd's engine runs in its own
        thread."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self._threads = threads
        self.clock = 0
        self.nbytes: list[int] = []
        self.birth: list[int] = []
        self.death: list[int] = []
        self.kind: list[int] = []
        self.block: list[int] = []
        self.birth_pass: list[int] = []
        self._tensor_numbers: dict[int, int] = {}
        """Address of a live storage → index of its tensor."""
        self._storage_refs: dict[int, weakref.ref[Any]] = {}
        self._block_numbers = {name: number for number, name in enumerate(OUTSIDE_BLOCKS)}
        self._parameter_blocks: dict[int, int] = {}
        """id of a parameter → its block."""
        self._active_blocks: list[int] = []
        """Blocks whose forward pass is running, the innermost last."""
        self._sequence_ranges: list[tuple[int, int, int]] = []
        """(begin, end, block): autograd's sequence numbers of the nodes that a block's forward pass created."""
        self._any_block_entered = False
        self._current_pass = StepPass.FORWARD
        self._in_backward = False
        self._spans: list[TraceSpan] = []
        self._open_span: _OpenSpan | None = None
        self._engine_use_counts: tuple[int, int, int] | None = None
        self._library_workspaces: list[int] = []
        self.backward_starts: list[int] = []
        """For each micro-batch, the tick at which its backward pass began."""
        self.block_inputs: list[tuple[int, int]] = []
        """(tensor, block): inputs of a block in the forward pass."""

    # ── before the step ──────────────────────────────────────────────────────────────────────────────────────────

    def track_module(self, module: nn.Module, blocks: Mapping[str, nn.Module], prefix: str = "") -> None:
        """Hooks the blocks of a module, and registers its current parameters and buffers. `prefix` distinguishes the
        names of several modules."""
        for name, block in blocks.items():
            number = self._block_numbers[f"{prefix}{name}"] = len(self._block_numbers)
            block.register_forward_pre_hook(partial(self._on_block_entry, number), with_kwargs=True)
            block.register_forward_hook(self._on_block_exit, always_call=True)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            block_number = self.block_of_parameter(f"{prefix}{name}")
            self._parameter_blocks[id(tensor)] = block_number
            kind = TensorKind.TRAINED if tensor.requires_grad else TensorKind.FROZEN
            self.register_tensor(tensor, kind, block_number)
        if not self._library_workspaces:
            workspaces = self.device.library_workspaces()[: self._threads]
            self._library_workspaces = [self._record_birth(nbytes, BEFORE, tick=0) for nbytes in workspaces]

    def block_of_parameter(self, name: str) -> int:
        """The block that contains the parameter with this name: the longest prefix that is a block's name."""
        while name and name not in self._block_numbers:
            name = name.rpartition(".")[0]
        return self._block_numbers.get(name, BEFORE)

    def register_tensor(self, tensor: torch.Tensor, kind: TensorKind, block_number: int = 0) -> None:
        """Sets the class of a tensor: one that exists before the step, or one that was recorded and is classified
        now."""
        for inner in inner_tensors(tensor):
            number = self.tensor_number(inner)
            if number is None:
                number = self._track_storage(inner, block_number, tick=0)
            self.kind[number] = kind
            self.block[number] = block_number

    def tensor_number(self, tensor: torch.Tensor) -> int | None:
        """The index of a recorded tensor; None: it was not recorded."""
        return self._tensor_numbers.get(tensor.untyped_storage()._cdata)

    # ── the current block and pass ───────────────────────────────────────────────────────────────────────────────

    def mark_micro_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches unchanged. Requesting one marks the begin of a forward pass, the end marks the update."""
        for batch in batches:
            self._current_pass, self._in_backward = StepPass.FORWARD, False
            self._any_block_entered = False
            self._sequence_ranges.clear()
            yield batch
        self._current_pass, self._in_backward = StepPass.UPDATE, False

    def _on_block_entry(self, block_number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._active_blocks.append(block_number)
        self._any_block_entered = True
        if not self._in_backward:
            self._sequence_ranges.append((torch.autograd._get_sequence_nr(), 1 << 63, block_number))  # type: ignore[attr-defined]
            for tensor in tensors_in((args, kwargs)):
                if (number := self.tensor_number(tensor)) is not None:
                    self.block_inputs.append((number, block_number))

    def _on_block_exit(self, module: nn.Module, args: Any, result: Any) -> None:
        block_number = self._active_blocks.pop()
        if not self._in_backward and self._sequence_ranges and self._sequence_ranges[-1][2] == block_number:
            begin, _, _ = self._sequence_ranges[-1]
            self._sequence_ranges[-1] = (begin, torch.autograd._get_sequence_nr(), block_number)  # type: ignore[attr-defined]

    def _current_block_and_pass(self) -> tuple[int, StepPass]:
        """The block and pass of the operator that is about to run.

        In the forward pass, hooks say which block runs. In the backward pass there are no hooks: the operator belongs
        to the block whose forward pass created the autograd node that is being executed. With gradients enabled inside
        a node, the block is being recomputed (gradient checkpointing): the backward pass itself builds no graph.
        """
        node: Any = torch._C._current_autograd_node()
        if node is not None and not self._in_backward:
            self._in_backward = True
            self.backward_starts.append(self.clock)
        if not self._in_backward:
            outside = AFTER if self._any_block_entered else BEFORE
            return self._active_blocks[-1] if self._active_blocks else outside, self._current_pass
        node_block = AFTER if node is None else self._block_of_node(node)
        if node is not None and torch.is_grad_enabled():
            return self._active_blocks[-1] if self._active_blocks else node_block, StepPass.RECOMPUTE
        return node_block, StepPass.BACKWARD

    def _block_of_node(self, node: Any) -> int:
        """The block whose forward pass created this autograd node, by its sequence number."""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameter_blocks.get(id(variable), BEFORE)
        number = node._sequence_nr()
        begun = bisect_right(self._sequence_ranges, number, key=itemgetter(0))
        if begun == 0:
            return BEFORE
        _, end, block_number = self._sequence_ranges[begun - 1]
        return block_number if number < end else AFTER

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_wrapper(types):
            return NotImplemented
        if func is aten._local_scalar_dense.default:
            return _placeholder_value(args[0])  # fake tensors have no values: the step continues with an ordinary one
        if func.namespace == "prim":  # queries
            return self.device.results.call(func, args, kwargs, ())
        block_number, step_pass = self._current_block_and_pass()
        span = self._open_span
        if span is None or (span.block_number, span.step_pass) != (block_number, step_pass):
            self._close_span()
            self._open_span = _OpenSpan(block_number, step_pass, self.clock)
        inputs = tensors_in((args, kwargs))
        if func is aten.add.Tensor and step_pass is StepPass.BACKWARD and self._is_engine_accumulation(inputs, kwargs):
            self._record_work(None, inputs, [inputs[0]])
            return inputs[0]
        buffers = self.device.operator_workspaces(func, args, kwargs)
        workspaces = [self._record_birth(nbytes, block_number) for nbytes in buffers]
        result = self.device.results.call(func, args, kwargs, inputs)
        outputs = tensors_in(result)
        allocates = False
        for tensor in outputs:
            if self.tensor_number(tensor) is None:
                self._track_storage(tensor, block_number)
                allocates = True
        for number in workspaces:
            self._record_death(number)
        if allocates or func._schema.is_mutable:
            formula = FLOP_FORMULAS.get(func._overloadpacket)
            flops = None if formula is None else formula(*args, **kwargs, out_val=result)
            self._record_work(flops, inputs, outputs)
        return result

    def _is_engine_accumulation(self, inputs: Sequence[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
        """Whether autograd's engine is adding two gradients and owns the first one alone.

        In this case the engine adds in place (`accumulate` in torch/csrc/autograd/input_buffer.cpp), but not
        for fake tensors, because they are a tensor subclass. The recorder then skips the addition, so that no result is
        allocated. The case is recognized by the reference counts of the first gradient; `learn_engine_use_counts` has
        recorded the counts of a known case.
        """
        first = inputs[0]
        use_counts = (
            first._use_count(),  # type: ignore[attr-defined]
            torch._C._storage_Use_Count(first.untyped_storage()._cdata),
            sys.getrefcount(first),
        )
        if self._engine_use_counts is None:
            self._engine_use_counts = use_counts
        if use_counts != self._engine_use_counts or len(inputs) != 2 or kwargs:
            return False
        same_kind = first.shape == inputs[1].shape and first.dtype == inputs[1].dtype
        return same_kind and is_non_overlapping_and_dense_or_false(first)

    def learn_engine_use_counts(self) -> None:
        """Records the reference counts of a gradient that only the engine holds, in a small graph; leaves no trace."""
        leaf = torch.empty(1, requires_grad=True)
        with self:
            intermediate = leaf * 2
            torch.autograd.backward(intermediate.sin() + intermediate.cos())
        assert self._engine_use_counts is not None, "the engine added no gradients"
        del intermediate, leaf
        self._reset()

    def _reset(self) -> None:
        self._open_span, self._in_backward, self.clock = None, False, 0
        self._spans, self.backward_starts = [], []
        for column in (self.nbytes, self.birth, self.death, self.kind, self.block, self.birth_pass):
            column.clear()
        self._tensor_numbers.clear()
        self._storage_refs.clear()

    def _record_work(self, flops: int | None, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """`flops`: those of matrix products; None: the operator is none."""
        assert self._open_span is not None
        elements = max((one.numel() for one in (*outputs, *inputs)), default=0) if flops is None else 0
        nbytes = 0
        for tensor in (*inputs, *outputs):
            nbytes += tensor.numel() * tensor.element_size()
            if (number := self.tensor_number(tensor)) is not None:
                self._open_span.touched_tensors[number] = None
        self._open_span.add(flops or 0, elements, nbytes)

    # ── allocations and releases ─────────────────────────────────────────────────────────────────────────────────

    def _track_storage(self, tensor: torch.Tensor, block_number: int, tick: int | None = None) -> int:
        storage = tensor.untyped_storage()
        number = self._record_birth(storage.nbytes(), block_number, tick)
        address = storage._cdata
        self._tensor_numbers[address] = number
        self._storage_refs[number] = weakref.ref(storage, lambda _: self._on_storage_freed(number, address))
        return number

    def _on_storage_freed(self, number: int, address: int) -> None:
        self._tensor_numbers.pop(address, None)
        self._storage_refs.pop(number, None)
        self._record_death(number)

    def _record_birth(self, nbytes: int, block_number: int, tick: int | None = None) -> int:
        if tick is None:
            self.clock += 1
        self.nbytes.append(nbytes)
        self.birth.append(self.clock if tick is None else tick)
        self.death.append(-1)
        self.kind.append(TensorKind.TEMPORARY)
        self.block.append(block_number)
        self.birth_pass.append(self._open_span.step_pass if self._open_span is not None else StepPass.FORWARD)
        return len(self.nbytes) - 1

    def _record_death(self, number: int) -> None:
        self.clock += 1
        self.death[number] = self.clock

    def _close_span(self) -> None:
        if self._open_span is not None:
            self._spans.append(self._open_span.finish(self.clock))
            self._open_span = None

    # ── the result ───────────────────────────────────────────────────────────────────────────────────────────────

    def work_so_far(self) -> OperatorWork:
        """The work of all operators so far."""
        self._close_span()
        return sum((one.work for one in self._spans), OperatorWork())

    def build_trace(self, phase: str, *, micro_batches: int = 1, notes: Sequence[str] = ()) -> ExecutionTrace:
        """The trace of everything so far. Tensors that are still alive outlive the step."""
        self._close_span()
        self._storage_refs.clear()
        end = self.clock + 1
        kind = np.array(self.kind, dtype=np.uint8)
        birth = np.array(self.birth, dtype=np.int64)
        death = np.array(self.death, dtype=np.int64)
        death[death < 0] = end
        birth_pass = np.array(self.birth_pass, dtype=np.uint8)
        kind[_is_activation(kind, birth, death, birth_pass, self.backward_starts, self._spans)] = TensorKind.ACTIVATION
        birth[kind == TensorKind.STATE] = 0
        order, names = self._block_order(), list(self._block_numbers)
        renumbered = np.argsort(order)
        block_inputs = np.array(sorted(set(self.block_inputs)), dtype=np.int64).reshape(-1, 2)
        block_inputs[:, 1] = renumbered[block_inputs[:, 1]]
        return ExecutionTrace(
            phase=phase,
            device=self.device.name,
            alignment_bytes=self.device.alignment_bytes,
            blocks=tuple(names[place] for place in order),
            nbytes=np.array(self.nbytes, dtype=np.int64),
            birth=birth,
            death=death,
            kind=kind,
            block=renumbered[np.array(self.block, dtype=np.int64)].astype(np.int16),
            spans=tuple(replace(span, block=int(renumbered[span.block])) for span in self._spans),
            end=end,
            block_inputs=block_inputs.astype(np.int32),
            micro_batches=micro_batches,
            notes=tuple(notes),
        )

    def _block_order(self) -> list[int]:
        """The blocks in the order in which the forward pass first entered them."""
        first = {one.block: number for number, one in reversed(list(enumerate(self._spans)))}
        inner = range(len(OUTSIDE_BLOCKS), len(self._block_numbers))
        return [BEFORE, *sorted(inner, key=lambda place: first.get(place, len(first) + place)), AFTER]


class FakeScalarMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, reading the value of a fake tensor (`.item()`) returns 1, or `bool_value` for booleans."""

    def __init__(self, bool_value: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bool_value = bool_value

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return _placeholder_value(args[0], self._bool_value)
        return func(*args, **(kwargs or {}))


class _OpenSpan:
    """A span that is still being recorded."""

    __slots__ = ("begin", "block_number", "elements", "flops", "nbytes", "operators", "step_pass", "touched_tensors")

    def __init__(self, block_number: int, step_pass: StepPass, begin: int) -> None:
        self.block_number, self.step_pass, self.begin = block_number, step_pass, begin
        self.touched_tensors: dict[int, None] = {}
        self.flops = self.elements = self.nbytes = self.operators = 0

    def add(self, flops: int, elements: int, nbytes: int) -> None:
        self.flops += flops
        self.elements += elements
        self.nbytes += nbytes
        self.operators += 1

    def finish(self, end: int) -> TraceSpan:
        work = OperatorWork(float(self.flops), float(self.elements), float(self.nbytes), self.operators)
        return TraceSpan(self.block_number, self.step_pass, self.begin, end, work, tuple(self.touched_tensors))


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or the tensors inside a wrapper subclass (8-bit weights)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor.data) is torch.Tensor:
        yield tensor
        return
    for name in flatten()[0]:
        yield from inner_tensors(getattr(tensor, name))


def _placeholder_value(tensor: torch.Tensor, bool_value: bool = True) -> Any:
    """An ordinary value in place of a fake tensor's unknown one."""
    if tensor.dtype is torch.bool:
        return bool_value
    return 1.0 if tensor.is_floating_point() else 1


def _is_activation(
    kind: Any, birth: Any, death: Any, birth_pass: Any, backward_starts: Sequence[int], spans: Sequence[TraceSpan]
) -> Any:
    """A mask of the tensors that are activations: allocated in the forward pass and alive when the backward pass
    begins, or recomputed and alive at the end of the span that recomputed them. Tensors that existed before the step
    (workspaces of libraries) are none."""
    is_activation = np.zeros(len(kind), dtype=bool)
    candidates = (kind == TensorKind.TEMPORARY) & (birth > 0)
    for at in backward_starts:
        is_activation |= candidates & (birth_pass == StepPass.FORWARD) & (birth <= at) & (death > at)
    for one in spans:
        if one.step_pass is StepPass.RECOMPUTE:
            recomputed = candidates & (birth_pass == StepPass.RECOMPUTE) & (birth > one.begin) & (birth <= one.end)
            is_activation |= recomputed & (death > one.end)
    return is_activation

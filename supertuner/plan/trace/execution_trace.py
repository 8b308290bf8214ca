"""A traced step as arrays: each tensor with birth, death, bytes, class and block, and the work of the operators.

The clock counts allocations and releases, one tick each, so that their order is kept exactly. A tensor that exists
before the step is born at 0; one that outlives the step dies at `end`. A trace shows one window in its steady state:
optimizer state exists from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from supertuner.plan.placement.step_table import OperatorWork

OUTSIDE_BLOCKS = "(before)", "(after)"
"""Names of the first and the last block of a trace: operators before and after all modules."""


class TensorKind(IntEnum):
    """The class of a tensor."""

    FROZEN = 0
    """Weights and buffers that are not trained."""
    TRAINED = 1
    GRADIENT = 2
    STATE = 3
    """Optimizer state and EMA weights."""
    ACTIVATION = 4
    """Made in the forward pass (or recomputed) and used in the backward pass."""
    TEMPORARY = 5
    BATCH = 6

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = ("frozen weights", "trained weights", "gradients", "optimizer state", "activations", "temporaries", "batch")


class StepPass(IntEnum):
    """The part of the step that an operator belongs to."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    UPDATE = 3


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Consecutive operators of one block and one pass."""

    block: int
    """Index into `ExecutionTrace.blocks`."""
    step_pass: StepPass
    begin: int
    """Tick: allocations and releases of the span are later."""
    end: int
    work: OperatorWork
    touched_tensors: tuple[int, ...]
    """Indices of the tensors that its operators read or wrote, in the order of the first access."""


@dataclass(frozen=True, eq=False, slots=True)
class ExecutionTrace:
    """The trace of one window, or of one call of an encoder or sampler."""

    phase: str
    device: str
    """`cuda` or `cpu`."""
    alignment_bytes: int
    """Every tensor occupies a multiple of this many bytes."""
    blocks: tuple[str, ...]
    """`(before)`, the blocks in the order of the forward pass, `(after)`."""
    nbytes: NDArray[np.int64]
    birth: NDArray[np.int64]
    death: NDArray[np.int64]
    kind: NDArray[np.uint8]
    block: NDArray[np.int16]
    """The block that allocated the tensor, or whose weight, gradient or state it is."""
    spans: tuple[TraceSpan, ...]
    end: int
    block_inputs: NDArray[np.int32]
    """(tensor, block) pairs: the tensor was an input of the block in the forward pass."""
    micro_batches: int = 1
    notes: tuple[str, ...] = ()
    """What the trace leaves out."""
    work_by_part: tuple[tuple[str, OperatorWork], ...] = ()
    """Work by name, for a phase with parts that are repeated differently often."""

    def allocated_bytes(self) -> NDArray[np.int64]:
        """The bytes that each tensor occupies, rounded up to the alignment."""
        return -(-self.nbytes // self.alignment_bytes) * self.alignment_bytes

    def live_bytes(self) -> NDArray[np.int64]:
        """Occupied bytes at each tick, from 0 to `end`."""
        return self._running_total(self.allocated_bytes())

    def live_bytes_of_kind(self, kind: TensorKind) -> NDArray[np.int64]:
        return self._running_total(np.where(self.kind == kind, self.allocated_bytes(), 0))

    def peak(self) -> tuple[int, int]:
        """The peak of occupied bytes, and the tick at which it is first reached."""
        live = self.live_bytes()
        at = int(live.argmax())
        return int(live[at]), at

    def live_bytes_by_kind(self, tick: int) -> dict[TensorKind, int]:
        """Occupied bytes at a tick, by class."""
        alive = (self.birth <= tick) & (tick < self.death)
        allocated = self.allocated_bytes()
        return {kind: int(allocated[alive & (self.kind == kind)].sum()) for kind in TensorKind}

    def total_work(self, step_pass: StepPass | None = None) -> OperatorWork:
        """The work of all operators, or of one pass."""
        return sum((one.work for one in self.spans if step_pass in (None, one.step_pass)), OperatorWork())

    def spans_in(self, step_pass: StepPass, block: int) -> Iterator[TraceSpan]:
        return (one for one in self.spans if one.step_pass is step_pass and one.block == block)

    def _running_total(self, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        change = np.zeros(self.end + 2, dtype=np.int64)
        np.add.at(change, self.birth, nbytes)
        np.add.at(change, self.death, -nbytes)
        return np.cumsum(change)[: self.end + 1]

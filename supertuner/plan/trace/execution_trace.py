"""What a traced step did, as arrays: every tensor with its birth, death, bytes, class and block, and what was worked.

The clock counts births and deaths: each takes one tick, so that the order in which memory is taken and given back is
kept exactly. What was there before the step is born at 0; what outlives it dies at `end`. A trace is of one window in
its steady state: what an optimizer keeps is there from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from supertuner.plan.placement.step_table import OperatorWork

BEFORE_BLOCKS = "(before)"
AFTER_BLOCKS = "(after)"


class TensorKind(IntEnum):
    """What a tensor is to the step."""

    FROZEN = 0
    """Weights and buffers that are not trained."""
    TRAINED = 1
    GRADIENT = 2
    STATE = 3
    """What an optimizer keeps, and averages."""
    ACTIVATION = 4
    """Made in the forward pass (or made again) and used in the backward pass."""
    TEMPORARY = 5
    BATCH = 6

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    TensorKind.FROZEN: "frozen weights",
    TensorKind.TRAINED: "trained weights",
    TensorKind.GRADIENT: "gradients",
    TensorKind.STATE: "optimizer state",
    TensorKind.ACTIVATION: "activations",
    TensorKind.TEMPORARY: "temporaries",
    TensorKind.BATCH: "batch",
}


class StepPass(IntEnum):
    """Which part of the step an operator belongs to."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    UPDATE = 3


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Operators that ran one after the other in one block and one pass."""

    block: int
    """Into `Trace.blocks`."""
    step_pass: StepPass
    begin: int
    """On the clock: its first birth or death is not before."""
    end: int
    work: OperatorWork
    touched_tensors: tuple[int, ...]
    """The tensors that its operators read or wrote, in the order of the first touch."""


@dataclass(frozen=True, eq=False, slots=True)
class ExecutionTrace:
    """One window, or one pass of an encoder or sampler."""

    phase: str
    device: str
    """`cuda` or `cpu`: whose memory this is."""
    alignment_bytes: int
    """Every tensor takes a multiple of so many bytes."""
    blocks: tuple[str, ...]
    """`(before)`, the blocks in the order of the forward pass, `(after)`."""
    nbytes: NDArray[np.int64]
    birth: NDArray[np.int64]
    death: NDArray[np.int64]
    kind: NDArray[np.uint8]
    block: NDArray[np.int16]
    """Where it was born, or whose weight, gradient or state it is."""
    spans: tuple[TraceSpan, ...]
    end: int
    block_inputs: NDArray[np.int32]
    """Pairs of a tensor and a block that it was given to in the forward pass."""
    micro_batches: int = 1
    notes: tuple[str, ...] = ()
    """What the trace does not know or left out."""
    work_by_part: tuple[tuple[str, OperatorWork], ...] = ()
    """Work by name, where a phase has parts that are repeated unequally often."""

    def allocated_bytes(self) -> NDArray[np.int64]:
        """The bytes that each tensor takes of memory."""
        return -(-self.nbytes // self.alignment_bytes) * self.alignment_bytes

    def live_bytes(self) -> NDArray[np.int64]:
        """Bytes that are taken at each tick of the clock, from 0 to `end`."""
        return self._running_total(self.allocated_bytes())

    def live_bytes_of_kind(self, kind: TensorKind) -> NDArray[np.int64]:
        return self._running_total(np.where(self.kind == kind, self.allocated_bytes(), 0))

    def peak(self) -> tuple[int, int]:
        """The most bytes at once, and when that is first reached."""
        live = self.live_bytes()
        at = int(live.argmax())
        return int(live[at]), at

    def live_bytes_by_kind(self, tick: int) -> dict[TensorKind, int]:
        """What is alive at a tick, by class."""
        alive = (self.birth <= tick) & (tick < self.death)
        allocated = self.allocated_bytes()
        return {kind: int(allocated[alive & (self.kind == kind)].sum()) for kind in TensorKind}

    def span_at(self, tick: int) -> TraceSpan | None:
        """The stretch that a tick falls into."""
        return next((stretch for stretch in self.spans if stretch.begin <= tick < stretch.end), None)

    def total_work(self, step_pass: StepPass | None = None) -> OperatorWork:
        """Of all operators, or of one pass."""
        return sum((one.work for one in self.spans if step_pass in (None, one.step_pass)), OperatorWork())

    def spans_in(self, step_pass: StepPass, block: int) -> Iterator[TraceSpan]:
        return (one for one in self.spans if one.step_pass is step_pass and one.block == block)

    def _running_total(self, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        change = np.zeros(self.end + 2, dtype=np.int64)
        np.add.at(change, self.birth, nbytes)
        np.add.at(change, self.death, -nbytes)
        return np.cumsum(change)[: self.end + 1]

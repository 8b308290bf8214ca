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

from supertuner.plan.placement.step_table import Work

BEFORE = "(before)"
AFTER = "(after)"


class Kind(IntEnum):
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
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Kind.FROZEN: "frozen weights",
    Kind.TRAINED: "trained weights",
    Kind.GRADIENT: "gradients",
    Kind.STATE: "optimizer state",
    Kind.ACTIVATION: "activations",
    Kind.TEMPORARY: "temporaries",
    Kind.BATCH: "batch",
}


class Pass(IntEnum):
    """Which part of the step an operator belongs to."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    UPDATE = 3


@dataclass(frozen=True, slots=True)
class Stretch:
    """Operators that ran one after the other in one block and one pass."""

    block: int
    """Into `Trace.blocks`."""
    during: Pass
    begin: int
    """On the clock: its first birth or death is not before."""
    end: int
    work: Work
    touched: tuple[int, ...]
    """The tensors that its operators read or wrote, in the order of the first touch."""


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """One window, or one pass of an encoder or sampler."""

    phase: str
    device: str
    """`cuda` or `cpu`: whose memory this is."""
    granule: int
    """Every tensor takes a multiple of so many bytes."""
    blocks: tuple[str, ...]
    """`(before)`, the blocks in the order of the forward pass, `(after)`."""
    nbytes: NDArray[np.int64]
    birth: NDArray[np.int64]
    death: NDArray[np.int64]
    kind: NDArray[np.uint8]
    block: NDArray[np.int16]
    """Where it was born, or whose weight, gradient or state it is."""
    stretches: tuple[Stretch, ...]
    end: int
    inputs: NDArray[np.int32]
    """Pairs of a tensor and a block that it was given to in the forward pass."""
    micro_batches: int = 1
    notes: tuple[str, ...] = ()
    """What the trace does not know or left out."""
    parts: tuple[tuple[str, Work], ...] = ()
    """Work by name, where a phase has parts that are repeated unequally often."""

    def taken(self) -> NDArray[np.int64]:
        """The bytes that each tensor takes of memory."""
        return -(-self.nbytes // self.granule) * self.granule

    def live(self) -> NDArray[np.int64]:
        """Bytes that are taken at each tick of the clock, from 0 to `end`."""
        return self._summed(self.taken())

    def live_of(self, kind: Kind) -> NDArray[np.int64]:
        return self._summed(np.where(self.kind == kind, self.taken(), 0))

    def peak(self) -> tuple[int, int]:
        """The most bytes at once, and when that is first reached."""
        live = self.live()
        at = int(live.argmax())
        return int(live[at]), at

    def by_kind(self, at: int) -> dict[Kind, int]:
        """What is alive at a tick, by class."""
        alive = (self.birth <= at) & (at < self.death)
        taken = self.taken()
        return {kind: int(taken[alive & (self.kind == kind)].sum()) for kind in Kind}

    def place(self, at: int) -> Stretch | None:
        """The stretch that a tick falls into."""
        return next((stretch for stretch in self.stretches if stretch.begin <= at < stretch.end), None)

    def work(self, during: Pass | None = None) -> Work:
        """Of all operators, or of one pass."""
        return sum((one.work for one in self.stretches if during in (None, one.during)), Work())

    def of(self, during: Pass, block: int) -> Iterator[Stretch]:
        return (one for one in self.stretches if one.during is during and one.block == block)

    def _summed(self, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        change = np.zeros(self.end + 2, dtype=np.int64)
        np.add.at(change, self.birth, nbytes)
        np.add.at(change, self.death, -nbytes)
        return np.cumsum(change)[: self.end + 1]

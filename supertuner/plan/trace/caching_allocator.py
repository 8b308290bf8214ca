"""torch's CUDA caching allocator as a pure model: what it reserves of the GPU for the tensors of a trace.

A run needs what is reserved, not what its tensors take: free blocks between live ones are no use to anybody else. The
model takes and gives back in the trace's order by the allocator's own rules, those of `c10/cuda/CUDACachingAllocator`
in PyTorch 2.13 with its usual settings (no `max_split_size_mb`, no expandable segments, one stream): requests are
rounded to 512 bytes; up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more from a
segment of its own in steps of 2 MiB; the smallest free block that is large enough is taken and split where enough is
left of it; neighbours that are free are joined; what is full gives free segments back and tries again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from supertuner.core.types import MIB
from supertuner.plan.trace.record import Kind, Pass, Trace

SMALLEST = 512
SMALL = MIB
"""The largest request that is served from small segments, and the largest rest of a large block that is not split."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB
STEP = 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    address: int
    nbytes: int
    small: bool
    free: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


class Full(Exception):  # it is an answer of the model, not an error of ours
    """No memory of that size is left."""


class CachingAllocator:
    """The allocator's books. Addresses are numbers, and nothing is allocated."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        """What the GPU has for it; None: no end."""
        self.allocated = self.reserved = 0
        self.allocated_peak = self.reserved_peak = 0
        self.retries = 0
        """How often free segments had to be given back to serve a request: each time the GPU stands still."""
        self._end = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """For small and large segments: (bytes, address) of free blocks, in order."""
        self._at: dict[int, Block] = {}
        """Address → free block."""

    def take(self, nbytes: int) -> Block:
        """A block for a request; `Full` if there is none."""
        nbytes = max(SMALLEST, -(-nbytes // SMALLEST) * SMALLEST)
        small = nbytes <= SMALL
        block = self._fitting(nbytes, small) or self._segment(nbytes, small)
        rest = block.nbytes - nbytes
        if rest >= SMALLEST if small else rest > SMALL:
            self._split(block, nbytes)
        block.free = False
        self.allocated += block.nbytes
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def give_back(self, block: Block) -> None:
        self.allocated -= block.nbytes
        before, after = block.before, block.after
        if before is not None and before.free:
            self._unlist(before)
            block.address, block.nbytes, block.before = before.address, before.nbytes + block.nbytes, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._unlist(after)
            block.nbytes, block.after = block.nbytes + after.nbytes, after.after
            if block.after is not None:
                block.after.before = block
        self._list(block)

    def _fitting(self, nbytes: int, small: bool) -> Block | None:
        listed = self._free[small]
        index = bisect_left(listed, (nbytes, -1))
        if index == len(listed):
            return None
        block = self._at[listed[index][1]]
        self._unlist(block)
        return block

    def _segment(self, nbytes: int, small: bool) -> Block:
        size = SMALL_SEGMENT if small else LARGE_SEGMENT if nbytes < OWN_SEGMENT_FROM else -(-nbytes // STEP) * STEP
        if self.limit_bytes is not None and self.reserved + size > self.limit_bytes:
            self._release()
            if self.reserved + size > self.limit_bytes:
                raise Full(f"{nbytes} bytes, with {self.reserved} reserved of {self.limit_bytes}")
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        block = Block(self._end, size, small)
        self._end += size
        return block

    def _release(self) -> None:
        """Give segments back that nothing lives in."""
        self.retries += 1
        for block in [one for one in self._at.values() if one.whole]:
            self._unlist(block)
            self.reserved -= block.nbytes

    def _split(self, block: Block, nbytes: int) -> None:
        rest = Block(block.address + nbytes, block.nbytes - nbytes, block.small, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes, block.after = nbytes, rest
        self._list(rest)

    def _list(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.nbytes, block.address))
        self._at[block.address] = block

    def _unlist(self, block: Block) -> None:
        listed = self._free[block.small]
        del listed[bisect_left(listed, (block.nbytes, block.address))]
        del self._at[block.address]
        block.free = False


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the allocator's books show of a trace. Modelled."""

    allocated_bytes: int
    """The most at once in its blocks: `torch.cuda.max_memory_allocated`."""
    reserved_bytes: int
    """The most that it had of the GPU: `torch.cuda.max_memory_reserved`."""
    retries: int
    """How often it had to give segments back to go on, within the limit."""
    fits: bool


def reserved(trace: Trace, *, limit_bytes: int | None = None, windows: int = 2) -> Reserved:
    """The allocator through the first windows of a run: what the optimizer keeps is made in the first update, and
    segments that were cut for the first window are there for the second."""
    allocator = CachingAllocator(limit_bytes)
    there = np.flatnonzero((trace.birth == 0) & (trace.kind != Kind.STATE))
    state = np.flatnonzero((trace.birth == 0) & (trace.kind == Kind.STATE))
    made = _first_update(trace)
    events = _events(trace)
    blocks: dict[int, Block] = {}
    try:
        for number in there.tolist():
            blocks[number] = allocator.take(int(trace.nbytes[number]))
        for window in range(windows):
            due = state.tolist() if window == 0 else []
            for at, born, number in events:
                if due and at >= made:
                    blocks |= {one: allocator.take(int(trace.nbytes[one])) for one in due}
                    due = []
                if born:
                    blocks[number] = allocator.take(int(trace.nbytes[number]))
                else:
                    allocator.give_back(blocks.pop(number))
    except Full:
        return Reserved(allocator.allocated_peak, allocator.reserved_peak, allocator.retries, fits=False)
    return Reserved(allocator.allocated_peak, allocator.reserved_peak, allocator.retries, fits=True)


def _first_update(trace: Trace) -> int:
    return min((one.begin for one in trace.stretches if one.during is Pass.UPDATE), default=trace.end)


def _events(trace: Trace) -> list[tuple[int, bool, int]]:
    """(when, whether a tensor is born or dies, which), for what comes and goes within the window; in order."""
    inside = np.flatnonzero((trace.birth > 0) & (trace.nbytes > 0))
    found = [(int(trace.birth[number]), True, number) for number in inside.tolist()]
    found += [(int(trace.death[number]), False, number) for number in inside.tolist()]
    return sorted(found)

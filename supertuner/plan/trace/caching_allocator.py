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
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TensorKind

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
"""The largest request that is served from small segments, and the largest rest of a large block that is not split."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_MIN_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB


@dataclass(slots=True, eq=False)
class AllocatorBlock:
    """A piece of a segment."""

    address: int
    nbytes: int
    small: bool
    free: bool = True
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None

    @property
    def is_whole_segment(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


class AllocatorOutOfMemory(Exception):  # it is an answer of the model, not an error of ours
    """No memory of that size is left."""


class CachingAllocator:
    """The allocator's books. Addresses are numbers, and nothing is allocated."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        """What the GPU has for it; None: no end."""
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        """How often free segments had to be given back to serve a request: each time the GPU stands still."""
        self._next_address = 0
        self._free_sizes: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """For small and large segments: (bytes, address) of free blocks, in order."""
        self._free_by_address: dict[int, AllocatorBlock] = {}
        """Address → free block."""

    def allocate(self, nbytes: int) -> AllocatorBlock:
        """A block for a request; `Full` if there is none."""
        nbytes = max(MIN_BLOCK_BYTES, -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        small = nbytes <= SMALL_REQUEST_BYTES
        block = self._take_free_block(nbytes, small) or self._reserve_segment(nbytes, small)
        rest = block.nbytes - nbytes
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_REQUEST_BYTES:
            self._split(block, nbytes)
        block.free = False
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: AllocatorBlock) -> None:
        self.allocated_bytes -= block.nbytes
        before, after = block.before, block.after
        if before is not None and before.free:
            self._remove_from_free_list(before)
            block.address, block.nbytes, block.before = before.address, before.nbytes + block.nbytes, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._remove_from_free_list(after)
            block.nbytes, block.after = block.nbytes + after.nbytes, after.after
            if block.after is not None:
                block.after.before = block
        self._add_to_free_list(block)

    def _take_free_block(self, nbytes: int, small: bool) -> AllocatorBlock | None:
        listed = self._free_sizes[small]
        index = bisect_left(listed, (nbytes, -1))
        if index == len(listed):
            return None
        block = self._free_by_address[listed[index][1]]
        self._remove_from_free_list(block)
        return block

    def _reserve_segment(self, nbytes: int, small: bool) -> AllocatorBlock:
        size = (
            SMALL_SEGMENT_BYTES
            if small
            else LARGE_SEGMENT_BYTES
            if nbytes < OWN_SEGMENT_MIN_BYTES
            else -(-nbytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        )
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self._release_free_segments()
            if self.reserved_bytes + size > self.limit_bytes:
                raise AllocatorOutOfMemory(f"{nbytes} bytes, with {self.reserved_bytes} reserved of {self.limit_bytes}")
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = AllocatorBlock(self._next_address, size, small)
        self._next_address += size
        return block

    def _release_free_segments(self) -> None:
        """Give segments back that nothing lives in."""
        self.retries += 1
        for block in [one for one in self._free_by_address.values() if one.is_whole_segment]:
            self._remove_from_free_list(block)
            self.reserved_bytes -= block.nbytes

    def _split(self, block: AllocatorBlock, nbytes: int) -> None:
        rest = AllocatorBlock(
            block.address + nbytes, block.nbytes - nbytes, block.small, before=block, after=block.after
        )
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes, block.after = nbytes, rest
        self._add_to_free_list(rest)

    def _add_to_free_list(self, block: AllocatorBlock) -> None:
        block.free = True
        insort(self._free_sizes[block.small], (block.nbytes, block.address))
        self._free_by_address[block.address] = block

    def _remove_from_free_list(self, block: AllocatorBlock) -> None:
        listed = self._free_sizes[block.small]
        del listed[bisect_left(listed, (block.nbytes, block.address))]
        del self._free_by_address[block.address]
        block.free = False


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """What the allocator's books show of a trace. Modelled."""

    allocated_bytes: int
    """The most at once in its blocks: `torch.cuda.max_memory_allocated`."""
    reserved_bytes: int
    """The most that it had of the GPU: `torch.cuda.max_memory_reserved`."""
    retries: int
    """How often it had to give segments back to go on, within the limit."""
    fits: bool


def simulate_allocator(trace: ExecutionTrace, *, limit_bytes: int | None = None, windows: int = 2) -> AllocatorPeaks:
    """The allocator through the first windows of a run: what the optimizer keeps is made in the first update, and
    segments that were cut for the first window are there for the second."""
    allocator = CachingAllocator(limit_bytes)
    initial_tensors = np.flatnonzero((trace.birth == 0) & (trace.kind != TensorKind.STATE))
    optimizer_state = np.flatnonzero((trace.birth == 0) & (trace.kind == TensorKind.STATE))
    first_update = _first_update_tick(trace)
    events = _allocation_events(trace)
    blocks: dict[int, AllocatorBlock] = {}
    try:
        for number in initial_tensors.tolist():
            blocks[number] = allocator.allocate(int(trace.nbytes[number]))
        for window in range(windows):
            pending_state = optimizer_state.tolist() if window == 0 else []
            for at, is_birth, number in events:
                if pending_state and at >= first_update:
                    blocks |= {one: allocator.allocate(int(trace.nbytes[one])) for one in pending_state}
                    pending_state = []
                if is_birth:
                    blocks[number] = allocator.allocate(int(trace.nbytes[number]))
                else:
                    allocator.free(blocks.pop(number))
    except AllocatorOutOfMemory:
        return AllocatorPeaks(
            allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.retries, fits=False
        )
    return AllocatorPeaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.retries, fits=True)


def _first_update_tick(trace: ExecutionTrace) -> int:
    return min((one.begin for one in trace.spans if one.step_pass is StepPass.UPDATE), default=trace.end)


def _allocation_events(trace: ExecutionTrace) -> list[tuple[int, bool, int]]:
    """(when, whether a tensor is born or dies, which), for what comes and goes within the window; in order."""
    inside = np.flatnonzero((trace.birth > 0) & (trace.nbytes > 0))
    events = [(int(trace.birth[number]), True, number) for number in inside.tolist()]
    events += [(int(trace.death[number]), False, number) for number in inside.tolist()]
    return sorted(events)

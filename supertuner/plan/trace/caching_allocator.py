"""A pure model of torch's CUDA caching allocator: how much GPU memory it reserves for the tensors of a trace.

A run needs what the allocator reserves, not what its tensors occupy: a free block between two live ones cannot be used
by anything else. The model allocates and frees in the order of the trace, by the rules of
`c10/cuda/CUDACachingAllocator.cpp` in PyTorch 2.13 with default settings (no `max_split_size_mb`, no expandable
segments, one stream):

- A request is rounded up to a multiple of 512 bytes (`round_size`).
- Small requests, up to 1 MiB, are served from small segments of 2 MiB; requests below 10 MiB from large segments of 20
  MiB; larger ones get a segment of their own, rounded up to 2 MiB (`get_allocation_size`). A segment is one cudaMalloc.
- The smallest free block that is large enough is used: best fit, and the lowest address among equals
  (`get_free_block`). Small and large blocks have separate pools.
- The rest of the block is split off if it is at least 512 bytes (small pool) or more than 1 MiB (large pool)
  (`should_split`).
- Freeing a block merges it with free neighbours of the same segment (`free_block`, `try_merge_blocks`).
- If a new segment exceeds the GPU's memory, all segments that are entirely free are returned to the driver, and the
  request is tried once more (`release_cached_blocks`). On a GPU this synchronizes: each time costs a stall.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from supertuner.core.types import MIB
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TensorKind

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
"""`kSmallSize`: the largest request of the small pool, and the largest rest of a large block that is not split off."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""`kSmallBuffer`."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""`kLargeBuffer`."""
OWN_SEGMENT_MIN_BYTES = 10 * MIB
"""`kMinLargeAlloc`."""
SEGMENT_ROUNDING_BYTES = 2 * MIB
"""`kRoundLarge`."""


@dataclass(slots=True, eq=False)
class AllocatorBlock:
    """A contiguous part of a segment, linked to its neighbours in the segment."""

    address: int
    nbytes: int
    small: bool
    free: bool = True
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None


class AllocatorOutOfMemory(Exception):  # a result of the model, not an error of this program
    """The modelled allocator cannot serve a request."""


class CachingAllocator:
    """The allocator's bookkeeping. Addresses are numbers; no memory is allocated."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        """Memory of the GPU; None: unlimited."""
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        """How often free segments were returned to the driver to serve a request; each time stalls the GPU."""
        self._next_address = 0
        self._free_sizes: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """For the small and the large pool: (bytes, address) of free blocks, sorted, so that the first entry that is
        large enough is the best fit."""
        self._free_by_address: dict[int, AllocatorBlock] = {}
        """Address → free block."""

    def allocate(self, nbytes: int) -> AllocatorBlock:
        """A block of at least `nbytes`. Raises AllocatorOutOfMemory."""
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
        """Returns a block to its pool, merged with free neighbours."""
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
        size = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        if nbytes >= OWN_SEGMENT_MIN_BYTES:
            size = -(-nbytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
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
        """Returns segments without live blocks to the driver."""
        self.retries += 1
        for block in [one for one in self._free_by_address.values() if one.before is None and one.after is None]:
            self._remove_from_free_list(block)
            self.reserved_bytes -= block.nbytes

    def _split(self, block: AllocatorBlock, nbytes: int) -> None:
        address, left = block.address + nbytes, block.nbytes - nbytes
        rest = AllocatorBlock(address, left, block.small, before=block, after=block.after)
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
    """The allocator's counters after a trace. Modelled."""

    allocated_bytes: int
    """Peak of the live blocks, as `torch.cuda.max_memory_allocated`."""
    reserved_bytes: int
    """Peak of the segments, as `torch.cuda.max_memory_reserved`."""
    retries: int
    """How often it returned segments to the driver to stay within the limit."""
    fits: bool


def simulate_allocator(trace: ExecutionTrace, *, limit_bytes: int | None = None, windows: int = 2) -> AllocatorPeaks:
    """The allocator over the first windows of a run.

    A trace shows the steady state, in which the optimizer's state exists from the start. A real run allocates the state
    in the first update, between other tensors, and the second window finds the segments that the first one has split:
    both change how much is reserved.
    """
    allocator = CachingAllocator(limit_bytes)
    is_state = trace.kind == TensorKind.STATE
    pending_state = np.flatnonzero((trace.birth == 0) & is_state).tolist()
    first_update = min((one.begin for one in trace.spans if one.step_pass is StepPass.UPDATE), default=trace.end)
    events, nbytes = allocation_events(trace), trace.nbytes.tolist()
    blocks: dict[int, AllocatorBlock] = {}
    fits = True
    try:
        for number in np.flatnonzero((trace.birth == 0) & ~is_state).tolist():
            allocator.allocate(nbytes[number])
        for window in range(windows):
            for at, is_birth, number in events:
                if window == 0 and pending_state and at >= first_update:
                    for one in pending_state:
                        allocator.allocate(nbytes[one])
                    pending_state = []
                if is_birth:
                    blocks[number] = allocator.allocate(nbytes[number])
                else:
                    allocator.free(blocks.pop(number))
    except AllocatorOutOfMemory:
        fits = False
    return AllocatorPeaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.retries, fits)


def allocation_events(trace: ExecutionTrace) -> list[tuple[int, bool, int]]:
    """(tick, is allocation, tensor) for every tensor that is allocated within the window, in order."""
    inside = np.flatnonzero((trace.birth > 0) & (trace.nbytes > 0))
    events = [(int(trace.birth[number]), True, number) for number in inside.tolist()]
    events += [(int(trace.death[number]), False, number) for number in inside.tolist()]
    return sorted(events)

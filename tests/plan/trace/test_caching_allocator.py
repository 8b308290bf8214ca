"""The model of torch's caching allocator: each rule by itself, and invariants over random requests.

tests/phantom/test_caching.py compares it with torch's own allocator.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.core.types import MIB
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.trace.caching_allocator import (
    AllocatorBlock,
    AllocatorOutOfMemory,
    CachingAllocator,
    simulate_allocator,
)
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TensorKind, TraceSpan


@pytest.mark.parametrize(
    ("requested", "allocated", "segment"),
    (
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (64 * MIB + 1, 66 * MIB - (2 * MIB - 512), 66 * MIB),
    ),
)
def test_a_first_request_is_served_from_a_segment_of_its_class(requested: int, allocated: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(requested)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, segment)


def test_a_rest_of_one_mebibyte_is_not_split_off() -> None:
    """The rest of a large block counts as allocated, because nothing else can use it."""
    allocator = CachingAllocator()
    allocator.allocate(13 * MIB)
    assert allocator.allocated_bytes == 14 * MIB


def test_the_smallest_block_that_fits_is_used() -> None:
    allocator = CachingAllocator()
    wide, wall, narrow = allocator.allocate(60 * MIB), allocator.allocate(30 * MIB), allocator.allocate(40 * MIB)
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(38 * MIB).nbytes == 38 * MIB
    assert allocator.reserved_bytes == 130 * MIB
    assert allocator.allocate(60 * MIB).address == wide.address != wall.address


def test_free_neighbours_are_merged() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved_bytes == 20 * MIB
    for index in (1, 3, 2, 0, 4):
        allocator.free(parts[index])
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_free_segments_are_released_before_a_request_fails() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    small = [allocator.allocate(30 * MIB) for _ in range(3)]
    for block in small:
        allocator.free(block)
    allocator.allocate(80 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 80 * MIB)
    with pytest.raises(AllocatorOutOfMemory):
        allocator.allocate(30 * MIB)


@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(0, 20)), max_size=60))
def test_blocks_never_overlap_and_all_memory_is_returned(requests: list[tuple[int, int]]) -> None:
    allocator = CachingAllocator()
    live: list[tuple[AllocatorBlock, int]] = []
    for nbytes, victim in requests:
        block = allocator.allocate(nbytes)
        assert nbytes <= block.nbytes
        live.append((block, nbytes))
        if victim < len(live) - 1:
            allocator.free(live.pop(victim)[0])
        spans = sorted((one.address, one.address + one.nbytes) for one, _ in live)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert allocator.allocated_bytes == sum(one.nbytes for one, _ in live) <= allocator.reserved_bytes
    for block, _ in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert sum(size for listed in allocator._free_sizes.values() for size, _ in listed) == allocator.reserved_bytes


def trace_of(tensors: list[tuple[int, int, int, TensorKind]], end: int, update: int) -> ExecutionTrace:
    """A trace from (bytes, birth, death, class) of each tensor."""
    nbytes, birth, death, kind = zip(*tensors, strict=True)
    return ExecutionTrace(
        phase="train model",
        device="cuda",
        alignment_bytes=512,
        blocks=("(before)", "(after)"),
        nbytes=np.array(nbytes, dtype=np.int64),
        birth=np.array(birth, dtype=np.int64),
        death=np.array(death, dtype=np.int64),
        kind=np.array(kind, dtype=np.uint8),
        block=np.zeros(len(tensors), dtype=np.int16),
        spans=(TraceSpan(0, StepPass.UPDATE, update, end, OperatorWork(), ()),),
        block_inputs=np.zeros((0, 2), dtype=np.int64),
        end=end,
    )


def test_state_that_the_first_update_allocates_fragments_the_memory() -> None:
    weights, activation, gradient = 100 * MIB, 60 * MIB, 20 * MIB
    tensors = [
        (weights, 0, 9, TensorKind.TRAINED),
        (40 * MIB, 0, 9, TensorKind.STATE),
        (activation, 1, 3, TensorKind.ACTIVATION),
        (gradient, 2, 5, TensorKind.GRADIENT),
        (30 * MIB, 4, 6, TensorKind.TEMPORARY),
    ]
    found = simulate_allocator(trace_of(tensors, 9, 4))
    assert found.allocated_bytes == weights + 40 * MIB + activation + gradient
    # The 40 MiB of state use the block of the freed activation; the second window needs a new segment for its own.
    assert found.reserved_bytes == weights + activation + gradient + 30 * MIB + activation
    assert found.fits


def test_a_step_that_exceeds_the_limit_does_not_fit() -> None:
    tensors = [(100 * MIB, 0, 9, TensorKind.FROZEN), (60 * MIB, 1, 3, TensorKind.ACTIVATION)]
    assert not simulate_allocator(trace_of(tensors, 9, 9), limit_bytes=150 * MIB).fits
    assert simulate_allocator(trace_of(tensors, 9, 9), limit_bytes=160 * MIB).fits

"""Batches in managed memory: correct bytes, blocks that are reused only when nothing uses them, and a limit."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from supertuner.memory.driver import AddressRange, GpuLocation, MemoryKind
from supertuner.memory.emulator.configuration import InjectedFault
from supertuner.memory.hints.outcomes import HintOutcome, HintStatus
from supertuner.memory.unified import buffers as unified
from supertuner.memory.unified.buffers import BLOCK_BYTES, ManagedBlock, ManagedBlockPool, UnifiedBuffers, size_class
from tests.memory.on_fake import FakeBench, on_fake
from tests.memory.tensors import superchip

CPU = torch.device("cpu")
MIB = 1 << 20


class ManualFence:
    """A GPU whose work is done when the test decides."""

    def __init__(self) -> None:
        self.open = True
        self.marks = 0

    def __call__(self) -> Callable[[], bool]:
        self.marks += 1
        return lambda: self.open


# ── blocks, on the software superchip ─────────────────────────────────────────────────────────────────────────────────


def acquired(blocks: ManagedBlockPool, nbytes: int) -> ManagedBlock:
    block = blocks.acquire(nbytes)
    assert isinstance(block, ManagedBlock), block
    return block


@given(st.integers(0, 1 << 40))
def test_a_size_class_is_in_whole_blocks_and_at_most_an_eighth_too_large(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= max(nbytes, 1)
    assert size % BLOCK_BYTES == 0
    assert size - nbytes <= max(BLOCK_BYTES, nbytes // 8 + BLOCK_BYTES)
    assert size_class(size) == size


def test_a_recycled_block_is_reused_for_its_size() -> None:
    driver = superchip()
    blocks = ManagedBlockPool(driver, 0, CPU, 64 * MIB)
    first = acquired(blocks, 3 * MIB)
    assert driver.memory_kind_at(first.span.address) is MemoryKind.MANAGED
    assert first.span.nbytes == blocks.held_bytes == 4 * MIB
    other = acquired(blocks, 3 * MIB)
    assert other is not first
    blocks.recycle(first)
    assert acquired(blocks, 4 * MIB) is first
    assert blocks.held_bytes == 8 * MIB


def test_the_limit_counts_used_blocks_and_idle_blocks_of_other_sizes_are_freed() -> None:
    blocks = ManagedBlockPool(superchip(), 0, CPU, 8 * MIB)
    small = [acquired(blocks, 2 * MIB) for _ in range(4)]
    refused = blocks.acquire(2 * MIB)
    assert refused == HintOutcome(HintStatus.REFUSED, "batches in unified memory have reached their limit")
    for block in small[:3]:
        blocks.recycle(block)
    large = acquired(blocks, 6 * MIB)
    assert (large.span.nbytes, blocks.held_bytes, blocks.idle_bytes) == (6 * MIB, 8 * MIB, 0)
    assert isinstance(blocks.acquire(10 * MIB), HintOutcome)


def test_a_driver_error_is_returned_as_outcome() -> None:
    driver = superchip()
    driver.inject_fault(InjectedFault("allocate", "CUDA_ERROR_OUT_OF_MEMORY"))
    blocks = ManagedBlockPool(driver, 0, CPU, 8 * MIB)
    assert blocks.acquire(1) == HintOutcome(HintStatus.REFUSED, "allocate: CUDA_ERROR_OUT_OF_MEMORY")
    assert blocks.held_bytes == 0
    acquired(blocks, 1)


def test_idle_blocks_are_freed() -> None:
    driver = superchip()
    blocks = ManagedBlockPool(driver, 0, CPU, 8 * MIB)
    block, kept = acquired(blocks, 1), acquired(blocks, 1)
    blocks.recycle(block)
    blocks.free_idle_blocks()
    assert blocks.held_bytes == kept.span.nbytes
    assert driver.memory_kind_at(block.span.address) is MemoryKind.SYSTEM  # the driver does not know freed memory


# ── tensors, on the fake driver ───────────────────────────────────────────────────────────────────────────────────────


def batch() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, 16, 32, 32, generator=made).to(torch.bfloat16),
        torch.randn(7, 5, generator=made).t(),
        torch.zeros(0, 4),
        torch.tensor(3.5),
        torch.tensor([True, False, True]),
        torch.arange(10)[::3],
        torch.randn(1, 8, generator=made).expand(4, 8),
    ]


@on_fake()
def test_a_placed_batch_keeps_its_values_and_is_prefetched(bench: FakeBench) -> None:
    buffers = UnifiedBuffers(bench.driver, CPU)
    tensors = batch()
    placed, outcome = buffers.place(tensors)
    assert placed is not None
    for made, source in zip(placed, tensors, strict=True):
        assert (made.dtype, made.shape) == (source.dtype, source.shape)
        assert torch.equal(made, source)
        assert made.is_contiguous()
        assert bench.driver.memory_kind_at(made.data_ptr()) is MemoryKind.MANAGED or made.numel() == 0
    assert outcome.status is HintStatus.APPLIED
    assert outcome.requested is not None and outcome.requested.address == placed[0].data_ptr()
    bench.driver.synchronize()
    used = outcome.applied_to[0]
    assert (
        bench.resident(AddressRange(used.address, used.nbytes))[GpuLocation(0)]
        == used.nbytes // bench.driver.page_bytes
    )
    assert bench.fake.calls("cuMemPrefetchBatchAsync") == 1
    del placed, made
    buffers.close()
    assert buffers.held_bytes == 0


@on_fake()
def test_a_block_is_recycled_after_its_last_view_and_then_the_gpu_have_finished(bench: FakeBench) -> None:
    fence = ManualFence()
    buffers = UnifiedBuffers(bench.driver, CPU, fence=fence)
    placed, _ = buffers.place([torch.ones(100), torch.ones(50)])
    assert placed is not None
    view, address = placed[1][10:], placed[0].data_ptr()
    del placed
    other, _ = buffers.place([torch.zeros(100)])
    assert other is not None and other[0].data_ptr() != address
    assert fence.marks == 0
    assert view.sum() == 40
    fence.open = False
    del view
    buffers.reclaim_blocks()
    assert (fence.marks, buffers.blocks_in_use) == (1, 2)
    busy, _ = buffers.place([torch.zeros(100)])
    assert busy is not None and busy[0].data_ptr() != address
    assert fence.marks == 1, "the fence is set once, when the tensors are gone"
    fence.open = True
    again, _ = buffers.place([torch.zeros(100)])
    assert again is not None and again[0].data_ptr() == address
    del other, busy, again
    buffers.close()
    assert buffers.held_bytes == 0


@on_fake()
def test_a_tensor_that_autograd_saved_keeps_the_block(bench: FakeBench) -> None:
    buffers = UnifiedBuffers(bench.driver, CPU)
    placed, _ = buffers.place([torch.full((8,), 2.0)])
    assert placed is not None
    weight = torch.ones(8, requires_grad=True)
    loss = (weight * placed[0]).sum()
    del placed
    buffers.reclaim_blocks()
    assert buffers.blocks_in_use == 1
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 8
    del loss
    buffers.reclaim_blocks()
    assert buffers.blocks_in_use == 0
    buffers.close()


@on_fake()
def test_a_batch_beyond_the_limit_is_not_placed_until_there_is_room(bench: FakeBench) -> None:
    buffers = UnifiedBuffers(bench.driver, CPU, limit_bytes=4 * MIB)
    one, _ = buffers.place([torch.zeros(2 * MIB, dtype=torch.uint8)])
    two, _ = buffers.place([torch.zeros(2 * MIB, dtype=torch.uint8)])
    none, outcome = buffers.place([torch.zeros(1)])
    assert none is None and outcome.status is HintStatus.REFUSED
    del one
    again, outcome = buffers.place([torch.zeros(1)])
    assert again is not None and outcome.status is HintStatus.APPLIED
    del two, again
    buffers.close()


@on_fake()
def test_close_keeps_a_block_whose_tensors_exist(bench: FakeBench) -> None:
    buffers = UnifiedBuffers(bench.driver, CPU)
    placed, _ = buffers.place([torch.ones(5)])
    assert placed is not None
    buffers.close()
    assert placed[0].sum() == 5
    del placed
    buffers.close()
    assert buffers.held_bytes == 0


@on_fake()
def test_with_too_little_free_memory_the_prefetch_is_refused(bench: FakeBench) -> None:
    buffers = UnifiedBuffers(bench.driver, CPU, free_bytes=lambda: 0)
    placed, outcome = buffers.place([torch.ones(5)])
    assert placed is not None and placed[0].sum() == 5
    assert (outcome.status, outcome.reason) == (HintStatus.REFUSED, "too little GPU memory would stay free")
    del placed
    buffers.close()


@on_fake()
def test_a_batch_with_a_tensor_that_is_not_plain_is_not_placed(bench: FakeBench) -> None:
    buffers = UnifiedBuffers(bench.driver, CPU)
    for odd in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
        placed, outcome = buffers.place([torch.ones(5), odd])
        assert placed is None and outcome.status is HintStatus.UNSUPPORTED
    assert buffers.held_bytes == 0


@on_fake()
def test_a_tensor_subclass_is_not_placed(bench: FakeBench) -> None:
    buffers = UnifiedBuffers(bench.driver, CPU)
    for odd in odd_tensors():
        placed, outcome = buffers.place([torch.ones(5), odd])
        assert placed is None and outcome.status is HintStatus.UNSUPPORTED, odd
    assert buffers.held_bytes == 0


def odd_tensors() -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates both kinds, and still creates them
        quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        return [quantised, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]


@on_fake()
def test_a_block_whose_batch_could_not_be_written_is_recycled(bench: FakeBench) -> None:
    buffers = UnifiedBuffers(bench.driver, CPU, limit_bytes=BLOCK_BYTES)
    write = unified._copy_into

    def fails(*arguments: object) -> None:
        raise MemoryError

    unified._copy_into = fails
    try:
        with pytest.raises(MemoryError):
            buffers.place([torch.ones(5)])
    finally:
        unified._copy_into = write
    placed, _ = buffers.place([torch.ones(5)])
    assert placed is not None, "the limit counts a block that nothing uses"
    del placed
    buffers.close()
    assert buffers.held_bytes == 0


@on_fake()
def test_a_gpu_error_while_blocks_are_reclaimed_recycles_no_block_twice(bench: FakeBench) -> None:
    class Breaks(ManualFence):
        def __call__(self) -> Callable[[], bool]:
            super().__call__()
            if self.marks == 2:
                raise RuntimeError("an error of the GPU")
            return lambda: True

    buffers = UnifiedBuffers(bench.driver, CPU, fence=Breaks())
    both = [buffers.place([torch.ones(5)])[0], buffers.place([torch.ones(5)])[0]]
    both.clear()
    with pytest.raises(RuntimeError, match="of the GPU"):
        buffers.reclaim_blocks()
    placed = [buffers.place([torch.full((5,), float(n))])[0] for n in range(3)]
    assert [tensors[0].tolist() for tensors in placed if tensors] == [[float(n)] * 5 for n in range(3)]
    placed.clear()
    buffers.close()
    assert buffers.held_bytes == 0


def test_a_header_is_kept_while_a_thread_may_still_read_it() -> None:
    """A storage expires shortly before torch reads the deleter in the header, on any thread."""
    blocks = ManagedBlockPool(superchip(), 0, CPU, 4 * MIB)
    first = acquired(blocks, 4 * MIB)
    blocks.recycle(first)
    other = acquired(blocks, 2 * MIB)  # the first block is freed for it
    assert other.header is first.header
    assert other.header.make_tensor()[0].shape == (2 * MIB,)


@on_fake("no_uvm")
def test_without_managed_memory_batches_are_not_placed(bench: FakeBench) -> None:
    placed, outcome = UnifiedBuffers(bench.driver, CPU).place([torch.ones(5)])
    assert placed is None
    assert (outcome.status, outcome.reason) == (
        HintStatus.UNSUPPORTED,
        "no managed memory that CPU and GPU can use concurrently",
    )


@on_fake()
def test_concurrent_threads_never_share_a_block(bench: FakeBench) -> None:
    from concurrent.futures import ThreadPoolExecutor

    buffers = UnifiedBuffers(bench.driver, CPU, limit_bytes=512 * MIB)

    def work(number: int) -> bool:
        for turn in range(30):
            value = number * 100 + turn
            placed, _ = buffers.place([torch.full((1000,), float(value)), torch.tensor(value)])
            if placed is None or placed[0].sum() != 1000.0 * value or placed[1] != value:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    buffers.close()
    assert buffers.held_bytes == 0


@pytest.mark.parametrize("name", ["memory_kind_at", "prefetch"])
def test_a_batch_is_placed_even_if_its_prefetch_fails(name: str) -> None:
    """The GPU then migrates it when it reads it."""
    driver = superchip()
    buffers = UnifiedBuffers(driver, CPU)
    driver.inject_fault(InjectedFault(name, "CUDA_ERROR_UNKNOWN"))
    outcome = buffers._prefetch(AddressRange(driver.allocate(MemoryKind.MANAGED, BLOCK_BYTES), 5))
    assert outcome.status is HintStatus.ERROR

"""Places batches in managed memory: one block per batch, written by the CPU and prefetched to the GPU before it is
used.

A block returns to the free list when no tensor over it exists *and* the GPU has finished the work that was queued until
then. All blocks together stay below a limit. If a batch cannot be placed, the caller receives the reason and uses
pinned memory instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch

from supertuner.core.types import GIB, MIB
from supertuner.memory.driver import AddressRange, Driver, DriverError, GpuLocation, MemoryKind, find_device
from supertuner.memory.hints.issue import HintIssuer, HintRequest, HintVerb
from supertuner.memory.hints.outcomes import HintOutcome, HintStatus
from supertuner.memory.hints.page_ranges import whole_pages_inside
from supertuner.memory.unified.dlpack import DLPackHeader, ForeignStorage

BLOCK_BYTES: Final = 2 * MIB
"""The driver's migration unit: block sizes are multiples of it."""
ALIGNMENT: Final = 512
"""Alignment of the tensors in a block, as in torch's own allocator."""

Fence: TypeAlias = Callable[[], Callable[[], bool]]
"""Marks the current position in the GPU's work; the result returns whether the GPU has passed it."""


@dataclass(frozen=True, slots=True, eq=False)
class ManagedBlock:
    """Managed memory that is used for one batch after another."""

    span: AddressRange
    header: DLPackHeader


@dataclass(slots=True, eq=False)
class _BlockLease:
    """A block in use."""

    block: ManagedBlock
    storage: ForeignStorage
    gpu_passed: Callable[[], bool] | None = None
    """Set once no tensor exists: whether the GPU has finished as well."""


class ManagedBlockPool:
    """Blocks of managed memory by size class, limited in total."""

    def __init__(self, driver: Driver, gpu: int, device: torch.device, limit_bytes: int) -> None:
        self._driver, self._gpu, self._device, self._limit_bytes = driver, gpu, device, limit_bytes
        self._idle_blocks: dict[int, list[ManagedBlock]] = {}
        self._spare_headers: list[DLPackHeader] = []
        """Headers of freed blocks. They are kept, because the thread that ends a block's last tensor reads the header
        shortly after the storage has expired.
        """
        self.held_bytes = 0
        """Bytes of all blocks, used and idle."""

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._idle_blocks.items())

    def acquire(self, nbytes: int) -> ManagedBlock | HintOutcome:
        """A block of at least `nbytes`, or the outcome that explains why there is none."""
        size = size_class(nbytes)
        if self._idle_blocks.get(size):
            return self._idle_blocks[size].pop()
        if size > self._limit_bytes - self.held_bytes + self.idle_bytes:
            return HintOutcome(HintStatus.REFUSED, "batches in unified memory have reached their limit")
        try:
            while self.held_bytes + size > self._limit_bytes:
                self._free_block(next(blocks for blocks in self._idle_blocks.values() if blocks).pop())
            address = self._driver.allocate(MemoryKind.MANAGED, size, self._gpu)
        except DriverError as error:
            return HintOutcome(HintStatus.UNSUPPORTED if error.unsupported else HintStatus.REFUSED, str(error))
        self.held_bytes += size
        header = self._spare_headers.pop() if self._spare_headers else DLPackHeader(self._device)
        header.point_at(address, size)
        return ManagedBlock(AddressRange(address, size), header)

    def recycle(self, block: ManagedBlock) -> None:
        self._idle_blocks.setdefault(block.span.nbytes, []).append(block)

    def free_idle_blocks(self) -> None:
        """Free every idle block."""
        for blocks in self._idle_blocks.values():
            while blocks:
                self._free_block(blocks.pop())

    def _free_block(self, block: ManagedBlock) -> None:
        self._driver.free(block.span.address)
        self._spare_headers.append(block.header)
        self.held_bytes -= block.span.nbytes


class UnifiedBuffers:
    """Places batches in managed memory. May be used from several threads."""

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        *,
        limit_bytes: int = 2 * GIB,
        headroom_bytes: int | None = None,
        free_bytes: Callable[[], int | None] | None = None,
        fence: Fence | None = None,
    ) -> None:
        """`device` is the device of the placed tensors. The default `fence` records events on the stream that is
        current here and on the one that is current where a batch is placed; work on other streams must be joined
        before a batch ends.
        """
        gpu = device.index or 0
        properties = find_device(driver, gpu)
        assert properties is not None, f"the driver has no GPU {gpu}"
        self._issuer = HintIssuer(driver, properties, headroom_bytes, free_bytes)
        self._prefetch_request = HintRequest(HintVerb.PREFETCH, GpuLocation(gpu))
        self._blocks = ManagedBlockPool(driver, gpu, device, limit_bytes)
        self._leases: list[_BlockLease] = []
        self._fence = fence or _event_fence(device)
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of managed memory in all blocks."""
        return self._blocks.held_bytes

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks that a batch or the GPU may still use."""
        return len(self._leases)

    def place(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor] | None, HintOutcome]:
        """The tensors of a batch as tensors of the device, in one block, and the outcome of their prefetch.

        They are contiguous and hold the same values. None instead of the tensors: not placed, for the reason in the
        outcome.
        """
        if self._issuer.device.managed is False or self._issuer.device.concurrent_managed is False:
            return None, HintOutcome(HintStatus.UNSUPPORTED, "no managed memory that CPU and GPU can use concurrently")
        if not all(_is_plain(tensor) for tensor in tensors):
            return None, HintOutcome(HintStatus.UNSUPPORTED, "the batch has a tensor that is not a plain CPU tensor")
        offsets, nbytes = _pack_offsets(tensors)
        with self._lock:
            self._reclaim_blocks()
            block = self._blocks.acquire(nbytes)
            if isinstance(block, HintOutcome):
                return None, block
            try:
                _copy_into(block.span, offsets, tensors)
                block_tensor, storage = block.header.make_tensor()
            except BaseException:
                self._blocks.recycle(block)
                raise
            self._leases.append(_BlockLease(block, storage))
        placed = [_view(block_tensor, offset, tensor) for offset, tensor in zip(offsets, tensors, strict=True)]
        return placed, self._prefetch(AddressRange(block.span.address, nbytes))

    def reclaim_blocks(self) -> None:
        """Reclaim the blocks that are no longer used. `place` does this as well."""
        with self._lock:
            self._reclaim_blocks()

    def close(self) -> None:
        """Free all idle blocks. A block that is still in use stays, because its tensors would become invalid."""
        with self._lock:
            self._reclaim_blocks()
            self._blocks.free_idle_blocks()

    def _prefetch(self, used_range: AddressRange) -> HintOutcome:
        page = self._issuer.driver.page_bytes
        pages = whole_pages_inside((AddressRange(used_range.address, -(-used_range.nbytes // page) * page),), page)
        if not pages:
            return HintOutcome(HintStatus.NO_EFFECT, "the batch is empty", used_range)
        return replace(self._issuer.issue(pages, self._prefetch_request, wait=False), requested=used_range)

    def _reclaim_blocks(self) -> None:
        for lease in tuple(self._leases):
            if lease.gpu_passed is None and not lease.storage.alive:
                # all work that used it was queued before its last tensor ended, hence before this mark
                lease.gpu_passed = self._fence()
            if lease.gpu_passed is not None and lease.gpu_passed():
                # removed immediately: if a later lease raises, this block must not be recycled twice
                self._leases.remove(lease)
                self._blocks.recycle(lease.block)


def size_class(nbytes: int) -> int:
    """The block size for this many bytes: whole driver blocks, and at most an eighth too large above 16 blocks."""
    blocks = max(1, -(-nbytes // BLOCK_BYTES))
    # Four significant bits: sizes above 16 blocks are rounded up to a multiple of 1/16 to 1/8 of the size, so that
    # batches of slightly different sizes share a class.
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step * BLOCK_BYTES


def _pack_offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """The offset of each tensor in a block, and the bytes of all of them."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _copy_into(span: AddressRange, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Copy on the CPU, which can write managed memory wherever it resides."""
    header = DLPackHeader(torch.device("cpu"))
    header.point_at(span.address, span.nbytes)
    block_tensor, storage = header.make_tensor()
    for offset, tensor in zip(offsets, tensors, strict=True):
        _view(block_tensor, offset, tensor).copy_(tensor.detach())
    del block_tensor
    assert not storage.alive
    header.free()


def _view(block_tensor: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return block_tensor[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return plain and not tensor.is_quantized and not tensor.is_nested


def _event_fence(device: torch.device) -> Fence:
    if device.type != "cuda":
        return lambda: lambda: True
    opening_stream = torch.cuda.current_stream(device)

    def fence() -> Callable[[], bool]:
        streams = {opening_stream, torch.cuda.current_stream(device)}
        events = [stream.record_event() for stream in streams]
        return lambda: all(event.query() for event in events)

    return fence

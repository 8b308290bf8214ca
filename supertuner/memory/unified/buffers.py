"""Batches in unified memory: one managed block per batch, written by the CPU, on its way to the GPU before it is used.

A block goes back to the free list when no tensor over it lives *and* the GPU is done with what was queued by then. All
blocks together stay below a limit. What cannot be placed is answered with the reason, and the caller does what it would
do without: pinned memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import torch

from supertuner.core.types import GIB, MIB
from supertuner.memory.driver import AddressRange, Driver, DriverError, GpuLocation, MemoryKind
from supertuner.memory.hints.outcomes import HintOutcome, HintStatus
from supertuner.memory.hints.page_ranges import whole_pages_inside
from supertuner.memory.hints.request import HintIssuer, HintRequest, HintVerb
from supertuner.memory.unified.dlpack import DLPackHeader, ForeignStorage

BLOCK_BYTES: Final = 2 * MIB
"""What the driver works in: blocks are multiples of it."""
ALIGNMENT: Final = 512
"""Where a tensor of a batch begins, as torch's own allocator has it."""

Fence: TypeAlias = Callable[[], Callable[[], bool]]
"""Marks this moment in the GPU's work; the answer tells whether the GPU has passed it."""


@dataclass(frozen=True, slots=True, eq=False)
class ManagedBlock:
    """Managed memory that is lent to one batch after the other."""

    span: AddressRange
    header: DLPackHeader


@dataclass(slots=True, eq=False)
class _BlockLease:
    """A block in use."""

    block: ManagedBlock
    storage: ForeignStorage
    gpu_passed: Callable[[], bool] | None = None
    """Once no tensor lives: whether the GPU is done too."""


class ManagedBlockPool:
    """Blocks of managed memory by size class, never more than a limit together."""

    def __init__(self, driver: Driver, gpu: int, device: torch.device, limit_bytes: int) -> None:
        self._driver, self._gpu, self._device, self._limit_bytes = driver, gpu, device, limit_bytes
        self._idle_blocks: dict[int, list[ManagedBlock]] = {}
        self._spare_headers: list[DLPackHeader] = []
        """Of blocks that went back to the driver. Kept: a thread on which the last tensor of a block ends looks at its
        header a moment after the storage is expired."""
        self.held_bytes = 0
        """Of all blocks, lent and idle."""

    @property
    def idle_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._idle_blocks.items())

    def acquire(self, nbytes: int) -> ManagedBlock | HintOutcome:
        """A block of at least `nbytes`, or why there is none."""
        size = size_class(nbytes)
        if self._idle_blocks.get(size):
            return self._idle_blocks[size].pop()
        if size > self._limit_bytes - self.held_bytes + self.idle_bytes:
            return HintOutcome(HintStatus.REFUSED, "batches in unified memory reached their limit")
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
        """Give every idle block back to the driver."""
        for blocks in self._idle_blocks.values():
            while blocks:
                self._free_block(blocks.pop())

    def _free_block(self, block: ManagedBlock) -> None:
        self._driver.free(block.span.address)
        self._spare_headers.append(block.header)
        self.held_bytes -= block.span.nbytes


class UnifiedBuffers:
    """Puts batches into managed memory. May be used from several threads."""

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
        """`device` is where the tensors will be. `fence`: by default, events on the stream that is current here and on
        the one that is current where a batch is placed; work on other streams must be joined before a batch ends."""
        gpu = device.index or 0
        properties = next(candidate for candidate in driver.devices() if candidate.number == gpu)
        headroom = properties.total_bytes // 20 if headroom_bytes is None else headroom_bytes
        self._issuer = HintIssuer(driver, properties, headroom, free_bytes or partial(driver.free_bytes, gpu))
        self._prefetch_request = HintRequest(HintVerb.PREFETCH, GpuLocation(gpu))
        self._blocks = ManagedBlockPool(driver, gpu, device, limit_bytes)
        self._leases: list[_BlockLease] = []
        self._fence = fence or _event_fence(device)
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Managed memory of all blocks."""
        return self._blocks.held_bytes

    @property
    def blocks_in_use(self) -> int:
        """Blocks that a batch, or the GPU, may still use."""
        return len(self._leases)

    def place(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor] | None, HintOutcome]:
        """The tensors of a batch as tensors of the device, in one block, and what became of sending it there.

        They hold the same values, contiguously. None: not placed, and the outcome says why.
        """
        if self._issuer.device.managed is False or self._issuer.device.concurrent_managed is False:
            return None, HintOutcome(HintStatus.UNSUPPORTED, "no managed memory that CPU and GPU may use at once")
        if not all(_is_plain(tensor) for tensor in tensors):
            return None, HintOutcome(
                HintStatus.UNSUPPORTED, "a batch with a tensor that is not plain memory of the host"
            )
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
        """Take back the blocks that nobody uses any more. `place` does it too."""
        with self._lock:
            self._reclaim_blocks()

    def close(self) -> None:
        """Give back what is idle. A block that is still lent stays: its tensors would point nowhere."""
        with self._lock:
            self._reclaim_blocks()
            self._blocks.free_idle_blocks()

    def _prefetch(self, used_range: AddressRange) -> HintOutcome:
        page = self._issuer.driver.page_bytes
        pages = whole_pages_inside((AddressRange(used_range.address, -(-used_range.nbytes // page) * page),), page)
        if not pages:
            return HintOutcome(HintStatus.NO_EFFECT, "an empty batch", used_range)
        outcome = self._issuer.issue(pages, self._prefetch_request, wait=False)
        return HintOutcome(outcome.status, outcome.reason, used_range, outcome.applied_to)

    def _reclaim_blocks(self) -> None:
        for lease in tuple(self._leases):
            if lease.gpu_passed is None and not lease.storage.alive:
                lease.gpu_passed = self._fence()  # all that used it was queued before it ended, so before this moment
            if lease.gpu_passed is not None and lease.gpu_passed():
                self._leases.remove(lease)  # at once: a later one may end in an error, and this one is lent no more
                self._blocks.recycle(lease.block)


def size_class(nbytes: int) -> int:
    """The size of the block for so many bytes: whole blocks of the driver, and at most an eighth too much above 16."""
    blocks = max(1, -(-nbytes // BLOCK_BYTES))
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step * BLOCK_BYTES


def _pack_offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a block, and the bytes of all."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _copy_into(span: AddressRange, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Copy by the CPU, which may write managed memory wherever it is."""
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

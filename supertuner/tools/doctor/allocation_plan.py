"""Decides how much memory the allocation test may allocate without endangering the machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from supertuner.core.types import GIB, MIB, bytes_text

HOST_FLOOR_SHARE: Final = 0.10
HOST_FLOOR_BYTES: Final = 4 * GIB
"""Host memory that the test leaves free: this share of the total, and at least HOST_FLOOR_BYTES."""
SHARED_POOL_SHARE: Final = 0.5
"""Share of free memory used where CPU and GPU share one pool: exhausting it takes down the whole machine (GB10), not
only the process."""
DRIVER_BLOCK_BYTES: Final = 2 * MIB
MAX_BLOCK_BYTES: Final = 256 * MIB
TARGET_BLOCKS: Final = 64
MAX_LINK_BYTES: Final = GIB
MAX_RESIDENT_BYTES: Final = 4 * GIB


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Memory of the machine at this moment, and what its GPU can do with it."""

    gpu_bytes: int
    gpu_free: int
    host_total: int | None
    host_available: int | None
    managed: bool | None
    concurrent: bool | None
    one_pool: bool | None
    stand_in: bool = False
    """The GPU is emulated by a library, so its memory is host memory."""


@dataclass(frozen=True, slots=True)
class AllocationTestPlan:
    """Sizes of the test."""

    requested_bytes: int
    nbytes: int
    """A whole number of blocks."""
    block_bytes: int
    gpu_free: int
    resident_bytes: int
    link_bytes: int
    """Size of each of the two buffers that test the link; 0: the link is not tested."""
    limit_reason: str
    """Why `nbytes` is less than requested; empty if it is not."""
    no_link_reason: str
    """Why the link is not tested; empty if it is."""
    remedy: str
    """What would allow a larger test; empty if nothing would, or nothing is missing."""

    @property
    def blocks(self) -> int:
        return self.nbytes // self.block_bytes


@dataclass(frozen=True, slots=True)
class AllocationTestSkipped:
    """No test is run, with the reason."""

    reason: str
    failed: bool = False
    """The driver reported an error before the test could start."""


def plan_allocation_test(memory: AvailableMemory, scale: float) -> AllocationTestPlan | AllocationTestSkipped:
    """A test of `scale` × GPU memory, or of as much as is safe on this machine."""
    if memory.managed is False:
        return AllocationTestSkipped("this GPU has no managed memory, so nothing can exceed its own memory")
    requested = int(scale * memory.gpu_bytes)
    safe_bytes, reason, remedy = _safe_bytes(memory)
    nbytes, limit_reason = min(requested, safe_bytes), ""
    block = _block_size(nbytes)
    nbytes -= nbytes % block
    if requested > safe_bytes:
        limit_reason = f"{bytes_text(nbytes)} instead of {bytes_text(requested)}: {reason}"
    if nbytes < 2 * block:
        why = limit_reason or f"{bytes_text(requested)} is less than two blocks"
        return AllocationTestSkipped(f"too little memory for a test: {why}")
    free, spare = memory.gpu_free, _spare_host_bytes(memory)
    resident = _round_to_driver_block(min(MAX_RESIDENT_BYTES, free // 2, nbytes))
    if memory.one_pool:
        link, no_link_reason = 0, "CPU and GPU share one pool, so there is no link"
    else:
        link = _round_to_driver_block(min(MAX_LINK_BYTES, free // 4, spare // 2, nbytes))
        no_link_reason = "" if link else "there is too little memory for its buffers"
    remedy = remedy if limit_reason else ""
    return AllocationTestPlan(requested, nbytes, block, free, resident, link, limit_reason, no_link_reason, remedy)


def _safe_bytes(memory: AvailableMemory) -> tuple[int, str, str]:
    """(bytes that are safe to allocate, the reason for that limit, what would allow more)."""
    spare = _spare_host_bytes(memory)
    if memory.one_pool:
        reason = "CPU and GPU share one pool, and exhausting it hangs the machine; half of the free memory is tested"
        return int(min(spare, memory.gpu_free) * SHARED_POOL_SHARE), reason, ""
    if memory.concurrent is False:
        reason = "without concurrent managed access the GPU cannot exceed its own memory"
        return int(memory.gpu_free * 0.9), reason, ""
    if memory.host_available is None:
        return int(memory.gpu_free * 0.9), "the amount of free host memory is unknown, so none of it is used", ""
    if memory.stand_in:
        return spare // 2, "the GPU is a stand-in that uses host memory", ""
    floor_text = bytes_text(_host_floor(memory))
    reason = f"{bytes_text(memory.host_available)} of host memory are available, and {floor_text} stay free"
    remedy = "free host memory and try again: `ps aux --sort=-rss | head` lists the largest processes"
    return memory.gpu_free + spare, reason, remedy


def _spare_host_bytes(memory: AvailableMemory) -> int:
    """Host memory that the test may use."""
    return max(0, (memory.host_available or 0) - _host_floor(memory))


def _host_floor(memory: AvailableMemory) -> int:
    return max(HOST_FLOOR_BYTES, int(HOST_FLOOR_SHARE * (memory.host_total or 0)))


def _block_size(nbytes: int) -> int:
    """About 64 blocks of 2 to 256 MiB: enough to locate a wrong value, and few enough to be quick."""
    return max(DRIVER_BLOCK_BYTES, min(MAX_BLOCK_BYTES, _round_to_driver_block(nbytes // TARGET_BLOCKS)))


def _round_to_driver_block(nbytes: int) -> int:
    return nbytes - nbytes % DRIVER_BLOCK_BYTES

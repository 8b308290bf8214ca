"""How much memory the allocation test may take: a pure decision, which never endangers the machine it is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from supertuner.core.types import GIB, MIB, bytes_text

HOST_FLOOR_SHARE: Final = 0.10
HOST_FLOOR_BYTES: Final = 4 * GIB
"""Host memory that the test leaves free: this share of it, and at least so much."""
SHARED_POOL_SHARE: Final = 0.5
"""Of one pool that CPU and GPU share: running out of it takes the whole machine down (GB10), not just the process."""
DRIVER_BLOCK_BYTES: Final = 2 * MIB
MAX_BLOCK_BYTES: Final = 256 * MIB
TARGET_BLOCKS: Final = 64
MAX_LINK_BYTES: Final = GIB
MAX_RESIDENT_BYTES: Final = 4 * GIB


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """What the machine has, as of now."""

    gpu_bytes: int
    gpu_free: int
    host_total: int | None
    host_available: int | None
    managed: bool | None
    concurrent: bool | None
    one_pool: bool | None
    stand_in: bool = False
    """The GPU is a library that plays one: its memory is host memory too, whatever it says."""


@dataclass(frozen=True, slots=True)
class AllocationTestPlan:
    """The test as it will be made."""

    requested_bytes: int
    nbytes: int
    """A whole number of blocks."""
    block_bytes: int
    gpu_free: int
    resident_bytes: int
    link_bytes: int
    """Of the buffers on either end of the link; 0: there is no link to try."""
    limit_reason: str
    """Why it is less than was asked for; empty: it is not."""
    no_link_reason: str
    """Why the link is not tried; empty: it is."""
    remedy: str
    """What would allow more; empty: nothing would, or nothing is missing."""

    @property
    def blocks(self) -> int:
        return self.nbytes // self.block_bytes


@dataclass(frozen=True, slots=True)
class AllocationTestSkipped:
    """There will be no test, and why."""

    reason: str
    failed: bool = False
    """The driver would not even begin, which is no reason but a fault."""


def plan_allocation_test(memory: AvailableMemory, scale: float) -> AllocationTestPlan | AllocationTestSkipped:
    """The test of `scale` × GPU memory, or as much of it as is safe here."""
    if memory.managed is False:
        return AllocationTestSkipped("this GPU has no managed memory: there is nothing that could go beyond its own")
    requested = int(scale * memory.gpu_bytes)
    safe_bytes, reason, remedy = _safe_bytes(memory)
    nbytes, limit_reason = min(requested, safe_bytes), ""
    block = _block_size(nbytes)
    nbytes -= nbytes % block
    if requested > safe_bytes:
        limit_reason = f"{bytes_text(nbytes)} instead of {bytes_text(requested)}: {reason}"
    if nbytes < 2 * block:
        return AllocationTestSkipped(
            f"there is no room for a test: {limit_reason or f'{bytes_text(requested)} is too little to try'}"
        )
    link = (
        0
        if memory.one_pool
        else _round_to_driver_block(min(MAX_LINK_BYTES, memory.gpu_free // 4, _spare_host_bytes(memory) // 2, nbytes))
    )
    no_room = "there is no room for its buffers"
    no_link_reason = "CPU and GPU share one pool, and there is none" if memory.one_pool else "" if link else no_room
    resident = _round_to_driver_block(min(MAX_RESIDENT_BYTES, memory.gpu_free // 2, nbytes))
    return AllocationTestPlan(
        requested,
        nbytes,
        block,
        memory.gpu_free,
        resident,
        link,
        limit_reason,
        no_link_reason,
        remedy if limit_reason else "",
    )


def _safe_bytes(memory: AvailableMemory) -> tuple[int, str, str]:
    """Bytes that are safe, what limits them, and what would allow more."""
    spare = _spare_host_bytes(memory)
    if memory.one_pool:
        reason = "CPU and GPU share one pool, where going beyond it wedges the machine; half of what is free is tried"
        return int(min(spare, memory.gpu_free) * SHARED_POOL_SHARE), reason, ""
    if memory.concurrent is False:
        return (
            int(memory.gpu_free * 0.9),
            "without concurrent managed access the GPU cannot go beyond its own memory",
            "",
        )
    if memory.host_available is None:
        return int(memory.gpu_free * 0.9), "nobody says how much host memory is free, so none of it is taken", ""
    if memory.stand_in:
        return spare // 2, "the GPU is a stand-in, whose memory is the host's", ""
    floor_text = bytes_text(_host_floor(memory))
    reason = f"{bytes_text(memory.host_available)} of host memory are available, and {floor_text} stay free"
    return (
        memory.gpu_free + spare,
        reason,
        "free host memory and try again: `ps aux --sort=-rss | head` shows who has it",
    )


def _spare_host_bytes(memory: AvailableMemory) -> int:
    """Host memory that the test may take."""
    return max(0, (memory.host_available or 0) - _host_floor(memory))


def _host_floor(memory: AvailableMemory) -> int:
    return max(HOST_FLOOR_BYTES, int(HOST_FLOOR_SHARE * (memory.host_total or 0)))


def _block_size(nbytes: int) -> int:
    """About 64 blocks, of 2 to 256 MiB: enough to see where a wrong value lies, few enough to be quick."""
    return max(DRIVER_BLOCK_BYTES, min(MAX_BLOCK_BYTES, _round_to_driver_block(nbytes // TARGET_BLOCKS)))


def _round_to_driver_block(nbytes: int) -> int:
    return nbytes - nbytes % DRIVER_BLOCK_BYTES

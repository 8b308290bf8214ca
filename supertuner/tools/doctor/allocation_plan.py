"""How much memory the allocation test may take: a pure decision, which never endangers the machine it is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from supertuner.core.types import GIB, MIB, bytes_text

FLOOR_SHARE: Final = 0.10
FLOOR_BYTES: Final = 4 * GIB
"""Host memory that the test leaves free: this share of it, and at least so much."""
POOL_SHARE: Final = 0.5
"""Of one pool that CPU and GPU share: running out of it takes the whole machine down (GB10), not just the process."""
DRIVER_BLOCK: Final = 2 * MIB
BLOCK_BYTES: Final = 256 * MIB
BLOCKS: Final = 64
LINK_BYTES: Final = GIB
RESIDENT_BYTES: Final = 4 * GIB


@dataclass(frozen=True, slots=True)
class Room:
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
class Plan:
    """The test as it will be made."""

    asked_bytes: int
    nbytes: int
    """A whole number of blocks."""
    block_bytes: int
    gpu_free: int
    resident_bytes: int
    link_bytes: int
    """Of the buffers on either end of the link; 0: there is no link to try."""
    limited: str
    """Why it is less than was asked for; empty: it is not."""
    no_link: str
    """Why the link is not tried; empty: it is."""
    remedy: str
    """What would allow more; empty: nothing would, or nothing is missing."""

    @property
    def blocks(self) -> int:
        return self.nbytes // self.block_bytes


@dataclass(frozen=True, slots=True)
class Declined:
    """There will be no test, and why."""

    reason: str
    failed: bool = False
    """The driver would not even begin, which is no reason but a fault."""


def plan(room: Room, scale: float) -> Plan | Declined:
    """The test of `scale` × GPU memory, or as much of it as is safe here."""
    if room.managed is False:
        return Declined("this GPU has no managed memory: there is nothing that could go beyond its own")
    asked = int(scale * room.gpu_bytes)
    most, why, remedy = _most(room)
    nbytes, limited = min(asked, most), ""
    block = _block(nbytes)
    nbytes -= nbytes % block
    if asked > most:
        limited = f"{bytes_text(nbytes)} instead of {bytes_text(asked)}: {why}"
    if nbytes < 2 * block:
        return Declined(f"there is no room for a test: {limited or f'{bytes_text(asked)} is too little to try'}")
    link = 0 if room.one_pool else _rounded(min(LINK_BYTES, room.gpu_free // 4, _spare(room) // 2, nbytes))
    no_room = "there is no room for its buffers"
    no_link = "CPU and GPU share one pool, and there is none" if room.one_pool else "" if link else no_room
    resident = _rounded(min(RESIDENT_BYTES, room.gpu_free // 2, nbytes))
    return Plan(asked, nbytes, block, room.gpu_free, resident, link, limited, no_link, remedy if limited else "")


def _most(room: Room) -> tuple[int, str, str]:
    """Bytes that are safe, what limits them, and what would allow more."""
    spare = _spare(room)
    if room.one_pool:
        why = "CPU and GPU share one pool, where going beyond it wedges the machine; half of what is free is tried"
        return int(min(spare, room.gpu_free) * POOL_SHARE), why, ""
    if room.concurrent is False:
        return int(room.gpu_free * 0.9), "without concurrent managed access the GPU cannot go beyond its own memory", ""
    if room.host_available is None:
        return int(room.gpu_free * 0.9), "nobody says how much host memory is free, so none of it is taken", ""
    if room.stand_in:
        return spare // 2, "the GPU is a stand-in, whose memory is the host's", ""
    kept = bytes_text(_floor(room))
    why = f"{bytes_text(room.host_available)} of host memory are available, and {kept} stay free"
    return room.gpu_free + spare, why, "free host memory and try again: `ps aux --sort=-rss | head` shows who has it"


def _spare(room: Room) -> int:
    """Host memory that the test may take."""
    return max(0, (room.host_available or 0) - _floor(room))


def _floor(room: Room) -> int:
    return max(FLOOR_BYTES, int(FLOOR_SHARE * (room.host_total or 0)))


def _block(nbytes: int) -> int:
    """About 64 blocks, of 2 to 256 MiB: enough to see where a wrong value lies, few enough to be quick."""
    return max(DRIVER_BLOCK, min(BLOCK_BYTES, _rounded(nbytes // BLOCKS)))


def _rounded(nbytes: int) -> int:
    return nbytes - nbytes % DRIVER_BLOCK

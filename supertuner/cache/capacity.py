"""Where a cache lives, and whether what is to be encoded fits there: said after the first entry, not after the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from supertuner.arena.format import PAGE, ArenaLifetime, round_up
from supertuner.arena.home import ArenaHome
from supertuner.arena.reader import VerifyMode
from supertuner.cache.entries import NamedTensors
from supertuner.core.errors import CacheError
from supertuner.core.host import HostFacts
from supertuner.core.types import GIB, bytes_text

_UNIT_BYTES = 256
"""What an entry takes beside its tensors: in the journal and the index, while both are there."""
_RESERVE_SHARE, _RESERVE_AT_MOST = 0.05, 2 * GIB
"""Of a machine's memory, left to everything else."""


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """A folder of arenas, and how those of a cache are kept there."""

    home: ArenaHome
    life: ArenaLifetime
    in_memory: bool
    """Whether the folder is memory (tmpfs); then memory is what runs out."""
    verify: VerifyMode
    """When the bytes of entries are checked."""
    damage_remedy: str
    """What to do about a damaged entry."""
    room_remedy: str
    """What to do about too little room."""
    on_attach: Callable[[int, int], None] | None = None
    """Told the address and the bytes of every arena as it is attached, so that somebody can say where they belong."""


def entry_bytes(entry: NamedTensors) -> int:
    """What an entry really takes: whole pages, and its line in the index."""
    return _UNIT_BYTES + sum(round_up(max(1, tensor.nbytes), PAGE) for tensor in entry.values())


def free_bytes(location: CacheLocation, host: HostFacts) -> int:
    free = host.free_bytes(location.home.path)
    available = host.memory_available() if location.in_memory else None
    if available is None:
        return free
    reserve = min(_RESERVE_AT_MOST, int((host.memory_total() or 0) * _RESERVE_SHARE))
    return min(free, max(0, available - reserve))


def require_room(kind: str, entries: int, needed_bytes: int, location: CacheLocation, host: HostFacts) -> None:
    """CacheError, with what is missing, unless about `need` bytes are free."""
    free = free_bytes(location, host)
    if needed_bytes > free:
        raise CacheError(no_room_message(kind, entries, needed_bytes, free, location))


def no_room_message(kind: str, entries: int, needed_bytes: int, available_bytes: int, location: CacheLocation) -> str:
    storage_text = "memory" if location.in_memory else "disk space"
    return (
        f"the cache of {kind} does not fit: {entries} entries need about {bytes_text(needed_bytes)}, and {bytes_text(available_bytes)} of "
        f"{storage_text} are free below {location.home.path}; about {bytes_text(max(0, needed_bytes - available_bytes))} are missing; "
        f"{location.room_remedy}"
    )

"""Where a cache lives, and whether what is to be encoded fits there: said after the first entry, not after the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from supertuner.arena.format import PAGE, Life, round_up
from supertuner.arena.home import Home
from supertuner.arena.reader import Verify
from supertuner.cache.entries import Tensors
from supertuner.core.errors import CacheError
from supertuner.core.host import Host
from supertuner.core.types import GIB, bytes_text

_UNIT_BYTES = 256
"""What an entry takes beside its tensors: in the journal and the index, while both are there."""
_RESERVE_SHARE, _RESERVE_AT_MOST = 0.05, 2 * GIB
"""Of a machine's memory, left to everything else."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of arenas, and how those of a cache are kept there."""

    home: Home
    life: Life
    in_memory: bool
    """Whether the folder is memory (tmpfs); then memory is what runs out."""
    verify: Verify
    """When the bytes of entries are checked."""
    remedy: str
    """What to do about a damaged entry."""
    more_room: str
    """What to do about too little room."""
    attached: Callable[[int, int], None] | None = None
    """Told the address and the bytes of every arena as it is attached, so that somebody can say where they belong."""


def entry_bytes(entry: Tensors) -> int:
    """What an entry really takes: whole pages, and its line in the index."""
    return _UNIT_BYTES + sum(round_up(max(1, one.nbytes), PAGE) for one in entry.values())


def free_bytes(place: Place, host: Host) -> int:
    free = host.free_bytes(place.home.path)
    available = host.memory_available() if place.in_memory else None
    if available is None:
        return free
    reserve = min(_RESERVE_AT_MOST, int((host.memory_total() or 0) * _RESERVE_SHARE))
    return min(free, max(0, available - reserve))


def require_room(what: str, entries: int, need: int, place: Place, host: Host) -> None:
    """CacheError, with what is missing, unless about `need` bytes are free."""
    free = free_bytes(place, host)
    if need > free:
        raise CacheError(no_room(what, entries, need, free, place))


def no_room(what: str, entries: int, need: int, free: int, place: Place) -> str:
    kind = "memory" if place.in_memory else "disk space"
    return (
        f"the cache of {what} does not fit: {entries} entries need about {bytes_text(need)}, and {bytes_text(free)} of "
        f"{kind} are free below {place.home.path}; about {bytes_text(max(0, need - free))} are missing; "
        f"{place.more_room}"
    )

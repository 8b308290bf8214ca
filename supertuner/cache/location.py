"""Where caches are stored: the folders a configuration chooses, how long entries stay there, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from supertuner.arena.format import PAGE, ArenaLifetime, round_up
from supertuner.arena.home import ArenaHome, default_home
from supertuner.arena.reader import VerifyMode
from supertuner.cache.entries import NamedTensors
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ArenaError, CacheError
from supertuner.core.host import HostFacts
from supertuner.core.types import GIB, bytes_text

CacheStorage = Literal["unified_memory", "disk"]
OnAttach: TypeAlias = Callable[[int, int], None] | None
"""Called with the address and size in bytes of every arena that is mapped, so that the caller can place it."""

_UNIT_BYTES = 256
"""Bytes of an entry besides its tensors: in the journal and in the index, while both exist."""
_RESERVE_SHARE, _RESERVE_AT_MOST = 0.05, 2 * GIB
"""Memory left to other programs: this share of the machine's memory, at most this many bytes."""


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """A folder of cache arenas and how they are kept there."""

    home: ArenaHome
    life: ArenaLifetime
    in_memory: bool
    """Whether the folder is on tmpfs, so that free memory limits it instead of disk space."""
    verify: VerifyMode
    """When checksums of entries are verified."""
    damage_remedy: str
    """What a user should do about a damaged entry."""
    room_remedy: str
    """What a user should do if entries do not fit."""
    on_attach: OnAttach = None


@dataclass(frozen=True, slots=True)
class CachePlacement:
    """Where the entries of one kind are stored and where they are read from."""

    primary: CacheLocation
    """Where entries are written and kept."""
    working_copy: CacheLocation | None
    """Where the entries that a run needs are copied to; None if they are read from `primary`."""
    reason: str


def cache_folders(storage: CacheStorage, config: RunConfig, run_dir: Path) -> tuple[Path, ...]:
    """The folders that the settings choose, and that need not exist: where entries are kept, and where they are copied
    to if they are not read from there."""
    in_memory, memory_folder = storage == "unified_memory", config.arena.home or default_home()
    if config.cache_config.persistent_cache:
        folder = config.cache_config.cache_dir or config.run.output_dir / "cache"
        return (folder, memory_folder) if in_memory else (folder,)
    return (memory_folder if in_memory else run_dir / "cache",)


def cache_placement(
    storage: CacheStorage, config: RunConfig, run_dir: Path, life: ArenaLifetime, on_attach: OnAttach = None
) -> CachePlacement:
    """The locations in `cache_folders`, which are created if they do not exist.

    `life` is the lifetime of entries that are not persistent. `on_attach` is called for entries in unified memory only.
    """
    in_memory, folders = storage == "unified_memory", cache_folders(storage, config, run_dir)
    if config.cache_config.persistent_cache:
        primary = _disk_location(folders[0], "until_removed", check=not in_memory)
        reason = "persistent_cache: kept here" + (", loaded into shared memory once" if in_memory else " and mapped")
        return CachePlacement(primary, _memory_location(folders[1], "run", on_attach) if in_memory else None, reason)
    if in_memory:
        location = _memory_location(folders[0], life, on_attach)
        return CachePlacement(location, None, "one copy in memory for all processes; removed when the run ends")
    location = _disk_location(folders[0], life, check=True)
    return CachePlacement(location, None, "a mapped file; removed when the run ends")


def _disk_location(folder: Path, life: ArenaLifetime, *, check: bool) -> CacheLocation:
    """With `check`, entries are verified at every use. Entries that are copied to memory are verified by the copy."""
    return CacheLocation(
        home=_open_home(folder),
        life=life,
        in_memory=False,
        verify="always" if check else "on_demand",
        damage_remedy="`supertuner cache build CONFIG --check` finds damaged entries and encodes them again",
        room_remedy="free some, or set cache_config.cache_dir to another disk",
    )


def _open_home(folder: Path) -> ArenaHome:
    try:
        return ArenaHome(folder)
    except ArenaError as error:
        remedy = "the folder of caches is cache_config.cache_dir, or `cache` below run.output_dir if that is not set"
        raise CacheError(f"{error}; {remedy}") from error


def _memory_location(folder: Path, life: ArenaLifetime, on_attach: OnAttach) -> CacheLocation:
    return CacheLocation(
        home=ArenaHome(folder),
        life=life,
        in_memory=True,
        verify="on_demand",
        damage_remedy="start the run again",
        room_remedy='free memory (`supertuner arena ls` lists all arenas), or set cache_config to type "disk"',
        on_attach=on_attach,
    )


def entry_bytes(entry: NamedTensors) -> int:
    """Stored bytes of an entry: its tensors in whole pages, and its record in the index."""
    return _UNIT_BYTES + sum(round_up(max(1, tensor.nbytes), PAGE) for tensor in entry.values())


def free_bytes(location: CacheLocation, host: HostFacts) -> int:
    """Bytes that can be stored at `location` now; for memory, without the reserve for other programs."""
    free = host.free_bytes(location.home.path)
    available = host.memory_available() if location.in_memory else None
    if available is None:
        return free
    reserve = min(_RESERVE_AT_MOST, int((host.memory_total() or 0) * _RESERVE_SHARE))
    return min(free, max(0, available - reserve))


def no_room_message(kind: str, entries: int, needed_bytes: int, available_bytes: int, location: CacheLocation) -> str:
    storage_text = "memory" if location.in_memory else "disk space"
    missing = bytes_text(max(0, needed_bytes - available_bytes))
    return (
        f"the cache of {kind} does not fit: {entries} entries need about {bytes_text(needed_bytes)}, but only "
        f"{bytes_text(available_bytes)} of {storage_text} are free below {location.home.path}; about {missing} are "
        f"missing; {location.room_remedy}"
    )

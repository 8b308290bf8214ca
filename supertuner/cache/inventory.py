"""Lists the cache arenas in folders and how many of their entries a configuration uses. Reads only: creates, removes
and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from supertuner.arena.arena_info import ArenaInfo
from supertuner.arena.home import ArenaHome
from supertuner.cache.keys import KEY_WIDTH, CacheNamespace, EntryKeys, empty_keys
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError, ArenaMissingError
from supertuner.core.events import Progress

_ARENA_NAME = re.compile(r"(latents|text)-[0-9a-f]{8}-([0-9a-f]{8}-epoch[0-9]+-)?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class RequiredEntries:
    """The entries of one encoder that a configuration needs."""

    namespace: CacheNamespace
    keys: EntryKeys
    """Without duplicates."""
    is_complete: bool = True
    """Whether `keys` are all. False: the configuration may need other entries, too."""


@dataclass(frozen=True, slots=True)
class CacheArenaStatus:
    """A cache arena and how a configuration uses it."""

    home: ArenaHome
    info: ArenaInfo
    kind: str
    encoder_fingerprint: str
    used_entries: int
    """Entries that the configuration uses. If several arenas contain an entry, only the last one uses it."""
    is_stale: bool
    """Whether it was made by another encoder, in another precision, or by another cache version."""
    is_use_known: bool
    """False if the configuration may use more entries than `used_entries`."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def usage(self) -> str:
        """How this configuration uses the arena, as shown to users."""
        if self.info.state == "damaged":
            return "damaged"
        if self.info.state != "sealed":
            return "being built" if self.info.state == "building" else "unfinished"
        if self.used_entries:
            return "used" if self.used_entries == self.info.units else "partly used"
        if self.is_stale:
            return "stale"
        return "unused" if self.is_use_known else "unknown"


def list_cache_arenas(folders: Sequence[Path], required: Sequence[RequiredEntries]) -> list[CacheArenaStatus]:
    """All cache arenas in these folders, of which some may not exist."""
    statuses: list[CacheArenaStatus] = []
    for home in [ArenaHome(folder) for folder in dict.fromkeys(folders) if folder.is_dir()]:
        counted_keys: dict[str, EntryKeys] = {}
        newest_first = sorted(filter(_is_cache_arena, home.list_arenas()), key=lambda info: -_arena_number(info.name))
        home_statuses = [_arena_status(home, info, required, counted_keys) for info in newest_first]
        statuses += sorted(home_statuses, key=lambda arena: (arena.name.rpartition("-")[0], _arena_number(arena.name)))
    return statuses


def _arena_number(name: str) -> int:
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else -1


def verify_cache_arena(arena: CacheArenaStatus, progress: Progress) -> str | None:
    """Verify every byte of a sealed arena; returns the damage, or None."""
    if arena.info.state == "damaged":
        return arena.info.problem
    if arena.info.state != "sealed":
        return None
    try:
        with arena.home.attach(arena.name, may_remove=False) as reader:
            reader.verify(progress)
    except ArenaDamagedError as error:
        return f"{error.file}: {error.description}"
    except (ArenaMissingError, ArenaBusyError):
        return None  # removed since it was listed
    return None


def _is_cache_arena(info: ArenaInfo) -> bool:
    return info.meta.get("holds") == "cache" if info.meta is not None else bool(_ARENA_NAME.fullmatch(info.name))


def _arena_status(
    home: ArenaHome, info: ArenaInfo, requirements: Sequence[RequiredEntries], counted_keys: dict[str, EntryKeys]
) -> CacheArenaStatus:
    """`counted_keys` are the keys, by namespace, whose entries are in a later arena."""
    meta = info.meta or {}
    kind = str(meta.get("what") or info.name.partition("-")[0])
    required = next((entries for entries in requirements if info.name.startswith(f"{entries.namespace.name}-")), None)
    used = _count_used(home, info, required, counted_keys) if required and info.state == "sealed" else 0
    is_use_known = required is None or required.is_complete
    return CacheArenaStatus(home, info, kind, str(meta.get("identity", "")), used, required is None, is_use_known)


def _count_used(home: ArenaHome, info: ArenaInfo, required: RequiredEntries, counted_keys: dict[str, EntryKeys]) -> int:
    keys = _entry_keys(home, info.name)
    earlier = counted_keys.get(required.namespace.name, keys[:0])
    used = keys[np.isin(keys, required.keys) & ~np.isin(keys, earlier)]
    counted_keys[required.namespace.name] = np.concatenate([earlier, used])
    return len(used)


def count_missing(folder: Path, required: RequiredEntries) -> int:
    """How many of the required entries no arena in this folder holds. Arenas of single epochs do not count."""
    if not folder.is_dir():
        return len(required.keys)
    home, is_missing = ArenaHome(folder), np.ones(len(required.keys), bool)
    for info in home.list_arenas():
        if info.state == "sealed" and info.name.rpartition("-")[0] == required.namespace.name:
            is_missing &= ~np.isin(required.keys, _entry_keys(home, info.name))
    return int(is_missing.sum())


def _entry_keys(home: ArenaHome, name: str) -> EntryKeys:
    """The keys of an arena's entries; none if it was removed or damaged since it was listed."""
    # such an arena has no entries to count
    with suppress(ArenaMissingError, ArenaBusyError, ArenaDamagedError), home.attach(name, may_remove=False) as reader:
        keys = reader.fixed_width_keys(KEY_WIDTH)
        return empty_keys() if keys is None else keys.copy()
    return empty_keys()

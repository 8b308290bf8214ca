"""Lists the cache arenas in folders and how many of their entries a configuration uses. Read-only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from supertuner.arena.arena_info import ArenaInfo
from supertuner.arena.home import ArenaHome
from supertuner.cache.keys import KEY_WIDTH, CacheNamespace, EntryKeys
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError, ArenaMissingError
from supertuner.core.events import Progress

_ARENA_NAME = re.compile(r"(latents|text)-[0-9a-f]{8}-([0-9a-f]{8}-epoch[0-9]+-)?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class RequiredEntries:
    """The entries of one encoder that a configuration needs."""

    namespace: CacheNamespace
    keys: EntryKeys
    """Without duplicates."""


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
        return "stale" if self.is_stale else "unused"


def list_cache_arenas(homes: Sequence[ArenaHome], required: Sequence[RequiredEntries]) -> list[CacheArenaStatus]:
    """All cache arenas in these folders."""
    statuses: list[CacheArenaStatus] = []
    for home in {home.path: home for home in homes}.values():
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
        with arena.home.attach(arena.name) as reader:
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
    return CacheArenaStatus(home, info, kind, str(meta.get("identity", "")), used, required is None)


def _count_used(home: ArenaHome, info: ArenaInfo, required: RequiredEntries, counted_keys: dict[str, EntryKeys]) -> int:
    try:
        with home.attach(info.name) as reader:
            keys = reader.fixed_width_keys(KEY_WIDTH)
            if keys is None:
                return 0
            earlier = counted_keys.get(required.namespace.name, keys[:0])
            used = keys[np.isin(keys, required.keys) & ~np.isin(keys, earlier)]
            counted_keys[required.namespace.name] = np.concatenate([earlier, used])
            return len(used)
    except (ArenaMissingError, ArenaBusyError, ArenaDamagedError):
        return 0  # removed or damaged since it was listed

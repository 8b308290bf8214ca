"""What a folder holds of caches, and what of it a configuration uses: looked at, never changed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from supertuner.arena.home import Home
from supertuner.arena.states import ArenaInfo
from supertuner.cache.keys import WIDTH, Keys, Space
from supertuner.core.errors import ArenaBusy, ArenaDamaged, ArenaMissing
from supertuner.core.events import Progress

_NAME = re.compile(r"(latents|text)-[0-9a-f]{8}-([0-9a-f]{8}-epoch[0-9]+-)?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Needed:
    """What a configuration needs of one encoder."""

    space: Space
    keys: Keys
    """Each once."""


@dataclass(frozen=True, slots=True)
class Held:
    """One arena of a cache."""

    home: Home
    info: ArenaInfo
    what: str
    identity: str
    used: int
    """Entries that the configuration uses: of those that were made again, the last."""
    stale: bool
    """Made by another encoder, in another number format, or in another version of ours."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def verdict(self) -> str:
        """In words: what it is to this configuration."""
        if self.info.state == "damaged":
            return "damaged"
        if self.info.state != "sealed":
            return "being built" if self.info.state == "building" else "unfinished"
        if self.used:
            return "used" if self.used == self.info.units else "partly used"
        return "stale" if self.stale else "unused"


def holdings(homes: Sequence[Home], needed: Sequence[Needed]) -> list[Held]:
    """All arenas of caches in these folders."""
    spaces = {one.space.name: one for one in needed}
    found: list[Held] = []
    for home in {home.path: home for home in homes}.values():
        taken: dict[str, Keys] = {}
        newest_first = sorted(filter(_is_cache, home.ls()), key=lambda info: -_number(info.name))
        held = [_held(home, info, spaces, taken) for info in newest_first]
        found += sorted(held, key=lambda one: (one.name.rpartition("-")[0], _number(one.name)))
    return found


def _number(name: str) -> int:
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else -1


def verify_held(held: Held, progress: Progress) -> str | None:
    """Check every byte of a sealed arena; what is wrong, or None."""
    if held.info.state == "damaged":
        return held.info.problem
    if held.info.state != "sealed":
        return None
    try:
        with held.home.attach(held.name) as reader:
            reader.verify(progress)
    except ArenaDamaged as error:
        return f"{error.file}: {error.what}"
    except (ArenaMissing, ArenaBusy):
        return None  # removed since it was listed
    return None


def _is_cache(info: ArenaInfo) -> bool:
    return info.meta.get("holds") == "cache" if info.meta is not None else bool(_NAME.fullmatch(info.name))


def _held(home: Home, info: ArenaInfo, spaces: Mapping[str, Needed], taken: dict[str, Keys]) -> Held:
    """`taken` are keys, by space, of which a later arena has the entries."""
    meta = info.meta or {}
    what = str(meta.get("what") or info.name.partition("-")[0])
    needed = next((one for name, one in spaces.items() if info.name.startswith(f"{name}-")), None)
    used = _used(home, info, needed, taken) if needed is not None and info.state == "sealed" else 0
    return Held(home, info, what, str(meta.get("identity", "")), used, needed is None)


def _used(home: Home, info: ArenaInfo, needed: Needed, taken: dict[str, Keys]) -> int:
    try:
        with home.attach(info.name) as reader:
            keys = reader.keys_of_width(WIDTH)
            if keys is None:
                return 0
            earlier = taken.get(needed.space.name, keys[:0])
            used = keys[np.isin(keys, needed.keys) & ~np.isin(keys, earlier)]
            taken[needed.space.name] = np.concatenate([earlier, used])
            return len(used)
    except (ArenaMissing, ArenaBusy, ArenaDamaged):
        return 0  # removed or damaged since it was listed

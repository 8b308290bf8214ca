"""Which folders the caches of a run live in: where entries are kept, and where processes share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome, default_home
from supertuner.cache.capacity import CacheLocation
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ArenaError, CacheError

CacheStorage = Literal["unified_memory", "disk"]


@dataclass(frozen=True, slots=True)
class CachePlacement:
    primary: CacheLocation
    """Where entries are made and kept."""
    working_copy: CacheLocation | None
    """Where those that are needed are loaded to, if not used where they are kept."""
    reason: str


def cache_dir(config: RunConfig) -> Path:
    """The folder of persistent caches."""
    return config.cache_config.cache_dir or config.run.output_dir / "cache"


def cache_placement(
    storage: CacheStorage,
    config: RunConfig,
    run_folder: Path,
    life: ArenaLifetime,
    on_attach: Callable[[int, int], None] | None = None,
) -> CachePlacement:
    """`life` is how long entries stay that are not persistent; `attached` is told what unified memory is in use."""
    in_memory = storage == "unified_memory"
    if config.cache_config.persistent_cache:
        primary = _disk_location(cache_dir(config), "until_removed", check=not in_memory)
        reason = "persistent_cache: kept here" + (", loaded into shared memory once" if in_memory else " and mapped")
        return CachePlacement(primary, _memory_location(config, "run", on_attach) if in_memory else None, reason)
    if in_memory:
        return CachePlacement(
            _memory_location(config, life, on_attach),
            None,
            "one copy in memory for all processes; it ends with the run",
        )
    return CachePlacement(
        _disk_location(run_folder / "cache", life, check=True), None, "a mapped file; it ends with the run"
    )


def _disk_location(folder: Path, life: ArenaLifetime, *, check: bool) -> CacheLocation:
    """Entries that are loaded into memory are checked on the way; mapped ones before every use."""
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


def _memory_location(
    config: RunConfig, life: ArenaLifetime, on_attach: Callable[[int, int], None] | None
) -> CacheLocation:
    return CacheLocation(
        home=ArenaHome(config.arena.home or default_home()),
        life=life,
        in_memory=True,
        verify="on_demand",
        damage_remedy="start the run again",
        room_remedy='free memory (`supertuner arena ls` lists what we hold), or set cache_config to type "disk"',
        on_attach=on_attach,
    )

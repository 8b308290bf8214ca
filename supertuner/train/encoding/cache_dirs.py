"""Which folders the caches of a run live in: where entries are kept, and where processes share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from supertuner.arena.format import Life
from supertuner.arena.home import Home, default_home
from supertuner.cache.capacity import Place
from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import ArenaError, CacheError

Kind = Literal["unified_memory", "disk"]


@dataclass(frozen=True, slots=True)
class Places:
    kept: Place
    """Where entries are made and kept."""
    shared: Place | None
    """Where those that are needed are loaded to, if not used where they are kept."""
    why: str


def cache_dir(config: RunConfig) -> Path:
    """The folder of persistent caches."""
    return config.cache_config.cache_dir or config.run.output_dir / "cache"


def places(
    kind: Kind, config: RunConfig, run_folder: Path, life: Life, attached: Callable[[int, int], None] | None = None
) -> Places:
    """`life` is how long entries stay that are not persistent; `attached` is told what unified memory is in use."""
    in_memory = kind == "unified_memory"
    if config.cache_config.persistent_cache:
        kept = _disk(cache_dir(config), "until_removed", check=not in_memory)
        why = "persistent_cache: kept here" + (", loaded into shared memory once" if in_memory else " and mapped")
        return Places(kept, _memory(config, "run", attached) if in_memory else None, why)
    if in_memory:
        return Places(
            _memory(config, life, attached), None, "one copy in memory for all processes; it ends with the run"
        )
    return Places(_disk(run_folder / "cache", life, check=True), None, "a mapped file; it ends with the run")


def _disk(folder: Path, life: Life, *, check: bool) -> Place:
    """Entries that are loaded into memory are checked on the way; mapped ones before every use."""
    return Place(
        home=_home(folder),
        life=life,
        in_memory=False,
        verify="always" if check else "on_demand",
        remedy="`supertuner cache build CONFIG --check` finds damaged entries and encodes them again",
        more_room="free some, or set cache_config.cache_dir to another disk",
    )


def _home(folder: Path) -> Home:
    try:
        return Home(folder)
    except ArenaError as error:
        remedy = "the folder of caches is cache_config.cache_dir, or `cache` below run.output_dir if that is not set"
        raise CacheError(f"{error}; {remedy}") from error


def _memory(config: RunConfig, life: Life, attached: Callable[[int, int], None] | None) -> Place:
    return Place(
        home=Home(config.arena.home or default_home()),
        life=life,
        in_memory=True,
        verify="on_demand",
        remedy="start the run again",
        more_room='free memory (`supertuner arena ls` lists what we hold), or set cache_config to type "disk"',
        attached=attached,
    )

"""Who stages: the first process that asks builds the arena, the others wait for it and find it there."""

from __future__ import annotations

import time
from collections.abc import Sequence

from supertuner.arena.arena_info import ArenaInfo
from supertuner.arena.build import ArenaBuild
from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome
from supertuner.arena.reader import ArenaReader, VerifyMode
from supertuner.config.settings.data import DatasetSettings
from supertuner.core.errors import ArenaBusyError, ArenaError, ArenaMissingError
from supertuner.core.events import Progress

_POLL_S = 0.2


def acquire_arena(
    home: ArenaHome, name: str, life: ArenaLifetime, verify: VerifyMode, progress: Progress
) -> ArenaBuild | ArenaReader:
    """A build of our own, or the arena, validated and held. Waits as long as another process builds it."""
    home.sweep()  # what has outlived its stated life is not used again; remains may hold the memory that we need now
    reader = _try_attach(home, name, verify)
    if reader is not None:
        return reader
    return _try_acquire(home, name, life, verify) or _wait_for_builder(home, name, life, verify, progress)


def _wait_for_builder(
    home: ArenaHome, name: str, life: ArenaLifetime, verify: VerifyMode, progress: Progress
) -> ArenaBuild | ArenaReader:
    """Show how far the other process is, until it is done or gone."""
    shown_bytes = 0
    with progress.phase(f"waiting for another process that stages {name}") as phase:
        while (acquired := _try_acquire(home, name, life, verify)) is None:
            nbytes = next((arena.nbytes for arena in home.list_arenas() if arena.name == name), 0)
            phase.advance(nbytes=max(0, nbytes - shown_bytes))
            shown_bytes = max(shown_bytes, nbytes)
            time.sleep(_POLL_S)
    return acquired


def find_older_versions(arenas: Sequence[ArenaInfo], dataset: DatasetSettings, name: str) -> list[ArenaInfo]:
    """Sealed arenas of the same dataset as it was before its files or settings changed.

    Other projects of this node may use the same id: only what came from the same place is a version of this dataset.
    """
    expected_meta = {"dataset": dataset.id, "source": str(dataset.instance_data_dir)}
    others = [arena for arena in arenas if arena.name != name and arena.state == "sealed"]
    return [arena for arena in others if expected_meta.items() <= dict(arena.meta or {}).items()]


def _try_attach(home: ArenaHome, name: str, verify: VerifyMode) -> ArenaReader | None:
    """None if there is none yet. A damaged arena is an error with its remedy, not a reason to build."""
    try:
        return home.attach(name, verify=verify)
    except ArenaMissingError:
        return None


def _try_acquire(
    home: ArenaHome, name: str, life: ArenaLifetime, verify: VerifyMode
) -> ArenaBuild | ArenaReader | None:
    """What is possible now; None if another process is building."""
    reader = _try_attach(home, name, verify)
    if reader is not None:
        return reader
    try:
        return home.build(name, life=life)
    except ArenaBusyError:
        return None
    except ArenaError:
        if any(arena.name == name and arena.state == "sealed" for arena in home.list_arenas()):
            return None  # sealed between our two looks: the next one finds it
        raise

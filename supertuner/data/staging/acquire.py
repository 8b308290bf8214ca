"""Who stages: the first process that asks builds the arena, the others wait for it and find it there."""

from __future__ import annotations

import time
from collections.abc import Sequence

from supertuner.arena.build import Build
from supertuner.arena.format import Life
from supertuner.arena.home import Home
from supertuner.arena.reader import Reader, Verify
from supertuner.arena.states import ArenaInfo
from supertuner.config.settings.data import Dataset
from supertuner.core.errors import ArenaBusy, ArenaError, ArenaMissing
from supertuner.core.events import Progress

_POLL_S = 0.2


def claim(home: Home, name: str, life: Life, verify: Verify, progress: Progress) -> Build | Reader:
    """A build of our own, or the arena, validated and held. Waits as long as another process builds it."""
    home.sweep()  # what has outlived its stated life is not used again; remains may hold the memory that we need now
    found = _attach(home, name, verify)
    if found is not None:
        return found
    return _try(home, name, life, verify) or _wait(home, name, life, verify, progress)


def _wait(home: Home, name: str, life: Life, verify: Verify, progress: Progress) -> Build | Reader:
    """Show how far the other process is, until it is done or gone."""
    shown = 0
    with progress.phase(f"waiting for another process that stages {name}") as phase:
        while (found := _try(home, name, life, verify)) is None:
            nbytes = next((arena.nbytes for arena in home.ls() if arena.name == name), 0)
            phase.advance(nbytes=max(0, nbytes - shown))
            shown = max(shown, nbytes)
            time.sleep(_POLL_S)
    return found


def older_versions(arenas: Sequence[ArenaInfo], dataset: Dataset, name: str) -> list[ArenaInfo]:
    """Sealed arenas of the same dataset as it was before its files or settings changed.

    Other projects of this node may use the same id: only what came from the same place is a version of this dataset.
    """
    wanted = {"dataset": dataset.id, "source": str(dataset.instance_data_dir)}
    others = [arena for arena in arenas if arena.name != name and arena.state == "sealed"]
    return [arena for arena in others if wanted.items() <= dict(arena.meta or {}).items()]


def _attach(home: Home, name: str, verify: Verify) -> Reader | None:
    """None if there is none yet. A damaged arena is an error with its remedy, not a reason to build."""
    try:
        return home.attach(name, verify=verify)
    except ArenaMissing:
        return None


def _try(home: Home, name: str, life: Life, verify: Verify) -> Build | Reader | None:
    """What is possible now; None if another process is building."""
    found = _attach(home, name, verify)
    if found is not None:
        return found
    try:
        return home.build(name, life=life)
    except ArenaBusy:
        return None
    except ArenaError:
        if any(arena.name == name and arena.state == "sealed" for arena in home.ls()):
            return None  # sealed between our two looks: the next one finds it
        raise

"""Decides which process stages a dataset: the first one builds the arena, the others wait for it and attach to it."""

from __future__ import annotations

import time

from supertuner.arena.build import ArenaBuild
from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome
from supertuner.arena.reader import ArenaReader, VerifyMode
from supertuner.core.errors import ArenaBusyError, ArenaError, ArenaMissingError
from supertuner.core.events import Progress

_POLL_S = 0.2


def acquire_arena(
    home: ArenaHome, name: str, life: ArenaLifetime, verify: VerifyMode, progress: Progress
) -> ArenaBuild | ArenaReader:
    """A reader of the existing arena, validated and locked, or a new build of it.

    While another process builds the arena, this waits until that process finishes or dies.
    """
    home.sweep()  # removes expired arenas, which must not be reused, and leftovers that may hold the memory needed now
    reader = _try_attach(home, name, verify)
    if reader is not None:
        return reader
    return _try_acquire(home, name, life, verify) or _wait_for_builder(home, name, life, verify, progress)


def _wait_for_builder(
    home: ArenaHome, name: str, life: ArenaLifetime, verify: VerifyMode, progress: Progress
) -> ArenaBuild | ArenaReader:
    """Show the other process's progress until it finishes or dies."""
    shown_bytes = 0
    with progress.phase(f"waiting for another process that stages {name}") as phase:
        while (acquired := _try_acquire(home, name, life, verify)) is None:
            nbytes = next((arena.nbytes for arena in home.list_arenas() if arena.name == name), 0)
            phase.advance(nbytes=max(0, nbytes - shown_bytes))
            shown_bytes = max(shown_bytes, nbytes)
            time.sleep(_POLL_S)
    return acquired


def _try_attach(home: ArenaHome, name: str, verify: VerifyMode) -> ArenaReader | None:
    """None if the arena does not exist yet. A damaged arena raises its error; it is not rebuilt silently."""
    try:
        return home.attach(name, verify=verify)
    except ArenaMissingError:
        return None


def _try_acquire(
    home: ArenaHome, name: str, life: ArenaLifetime, verify: VerifyMode
) -> ArenaBuild | ArenaReader | None:
    """Attach or start a build without waiting; None if another process is building."""
    reader = _try_attach(home, name, verify)
    if reader is not None:
        return reader
    try:
        return home.build(name, life=life)
    except ArenaBusyError:
        return None
    except ArenaError:
        if any(arena.name == name and arena.state == "sealed" for arena in home.list_arenas()):
            return None  # sealed between the attempt to attach and the attempt to build: the next call attaches
        raise

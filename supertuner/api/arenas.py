"""Lists, verifies and removes arenas: the staged data and caches of this user on this node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from supertuner.arena.arena_info import ArenaInfo
from supertuner.arena.home import ArenaHome, default_home
from supertuner.core.errors import ArenaDamagedError, ArenaError
from supertuner.core.events import NullSink
from supertuner.core.types import JSON
from supertuner.sinks.console import ConsoleSink

__all__ = ["ArenaHome", "ArenaInfo", "ArenaVerification", "open_home", "verify"]


@dataclass(frozen=True, slots=True)
class ArenaVerification:
    """The result of reading every byte of an arena."""

    name: str
    units: int | None
    """Number of stored units; None if the arena is damaged."""
    problem: str | None
    """What is damaged; None if the arena is intact."""

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values."""
        return asdict(self)


def open_home(path: str | os.PathLike[str] | None = None) -> ArenaHome:
    """Open a folder of arenas: `list_arenas()` lists them, `remove(name)` removes one that no process uses.

    Args:
        path: The folder that `arena.home` names in a configuration. None: this user's folder on tmpfs.

    Raises:
        ArenaError: `path` is not a folder, or not one of this user.
    """
    if path is not None and not Path(path).is_dir():  # listing must not create the folder
        raise ArenaError(f"{path} is not a folder; give the folder that arena.home names in the configuration")
    return ArenaHome(Path(path) if path is not None else default_home())


def verify(
    home: ArenaHome, names: Sequence[str] | None = None, *, show_progress: bool = False
) -> Iterator[ArenaVerification]:
    """Verify the checksums of all bytes of arenas, one arena at a time.

    Args:
        home: The folder of arenas, from `open_home`.
        names: The arenas to verify. None: all that are complete.
        show_progress: Show progress on the console.

    Raises:
        ArenaError: An arena does not exist, or is still being built.
    """
    complete = ("sealed", "damaged")
    chosen = names or [info.name for info in home.list_arenas() if info.state in complete]
    with ConsoleSink() if show_progress else nullcontext(NullSink()) as progress:
        for name in chosen:
            try:
                with home.attach(name) as reader:
                    reader.verify(progress)
                    yield ArenaVerification(name, len(reader), None)
            except ArenaDamagedError as error:
                yield ArenaVerification(name, None, str(error))

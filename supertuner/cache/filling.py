"""Writing missing entries into an arena that is being built, one unit each, as they come from whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.build import Build
from supertuner.arena.writer import Writer
from supertuner.cache.entries import Tensors
from supertuner.cache.keys import Keys, text
from supertuner.cache.room import Place, entry_bytes, free_bytes, no_room, require_room
from supertuner.core.errors import ArenaFull, CacheError
from supertuner.core.events import Phase
from supertuner.core.host import Host

Places: TypeAlias = NDArray[np.intp]
Make: TypeAlias = Callable[[Places], Generator[tuple[int, Tensors], None, None]]
"""Given places in a list of keys, makes their entries, in any order. Called only if something is missing."""


class Stopped(Exception):
    """Filling was asked to end; what was committed is there for whoever fills next."""


def never() -> bool:
    return False


@dataclass(frozen=True, eq=False, slots=True)
class Wanted:
    """Entries that are to be there, and how they are made."""

    keys: Keys
    make: Make
    sizes: NDArray[np.float64] | None = None
    """How large the entries are in relation to each other: enough to tell the size of all from that of one."""
    title: str = ""
    """For people who watch."""


class Filling:
    def __init__(self, what: str, wanted: Wanted, fresh: Places, place: Place, host: Host) -> None:
        self._what, self._wanted, self._fresh, self._place, self._host = what, wanted, fresh, place, host
        self._left = float(len(fresh) if wanted.sizes is None else wanted.sizes[fresh].sum())
        self._made = 0

    def write(self, build: Build, phase: Phase, stop: Callable[[], bool]) -> None:
        """Make and commit all of them."""
        if not len(self._fresh):
            return
        with closing(self._wanted.make(self._fresh)) as entries, build.writer() as writer:
            for place, entry in entries:
                if stop():
                    raise Stopped
                phase.advance(items=1, nbytes=self._put(writer, place, entry))
        assert self._made == len(self._fresh), f"{self._made} of {len(self._fresh)} entries were made"

    def _put(self, writer: Writer, place: int, entry: Tensors) -> int:
        nbytes, size = entry_bytes(entry), self._size(place)
        need = int(nbytes * self._left / size)
        entries = len(self._fresh) - self._made
        if self._made == 0:
            require_room(self._what, entries, need, self._place, self._host)
        try:
            with writer.begin(text(self._wanted.keys[place])) as unit:
                for field, tensor in entry.items():
                    unit.put(field, tensor.detach().contiguous())
        except ArenaFull as error:
            free = free_bytes(self._place, self._host)
            raise CacheError(no_room(self._what, entries, need, min(free, need), self._place)) from error
        self._left -= size
        self._made += 1
        return nbytes

    def _size(self, place: int) -> float:
        return 1.0 if self._wanted.sizes is None else float(self._wanted.sizes[place])

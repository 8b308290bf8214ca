"""Writing missing entries into an arena that is being built, one unit each, as they come from whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.build import Joined
from supertuner.arena.writer import Writer
from supertuner.cache.capacity import Place, entry_bytes, free_bytes, no_room, require_room
from supertuner.cache.entries import Tensors
from supertuner.cache.keys import Keys, text
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
    sizes: Callable[[Places], NDArray[np.float64]] | None = None
    """How large entries are in relation to each other: enough to tell the size of all from that of one."""
    title: str = ""
    """For people who watch."""

    def size(self, places: Places) -> float:
        """Of these entries together."""
        return float(len(places) if self.sizes is None else self.sizes(places).sum())


class Filling:
    def __init__(self, what: str, wanted: Wanted, left: float, entries: int, place: Place, host: Host) -> None:
        """`left` is the size of all `entries` that are still to be made, here or by others, as `Wanted.sizes` says."""
        self._what, self._wanted, self._place, self._host = what, wanted, place, host
        self._left, self._entries = left, entries
        self.made = 0

    def write(self, build: Joined, chunks: Iterable[Places], phase: Phase, stop: Callable[[], bool]) -> None:
        """Make and commit all of them. A writer is opened for the first, and closed after the last."""
        writer: Writer | None = None
        try:
            for places in chunks:
                writer = writer or build.writer()
                before = self.made
                with closing(self._wanted.make(places)) as entries:
                    for place, entry in entries:
                        if stop():
                            raise Stopped
                        phase.advance(items=1, nbytes=self._put(writer, place, entry))
                made = self.made - before
                assert made == len(places), f"{made} of {len(places)} entries were made"
        finally:
            if writer is not None:
                writer.close()

    def _put(self, writer: Writer, place: int, entry: Tensors) -> int:
        nbytes, size = entry_bytes(entry), self._wanted.size(np.array([place], np.intp))
        need = int(nbytes * self._left / size)
        entries = self._entries - self.made
        if self.made == 0:
            require_room(self._what, entries, need, self._place, self._host)
        try:
            with writer.begin(text(self._wanted.keys[place])) as unit:
                for field, tensor in entry.items():
                    unit.put(field, tensor.detach().contiguous())
        except ArenaFull as error:
            free = free_bytes(self._place, self._host)
            raise CacheError(no_room(self._what, entries, need, min(free, need), self._place)) from error
        self._left -= size
        self.made += 1
        return nbytes

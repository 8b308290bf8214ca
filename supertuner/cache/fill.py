"""Writing missing entries into an arena that is being built, one unit each, as they come from whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.build import BuildParticipant
from supertuner.arena.writer import SegmentWriter
from supertuner.cache.capacity import CacheLocation, entry_bytes, free_bytes, no_room_message, require_room
from supertuner.cache.entries import NamedTensors
from supertuner.cache.keys import EntryKeys, key_text
from supertuner.core.errors import ArenaFullError, CacheError
from supertuner.core.events import ProgressPhase
from supertuner.core.host import HostFacts

EntryIndices: TypeAlias = NDArray[np.intp]
EntryMaker: TypeAlias = Callable[[EntryIndices], Generator[tuple[int, NamedTensors], None, None]]
"""Given places in a list of keys, makes their entries, in any order. Called only if something is missing."""


class FillStopped(Exception):
    """Filling was asked to end; what was committed is there for whoever fills next."""


def never_stop() -> bool:
    return False


@dataclass(frozen=True, eq=False, slots=True)
class EntryRequest:
    """Entries that are to be there, and how they are made."""

    keys: EntryKeys
    make: EntryMaker
    relative_sizes: Callable[[EntryIndices], NDArray[np.float64]] | None = None
    """How large entries are in relation to each other: enough to tell the size of all from that of one."""
    title: str = ""
    """For people who watch."""

    def relative_size(self, indices: EntryIndices) -> float:
        """Of these entries together."""
        return float(len(indices) if self.relative_sizes is None else self.relative_sizes(indices).sum())


class CacheFiller:
    def __init__(
        self,
        kind: str,
        request: EntryRequest,
        remaining_size: float,
        entry_count: int,
        location: CacheLocation,
        host: HostFacts,
    ) -> None:
        """`left` is the size of all `entries` that are still to be made, here or by others, as `Wanted.sizes` says."""
        self._kind, self._request, self._location, self._host = kind, request, location, host
        self._remaining_size, self._entry_count = remaining_size, entry_count
        self.entries_made = 0

    def write_entries(
        self, build: BuildParticipant, chunks: Iterable[EntryIndices], phase: ProgressPhase, stop: Callable[[], bool]
    ) -> None:
        """Make and commit all of them. A writer is opened for the first, and closed after the last."""
        writer: SegmentWriter | None = None
        try:
            for indices in chunks:
                writer = writer or build.open_writer()
                made_before = self.entries_made
                with closing(self._request.make(indices)) as entries:
                    for index, entry in entries:
                        if stop():
                            raise FillStopped
                        phase.advance(items=1, nbytes=self._write_entry(writer, index, entry))
                made = self.entries_made - made_before
                assert made == len(indices), f"{made} of {len(indices)} entries were made"
        finally:
            if writer is not None:
                writer.close()

    def _write_entry(self, writer: SegmentWriter, index: int, entry: NamedTensors) -> int:
        nbytes, size = entry_bytes(entry), self._request.relative_size(np.array([index], np.intp))
        needed_bytes = int(nbytes * self._remaining_size / size)
        entries = self._entry_count - self.entries_made
        if self.entries_made == 0:
            require_room(self._kind, entries, needed_bytes, self._location, self._host)
        try:
            with writer.begin(key_text(self._request.keys[index])) as unit:
                for field, tensor in entry.items():
                    unit.put(field, tensor.detach().contiguous())
        except ArenaFullError as error:
            free = free_bytes(self._location, self._host)
            raise CacheError(
                no_room_message(self._kind, entries, needed_bytes, min(free, needed_bytes), self._location)
            ) from error
        self._remaining_size -= size
        self.entries_made += 1
        return nbytes

"""Cache entries: how missing ones are requested, and a table that finds and reads those of several sealed arenas.

Keys are looked up once and give refs (integers); batches are then gathered by ref without any search.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from supertuner.arena.reader import ArenaReader
from supertuner.cache.keys import KEY_WIDTH, EntryKeys
from supertuner.core.errors import ArenaDamagedError, CacheError
from supertuner.core.events import Progress

NamedTensors: TypeAlias = dict[str, torch.Tensor]
"""The fields of an entry, or of a batch of entries."""
EntryRefs: TypeAlias = NDArray[np.int64]
"""Where entries are: the index of the arena's reader, shifted by UNIT_BITS, plus the index of its unit (the arena's
word for one stored entry)."""
EntryIndices: TypeAlias = NDArray[np.intp]
"""Indices into the keys of an EntryRequest."""
EntryMaker: TypeAlias = Callable[[EntryIndices], Generator[tuple[int, NamedTensors], None, None]]
"""Yields (index, entry) for each of the indices, in any order. Called only if entries are missing."""

MISSING_REF = -1
UNIT_BITS = 40
_UNIT_MASK = (1 << UNIT_BITS) - 1


@dataclass(frozen=True, eq=False, slots=True)
class EntryRequest:
    """Entries that a store must contain, and how missing ones are made."""

    keys: EntryKeys
    make: EntryMaker
    relative_sizes: Callable[[EntryIndices], NDArray[np.float64]] | None = None
    """Sizes of entries relative to each other, so that one entry's bytes predict those of all. None: equal sizes."""
    title: str = ""
    """Title of the progress display."""

    def relative_size(self, indices: EntryIndices) -> float:
        """Sum of the relative sizes of these entries."""
        return float(len(indices) if self.relative_sizes is None else self.relative_sizes(indices).sum())


class CacheEntries:
    """The entries of several arenas. If several contain the same key, the arena that was added last wins."""

    def __init__(self, remedy: str = "") -> None:
        self._readers: list[ArenaReader] = []
        self._remedy = remedy
        self._dropped: set[int] = set()

    def add_reader(self, reader: ArenaReader) -> None:
        """Add an arena; its entries take precedence over those of earlier arenas."""
        self._readers.append(reader)

    def __len__(self) -> int:
        return sum(len(reader) for reader in self._readers)

    def find(self, keys: EntryKeys) -> EntryRefs:
        """The ref of each key's entry, or MISSING_REF."""
        refs = np.full(len(keys), MISSING_REF, np.int64)
        for reader_index in reversed(range(len(self._readers))):
            unresolved = np.flatnonzero(refs == MISSING_REF)
            refs[unresolved] = self._find_in(reader_index, keys[unresolved])
        return refs

    def drop(self, refs: Iterable[int]) -> None:
        """Treat these entries as missing from now on, because their bytes are damaged."""
        self._dropped.update(refs)

    def gather(self, refs: EntryRefs, *, threads: int = 1) -> NamedTensors:
        """Stack entries of equal shape: for each field a new contiguous CPU tensor [len(refs), …].

        Raises CacheError if an entry is damaged.
        """
        try:
            if len(self._readers) == 1:  # with one arena a ref is the unit; the reader rejects unknown ones
                return self._readers[0].gather_tensors(refs, threads=threads)
            reader_indices = refs >> UNIT_BITS
            assert reader_indices.min() >= 0, "gather() was called with a MISSING_REF"
            edges = [0, *(np.flatnonzero(np.diff(reader_indices)) + 1).tolist(), len(refs)]
            parts = [  # one call for each run of consecutive refs into the same arena
                self._readers[int(reader_indices[begin])].gather_tensors(refs[begin:end] & _UNIT_MASK, threads=threads)
                for begin, end in pairwise(edges)
            ]
        except ArenaDamagedError as error:
            raise self._damage_error(error) from error
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def entry(self, ref: int) -> NamedTensors:
        """One entry as views of the arena's memory, which must not be written. Raises CacheError if it is damaged."""
        assert ref >= 0, "entry() was called with a MISSING_REF"
        reader, unit = self._readers[ref >> UNIT_BITS], ref & _UNIT_MASK
        try:
            return {field: reader.tensor(unit, field) for field in reader.fields if reader.has(unit, field)}
        except ArenaDamagedError as error:
            raise self._damage_error(error) from error

    def check_entry(self, ref: int) -> NamedTensors | ArenaDamagedError:
        """Verify an entry's checksums. Returns the entry as views, or the error (not raised) if it is damaged."""
        reader, unit = self._readers[ref >> UNIT_BITS], ref & _UNIT_MASK
        try:
            for field in reader.fields:
                if reader.has(unit, field):
                    reader.check(unit, field)
        except ArenaDamagedError as error:
            return error
        return self.entry(ref)

    def find_damaged_arenas(self, progress: Progress) -> frozenset[int]:
        """Verify every byte of every arena; the reader indices of damaged ones."""
        damaged = set()
        for reader_index, reader in enumerate(self._readers):
            try:
                reader.verify(progress)
            except ArenaDamagedError:
                damaged.add(reader_index)  # the caller checks which of its entries are damaged
        return frozenset(damaged)

    def close(self) -> None:
        """Close the arenas; tensors that were returned before stay valid."""
        while self._readers:
            self._readers.pop().close()

    def _find_in(self, reader_index: int, keys: EntryKeys) -> EntryRefs:
        table = self._readers[reader_index].fixed_width_keys(KEY_WIDTH)
        if table is None or not len(table) or not len(keys):
            return np.full(len(keys), MISSING_REF, np.int64)
        at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
        refs = np.where(table[at] == keys, at + (reader_index << UNIT_BITS), MISSING_REF)
        if self._dropped:
            refs[np.isin(refs, np.fromiter(self._dropped, np.int64))] = MISSING_REF
        return refs

    def _damage_error(self, error: ArenaDamagedError) -> CacheError:
        return CacheError(f"{error.file}: {error.description}; {self._remedy or error.remedy}")

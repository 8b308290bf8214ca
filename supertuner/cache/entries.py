"""Entries of several sealed arenas, read as one table: found by key once, then gathered by number without a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
"""An entry, or a batch of them: named tensors."""
EntryRefs: TypeAlias = NDArray[np.int64]
"""Where entries are: an arena's place in the table, and the unit's number in it."""

MISSING_REF = -1
UNIT_BITS = 40
"""Bits of a ref below the arena's place."""
_UNIT_MASK = (1 << UNIT_BITS) - 1


class CacheEntries:
    """Later arenas win: an entry that was made again is found where it was made last."""

    def __init__(self, readers: Sequence[ArenaReader] = (), remedy: str = "") -> None:
        self._readers = list(readers)
        self._remedy = remedy
        self._dropped: set[int] = set()

    def add_reader(self, reader: ArenaReader) -> None:
        """Also show this arena's entries, before those of the others."""
        self._readers.append(reader)

    def __len__(self) -> int:
        return sum(len(reader) for reader in self._readers)

    def find(self, keys: EntryKeys) -> EntryRefs:
        """Where each entry is, or MISSING."""
        refs = np.full(len(keys), MISSING_REF, np.int64)
        for reader_index in reversed(range(len(self._readers))):
            unresolved = np.flatnonzero(refs == MISSING_REF)
            refs[unresolved] = self._find_in(reader_index, keys[unresolved])
        return refs

    def drop(self, refs: Iterable[int]) -> None:
        """Find these no longer: their bytes are damaged."""
        self._dropped.update(refs)

    def gather(self, refs: EntryRefs, *, threads: int = 1) -> NamedTensors:
        """Entries of one shape, stacked: for each field a new contiguous tensor [k, …] on the CPU."""
        try:
            if len(self._readers) == 1:  # it refuses numbers that are none of its own
                return self._readers[0].gather_tensors(refs, threads=threads)
            numbers = refs >> UNIT_BITS
            assert numbers.min() >= 0, "an entry that was never made is asked for"
            edges = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(refs)]
            parts = [  # neighbours in one arena go in one call
                self._readers[int(numbers[begin])].gather_tensors(refs[begin:end] & _UNIT_MASK, threads=threads)
                for begin, end in pairwise(edges)
            ]
        except ArenaDamagedError as error:
            raise self._damage_error(error) from error
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def entry(self, ref: int) -> NamedTensors:
        """One entry as views of the arena's memory: read, do not write."""
        assert ref >= 0, "an entry that was never made is asked for"
        reader, unit = self._reader(ref), ref & _UNIT_MASK
        try:
            return {field: reader.tensor(unit, field) for field in reader.fields if reader.has(unit, field)}
        except ArenaDamagedError as error:
            raise self._damage_error(error) from error

    def check_entry(self, ref: int) -> NamedTensors | ArenaDamagedError:
        """One entry as views, if its bytes are those that were written; else what is wrong with them."""
        reader, unit = self._reader(ref), ref & _UNIT_MASK
        try:
            for field in reader.fields:
                if reader.has(unit, field):
                    reader.check(unit, field)
        except ArenaDamagedError as error:
            return error
        return self.entry(ref)

    def find_damaged_arenas(self, progress: Progress) -> frozenset[int]:
        """Places of the arenas that are not what was written, every byte of them looked at."""
        damaged = set()
        for reader_index, reader in enumerate(self._readers):
            try:
                reader.verify(progress)
            except ArenaDamagedError:
                damaged.add(reader_index)  # which entries are hit, is asked next
        return frozenset(damaged)

    def close(self) -> None:
        """Give up the arenas; entries that were given out stay good."""
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

    def _reader(self, ref: int) -> ArenaReader:
        return self._readers[ref >> UNIT_BITS]

    def _damage_error(self, error: ArenaDamagedError) -> CacheError:
        return CacheError(f"{error.file}: {error.description}; {self._remedy or error.remedy}")

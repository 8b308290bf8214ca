"""The contents of an arena as columns: the form in which readers look up records.

All segments form one address range, each beginning on a 64 KiB boundary; `offset` is a position in that range. Records
are ordered by address, units by number.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.format import ABSENT, BIG_PAGE, TABLE_SEGMENT, RecordKind, round_up, unpack_kind
from supertuner.arena.journal import JournalEntry
from supertuner.core.errors import ArenaDamagedError
from supertuner.core.types import JSON

U64: TypeAlias = NDArray[np.uint64]
U32: TypeAlias = NDArray[np.uint32]

KIND_ROW = np.dtype(
    [("codec", "S16"), ("dtype", "u1"), ("dims", "u1"), ("flat", "u1"), ("zero", "V5"), ("shape", "<u8", (8,))]
)


@dataclass(frozen=True, slots=True)
class ArenaSegment:
    number: int
    kind: int
    records: int
    nbytes: int
    """Length of its data file in bytes."""
    base: int
    """Where the segment begins in the arena's address range."""


@dataclass(frozen=True)
class ArenaCatalog:
    uuid: bytes
    segments: tuple[ArenaSegment, ...]
    offset: U64
    nbytes: U64
    raw_nbytes: U64
    checksum: U64
    kind: U32
    kinds: NDArray[np.void]
    fields: Mapping[str, U32]
    """Per field, the record number of each unit, or ABSENT."""
    keys: SortedKeys
    tables: Mapping[str, int] = field(default_factory=dict)
    meta: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Length of the arena's address range in bytes."""
        return next_segment_base(self.segments[-1].base, self.segments[-1].nbytes) if self.segments else BIG_PAGE

    def record_kind(self, kind_number: int) -> RecordKind:
        return unpack_kind("index", self.kinds[kind_number].tobytes())

    def segment_containing(self, record: int) -> ArenaSegment:
        ends = list(accumulate(segment.records for segment in self.segments))
        return self.segments[bisect_right(ends, record)]


def next_segment_base(base: int, nbytes: int) -> int:
    """Where the segment that follows one at `base` begins."""
    return round_up(base + nbytes, BIG_PAGE)


class SortedKeys:
    """Keys in bytewise order, read in place from the index: a lookup is a binary search and allocates no table."""

    def __init__(self, ends: U64, content: NDArray[np.uint8]) -> None:
        """`content` is the concatenation of all keys, `ends` are their ends in it."""
        self.ends, self.content = ends, content
        self._end_at, self._bytes = ends.data, content.data  # of which reading a single number is cheap

    def __len__(self) -> int:
        return len(self.ends)

    def key_at(self, unit: int) -> bytes:
        return bytes(self._bytes[self._end_at[unit - 1] if unit else 0 : self._end_at[unit]])

    def find(self, key: bytes) -> int | None:
        unit = bisect_left(range(len(self)), key, key=self.key_at)
        return unit if unit < len(self) and self.key_at(unit) == key else None

    def fixed_width_array(self, nbytes: int) -> NDArray[np.bytes_] | None:
        """All keys as one array without a copy; None unless every key has `nbytes` bytes."""
        if not np.array_equal(self.ends, np.arange(1, len(self) + 1, dtype=np.uint64) * np.uint64(nbytes)):
            return None
        return self.content.view(f"S{nbytes}")


class CatalogBuilder:
    """Collects the committed units and tables of all segments as columns, one segment after the other."""

    def __init__(self, uuid: bytes) -> None:
        self.uuid = uuid
        self.segments: list[ArenaSegment] = []
        self.keys: list[bytes] = []
        self.offset, self.nbytes, self._raw_nbytes, self._checksum = array("Q"), array("Q"), array("Q"), array("Q")
        """Columns of the records; offsets are relative to their segment."""
        self._kind = array("I")
        self._kinds: dict[bytes, int] = {}
        self._tables: dict[str, int] = {}
        self._fields: dict[bytes, tuple[array[int], array[int]]] = defaultdict(lambda: (array("Q"), array("Q")))
        """Name of a field → the units that have it, and their records."""

    def add(self, segment_kind: int, entry: JournalEntry) -> None:
        """Add a unit or table of the segment that `end_segment` will add."""
        is_table = segment_kind == TABLE_SEGMENT
        if is_table:
            self._tables[entry.key.decode()] = len(self.offset)
        for name, kind, offset, nbytes, raw_nbytes, checksum in entry.fields:
            if not is_table:
                units, records = self._fields[name]
                units.append(len(self.keys))
                records.append(len(self.offset))
            self.offset.append(offset)
            self.nbytes.append(nbytes)
            self._raw_nbytes.append(raw_nbytes)
            self._checksum.append(checksum)
            self._kind.append(self._kinds.setdefault(kind, len(self._kinds)))
        if not is_table:
            self.keys.append(entry.key)

    def end_segment(self, number: int, kind: int, records: int, nbytes: int) -> None:
        """Add the segment of the last `records` records, whose data file has `nbytes` bytes."""
        base = next_segment_base(self.segments[-1].base, self.segments[-1].nbytes) if self.segments else 0
        self.segments.append(ArenaSegment(number, kind, records, nbytes, base))

    def build(self, unit_order: list[int]) -> ArenaCatalog:
        """Build the catalog. `unit_order` are the numbers of the units added, in bytewise order of their keys."""
        keys = [self.keys[unit] for unit in unit_order]
        key_ends = np.cumsum(np.fromiter(map(len, keys), np.uint64, len(keys)), dtype=np.uint64)
        bases = np.array([segment.base for segment in self.segments], np.uint64)
        return ArenaCatalog(
            uuid=self.uuid,
            segments=tuple(self.segments),
            offset=_u64(self.offset) + np.repeat(bases, np.array([s.records for s in self.segments], np.intp)),
            nbytes=_u64(self.nbytes),
            raw_nbytes=_u64(self._raw_nbytes),
            checksum=_u64(self._checksum),
            kind=np.array(self._kind, np.uint32),
            kinds=np.frombuffer(b"".join(self._kinds), KIND_ROW),
            fields={_field_name(name): self._column(name, unit_order) for name in sorted(self._fields)},
            keys=SortedKeys(key_ends, np.frombuffer(b"".join(keys), np.uint8)),
            tables=self._tables,
        )

    def _column(self, name: bytes, unit_order: list[int]) -> U32:
        units, records = self._fields[name]
        column = np.full(len(self.keys), ABSENT, np.uint32)
        column[_u64(units)] = _u64(records)
        return column[np.array(unit_order, np.intp)]


def _field_name(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise ArenaDamagedError("journal", f"a field name is not UTF-8: {name!r}") from error


def _u64(values: array[int]) -> U64:
    return np.array(values, dtype=np.uint64)

"""The contents of an arena as columns: the form in which both sealed and live readers look up records.

All segments form one address range, each beginning on a 64 KiB boundary; `offset` is a position in that range. Records
are ordered by address, units by number.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.format import ABSENT, BIG_PAGE, PAGE, TABLE_SEGMENT, RecordKind, round_up, unpack_kind
from supertuner.arena.journal import JournalEntry
from supertuner.core.errors import ArenaDamagedError
from supertuner.core.types import JSON

U64: TypeAlias = NDArray[np.uint64]
U32: TypeAlias = NDArray[np.uint32]
U8: TypeAlias = NDArray[np.uint8]

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


class KeyLookup(Protocol):
    def __len__(self) -> int: ...

    def key_at(self, unit: int) -> bytes: ...

    def find(self, key: bytes) -> int | None: ...


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
    keys: KeyLookup
    tables: Mapping[str, int] = field(default_factory=dict)
    meta: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Length of the arena's address range in bytes."""
        return next_segment_base(self.segments[-1].base, self.segments[-1].nbytes) if self.segments else BIG_PAGE

    def record_kind(self, kind_number: int) -> RecordKind:
        return unpack_kind("index", self.kinds[kind_number].tobytes())

    def segment_containing(self, record: int) -> ArenaSegment:
        return self.segments[bisect_right(self._first_records, record) - 1]

    @cached_property
    def _first_records(self) -> list[int]:
        """The first record of each segment."""
        return list(accumulate((s.records for s in self.segments[:-1]), initial=0))


def next_segment_base(base: int, nbytes: int) -> int:
    """Where the segment that follows one at `base` begins."""
    return round_up(base + nbytes, BIG_PAGE)


class SortedKeys:
    """Keys in bytewise order, read in place from the index: a lookup is a binary search and allocates no table."""

    def __init__(self, ends: memoryview, key_bytes: memoryview) -> None:
        self._ends = ends
        self._key_bytes = key_bytes

    def __len__(self) -> int:
        return len(self._ends)

    def key_at(self, unit: int) -> bytes:
        return bytes(self._key_bytes[self._ends[unit - 1] if unit else 0 : self._ends[unit]])

    def find(self, key: bytes) -> int | None:
        unit = bisect_left(range(len(self._ends)), key, key=self.key_at)
        return unit if unit < len(self._ends) and self.key_at(unit) == key else None

    def fixed_width_array(self, nbytes: int) -> NDArray[np.bytes_] | None:
        """All keys as one array without a copy; None unless every key has `nbytes` bytes."""
        ends = np.frombuffer(self._ends, np.uint64)
        if not np.array_equal(ends, np.arange(1, len(ends) + 1, dtype=np.uint64) * np.uint64(nbytes)):
            return None
        return np.frombuffer(self._key_bytes, f"S{nbytes}") if len(ends) else np.zeros(0, f"S{nbytes}")


class ListedKeys:
    """Keys in the order of discovery, for arenas that are still growing."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._unit_by_key = {key: unit for unit, key in enumerate(keys)}

    def __len__(self) -> int:
        return len(self._keys)

    def key_at(self, unit: int) -> bytes:
        return self._keys[unit]

    def find(self, key: bytes) -> int | None:
        return self._unit_by_key.get(key)


class SegmentColumns:
    """The records of one segment, in the order of its journal."""

    def __init__(self, number: int, kind: int) -> None:
        self.number = number
        self.kind = kind
        self.offset, self.nbytes, self.raw_nbytes, self.checksum = array("Q"), array("Q"), array("Q"), array("Q")
        self.kinds = array("I")
        self.file_nbytes = PAGE

    def __len__(self) -> int:
        return len(self.offset)


class CatalogBuilder:
    """Collects the journal entries of all segments as columns while they are read."""

    def __init__(self, uuid: bytes) -> None:
        self.uuid = uuid
        self.segments: list[SegmentColumns] = []
        self.keys: list[bytes] = []
        self.tables: dict[str, tuple[int, int]] = {}
        self._kinds: dict[bytes, int] = {}
        self._fields: dict[bytes, tuple[array[int], array[int], array[int]]] = {}

    def add_segment(self, number: int, kind: int) -> SegmentColumns:
        self.segments.append(SegmentColumns(number, kind))
        return self.segments[-1]

    def add(self, segment: SegmentColumns, segment_index: int, entry: JournalEntry) -> None:
        """Add a committed unit (or table) of the segment with position `segment_index` in `self.segments`."""
        if segment.kind == TABLE_SEGMENT:
            self.tables[entry.key.decode()] = (segment_index, len(segment))
        unit = len(self.keys)
        for name, kind, offset, nbytes, raw_nbytes, checksum in entry.fields:
            if segment.kind != TABLE_SEGMENT:
                columns = self._fields.get(name)
                if columns is None:
                    columns = self._fields[name] = (array("Q"), array("Q"), array("Q"))
                units, orders, records = columns
                units.append(unit)
                orders.append(segment_index)
                records.append(len(segment))
            segment.offset.append(offset)
            segment.nbytes.append(nbytes)
            segment.raw_nbytes.append(raw_nbytes)
            segment.checksum.append(checksum)
            segment.kinds.append(self._kinds.setdefault(kind, len(self._kinds)))
        if segment.kind != TABLE_SEGMENT:
            self.keys.append(entry.key)

    def build(self, keys: KeyLookup, unit_order: NDArray[np.intp] | None = None) -> ArenaCatalog:
        """Build the catalog. With `unit_order`, units are renumbered: new unit i is the former unit `unit_order[i]`."""
        bases, firsts, base, first = [], [], 0, 0
        for s in self.segments:
            bases.append(base)
            firsts.append(first)
            base, first = next_segment_base(base, s.file_nbytes), first + len(s)
        segments = tuple(
            ArenaSegment(s.number, s.kind, len(s), s.file_nbytes, b) for s, b in zip(self.segments, bases, strict=True)
        )
        return ArenaCatalog(
            uuid=self.uuid,
            segments=segments,
            offset=_concatenate(
                [_u64(s.offset) + np.uint64(b) for s, b in zip(self.segments, bases, strict=True)], np.uint64
            ),
            nbytes=_concatenate([_u64(s.nbytes) for s in self.segments], np.uint64),
            raw_nbytes=_concatenate([_u64(s.raw_nbytes) for s in self.segments], np.uint64),
            checksum=_concatenate([_u64(s.checksum) for s in self.segments], np.uint64),
            kind=_concatenate([np.array(s.kinds, dtype=np.uint32) for s in self.segments], np.uint32),
            kinds=np.frombuffer(b"".join(self._kinds), KIND_ROW),
            fields={self._field_name(name): self._column(name, firsts, unit_order) for name in sorted(self._fields)},
            keys=keys,
            tables={name: firsts[segment_index] + record for name, (segment_index, record) in self.tables.items()},
        )

    def _field_name(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            raise ArenaDamagedError("journal", f"a field name is not UTF-8: {name!r}") from error

    def _column(self, name: bytes, firsts: list[int], unit_order: NDArray[np.intp] | None) -> U32:
        units, orders, records = self._fields[name]
        column = np.full(len(self.keys), ABSENT, np.uint32)
        column[_u64(units)] = np.array(firsts, dtype=np.uint64)[_u64(orders)] + _u64(records)
        return column if unit_order is None else column[unit_order]


def _u64(values: array[int]) -> U64:
    return np.array(values, dtype=np.uint64)


def _concatenate(parts: list[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)

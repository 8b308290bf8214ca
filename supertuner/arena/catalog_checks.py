"""Checks that a catalog is consistent: every record inside its segment, aligned, disjoint from the others, of a valid
kind.

Runs at every open, over a million records in milliseconds, in chunks that fit the CPU cache and need no large
temporaries.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.catalog import U64, ArenaCatalog, ArenaSegment
from supertuner.arena.format import ABSENT, BIG_PAGE, DTYPES, MAX_NBYTES, PAGE, unpack_kind
from supertuner.core.errors import ArenaDamagedError

_CHUNK_RECORDS = 1 << 15
_MAX_KINDS_UNPACKED = 4096


def check_catalog(file: object, catalog: ArenaCatalog) -> None:
    """Raise ArenaDamagedError with `file` and the first invalid record."""
    _check_segments(file, catalog)
    kinds = _check_kinds(file, catalog.kinds)
    first = 0
    for segment in catalog.segments:
        _check_records(file, catalog, segment, first)
        first += segment.records
    for begin in range(0, first, _CHUNK_RECORDS):
        _check_sizes(file, catalog, slice(begin, min(begin + _CHUNK_RECORDS, first)), kinds)
    _check_references(file, catalog)


def _check_segments(file: object, catalog: ArenaCatalog) -> None:
    numbers = [s.number for s in catalog.segments]
    if len(numbers) != len(set(numbers)):
        raise ArenaDamagedError(file, "lists a segment twice")
    for segment in catalog.segments:
        if segment.nbytes < PAGE or segment.nbytes > MAX_NBYTES or segment.base + segment.nbytes > MAX_NBYTES:
            size = f"{segment.nbytes} bytes for segment {segment.number}"
            raise ArenaDamagedError(file, f"lists an impossible size of {size}")
    if sum(s.records for s in catalog.segments) != len(catalog.offset):
        raise ArenaDamagedError(file, "the record counts of its segments do not add up to the records it lists")


def _check_records(file: object, catalog: ArenaCatalog, segment: ArenaSegment, first: int) -> None:
    low, high = segment.base + PAGE, segment.base + segment.nbytes
    free_from = low
    for begin in range(first, first + segment.records, _CHUNK_RECORDS):
        end = min(begin + _CHUNK_RECORDS, first + segment.records)
        offset, nbytes = catalog.offset[begin:end], catalog.nbytes[begin:end]
        # Each test first reduces the chunk to one number (min, max, bitwise or) and builds a mask only to find the
        # first invalid record, so that the pass over an intact arena stays cheap.
        if offset.min() < low or offset.max() >= high or nbytes.max() > segment.nbytes:
            outside = (offset < low) | (offset >= high) | (nbytes > segment.nbytes)
            _raise_misplaced(file, catalog, segment, begin, outside, "outside")
        after = offset + nbytes
        if after.max() > high:
            _raise_misplaced(file, catalog, segment, begin, after > high, "outside")
        if np.bitwise_or.reduce(offset) & np.uint64(PAGE - 1):
            _raise_misplaced(file, catalog, segment, begin, (offset % PAGE) != 0, "unaligned in")
        if nbytes.max() >= BIG_PAGE:
            unaligned = (nbytes >= BIG_PAGE) & ((offset & np.uint64(BIG_PAGE - 1)) != 0)
            if unaligned.any():
                _raise_misplaced(file, catalog, segment, begin, unaligned, "unaligned in")
        if nbytes.min() == 0:
            # An empty record still occupies one byte (`record_end`), so that no two records share an offset.
            after = np.maximum(after, offset + np.uint64(1))
        if offset[0] < free_from or (offset[1:] < after[:-1]).any():
            overlap = np.concatenate(([offset[0] < free_from], offset[1:] < after[:-1]))
            _raise_misplaced(file, catalog, segment, begin, overlap, "over another record, or out of order, in")
        free_from = int(after[-1])


def _raise_misplaced(
    file: object, catalog: ArenaCatalog, segment: ArenaSegment, begin: int, wrong: NDArray[np.bool_], relation: str
) -> None:
    record = begin + int(np.flatnonzero(wrong)[0])
    offset, nbytes = int(catalog.offset[record]) - segment.base, int(catalog.nbytes[record])
    place = f"{relation} segment {segment.number}, which has {segment.nbytes} bytes"
    raise ArenaDamagedError(file, f"record {record} ({nbytes} bytes at {offset}) lies {place}")


class _KindColumns:
    """Per kind: element size, total size, whether the length is free (`flat`), and whether it is
    uncompressed (`raw`).
    """

    def __init__(self, itemsize: U64, total: U64, flat: NDArray[np.bool_], raw: NDArray[np.bool_]) -> None:
        self.itemsize, self.total_bytes, self.flat, self.raw = itemsize, total, flat, raw
        self.all_raw, self.all_flat, self.all_bytes = raw.all(), flat.all(), (itemsize == 1).all()


def _check_kinds(file: object, rows: NDArray[np.void]) -> _KindColumns:
    sizes = np.zeros(256, np.uint64)
    for code, size in DTYPES.values():
        sizes[code] = size
    if len(rows) <= _MAX_KINDS_UNPACKED:
        for row in rows:
            unpack_kind(file, row.tobytes())
    elif (sizes[rows["dtype"]] == 0).any() or (rows["dims"] > 8).any() or (rows["flat"] > 1).any():
        # the rest of each row is checked when it is unpacked
        raise ArenaDamagedError(file, "unknown record kind")
    itemsize = sizes[rows["dtype"]]
    used = np.arange(8) < rows["dims"][:, None]
    # A shape whose product overflows 64 bits gives a wrong total, which then does not match the record's size.
    with np.errstate(over="ignore"):
        total = np.where(used, rows["shape"], np.uint64(1)).prod(axis=1, dtype=np.uint64) * itemsize
    return _KindColumns(itemsize, total, rows["flat"] == 1, rows["codec"] == b"raw")


def _check_sizes(file: object, catalog: ArenaCatalog, part: slice, kinds: _KindColumns) -> None:
    """Check that sizes match dtype, shape and codec."""
    kind, raw_nbytes = catalog.kind[part], catalog.raw_nbytes[part]
    if kind.max() >= len(kinds.flat):
        record = part.start + int(kind.argmax())
        raise ArenaDamagedError(file, f"record {record} has kind {kind.max()}, which is not listed")
    wrong = raw_nbytes > MAX_NBYTES
    unequal = raw_nbytes != catalog.nbytes[part]
    wrong |= unequal if kinds.all_raw else unequal & kinds.raw[kind]
    if not kinds.all_bytes:
        wrong |= raw_nbytes % kinds.itemsize[kind] != 0
    if not kinds.all_flat:
        wrong |= ~kinds.flat[kind] & (raw_nbytes != kinds.total_bytes[kind])
    if wrong.any():
        record = part.start + int(np.flatnonzero(wrong)[0])
        found = f"{catalog.nbytes[record]} stored and {catalog.raw_nbytes[record]} uncompressed bytes"
        expected = catalog.record_kind(int(catalog.kind[record]))
        raise ArenaDamagedError(file, f"record {record} has {found}, which do not match {expected}")


def _check_references(file: object, catalog: ArenaCatalog) -> None:
    """Check that units and tables refer to existing records."""
    count = len(catalog.offset)
    for name, column in catalog.fields.items():
        for begin in range(0, len(column), _CHUNK_RECORDS):
            records = column[begin : begin + _CHUNK_RECORDS]
            if records.max() >= count:
                present = records[records != ABSENT]
                if present.size and present.max() >= count:
                    raise ArenaDamagedError(file, f"field {name!r} refers to record {present.max()} of {count}")
    for name, record in catalog.tables.items():
        if not 0 <= record < count:
            raise ArenaDamagedError(file, f"table {name!r} refers to record {record} of {count}")


def check_records_used_once(file: object, catalog: ArenaCatalog) -> None:
    """Check that every record belongs to exactly one unit or table. Part of a full verification."""
    uses = np.zeros(len(catalog.offset), np.uint8)
    for column in catalog.fields.values():
        np.add.at(uses, column[column != ABSENT], 1)
    np.add.at(uses, np.fromiter(catalog.tables.values(), np.int64), 1)
    if (uses != 1).any():
        record = int(np.flatnonzero(uses != 1)[0])
        raise ArenaDamagedError(file, f"record {record} is used {uses[record]} times instead of once")


def check_keys(file: object, catalog: ArenaCatalog, check_stop: Callable[[], None]) -> None:
    """Check that keys are UTF-8 and strictly increasing bytewise. Part of a full verification."""
    previous_key = b""
    for unit in range(len(catalog.keys)):
        check_stop()
        key = catalog.keys.key_at(unit)
        if key <= previous_key:
            raise ArenaDamagedError(file, f"key {unit} ({key[:80]!r}) does not sort after the previous key")
        try:
            key.decode()
        except UnicodeDecodeError as error:
            raise ArenaDamagedError(file, f"key {unit} is not UTF-8: {key[:80]!r}") from error
        previous_key = key

"""Verifies that an arena's bytes are those that were written: every payload, and zeros in all gaps between payloads."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import xxhash

from supertuner.arena.catalog import ArenaCatalog, ArenaSegment
from supertuner.arena.catalog_checks import check_keys, check_records_used_once
from supertuner.arena.folder import INDEX_FILE, ArenaFolder, translate_os_errors
from supertuner.arena.format import PAGE, segment_name
from supertuner.arena.index import open_sealed
from supertuner.arena.mapping import map_segments
from supertuner.core.errors import ArenaDamagedError
from supertuner.core.events import ProgressPhase

_CHUNK = 1 << 20
_STOP_CHECK_EVERY = 256


class VerificationStopped(Exception):
    """Raised inside a background verification that was requested to end."""


def verify_arena(folder: ArenaFolder, phase: ProgressPhase, should_stop: Callable[[], bool]) -> None:
    """Read everything again from the files, through a separate mapping.

    Raises ArenaDamagedError for the first damage, and VerificationStopped once `should_stop` returns True.
    """
    _, catalog = open_sealed(folder)
    count = 0

    def check_stop() -> None:
        nonlocal count
        count += 1
        if count % _STOP_CHECK_EVERY == 0 and should_stop():
            raise VerificationStopped

    check_records_used_once(folder.file_path(INDEX_FILE), catalog)
    check_keys(folder.file_path(INDEX_FILE), catalog, check_stop)
    view = memoryview(map_segments(folder, catalog.segments, catalog.total_bytes)).toreadonly()
    first = 0
    for segment in catalog.segments:
        for record in range(first, first + segment.records):
            check_stop()
            check_record(folder, catalog, view, record)
            phase.advance(items=1, nbytes=int(catalog.nbytes[record]))
        check_gaps_are_zero(folder, catalog, segment, first, check_stop)
        first += segment.records


def check_record(folder: ArenaFolder, catalog: ArenaCatalog, view: memoryview, record: int) -> None:
    """Raise ArenaDamagedError unless the record's bytes in `view` match their checksum."""
    begin, nbytes = int(catalog.offset[record]), int(catalog.nbytes[record])
    if xxhash.xxh3_64_intdigest(view[begin : begin + nbytes]) != int(catalog.checksum[record]):
        segment = catalog.segment_containing(record)
        file = folder.file_path(segment_name(segment.number, "data"))
        place = f"{nbytes} bytes at {begin - segment.base}"
        raise ArenaDamagedError(file, f"the checksum of record {record} ({place}) does not match")


def check_gaps_are_zero(
    folder: ArenaFolder, catalog: ArenaCatalog, segment: ArenaSegment, first_record: int, check_stop: Callable[[], None]
) -> None:
    """Raise ArenaDamagedError unless all bytes outside the header and the records are zero. Holes are skipped, not
    read.
    """
    name = segment_name(segment.number, "data")
    records = slice(first_record, first_record + segment.records)
    begins = [*(catalog.offset[records] - segment.base).tolist(), segment.nbytes]
    sizes = [0, *catalog.nbytes[records].tolist()]
    with folder.opened(name) as fd, translate_os_errors(folder.file_path(name)):
        after = PAGE
        for begin, size in zip(begins, sizes, strict=True):
            check_stop()
            _check_zeros(folder.file_path(name), fd, after + size, begin)
            after = begin


def _check_zeros(file: object, fd: int, begin: int, end: int) -> None:
    while begin < end:
        if end - begin > PAGE or begin % PAGE == 0:
            begin = _next_stored_byte(fd, begin)
        chunk = os.pread(fd, max(0, min(end - begin, _CHUNK)), begin)
        if chunk.count(0) != len(chunk):
            at = begin + len(chunk) - len(chunk.lstrip(b"\0"))
            raise ArenaDamagedError(file, f"byte {at} lies between records and is not zero")
        begin += len(chunk) or end


def _next_stored_byte(fd: int, begin: int) -> int:
    """The first stored byte from `begin` on; the file's size if there is none."""
    try:
        return os.lseek(fd, begin, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.fstat(fd).st_size

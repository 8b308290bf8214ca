"""The segments of an unsealed arena, read from their journals; uncommitted data is truncated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from supertuner.arena import locks
from supertuner.arena.catalog import CatalogBuilder, SegmentColumns
from supertuner.arena.folder import ArenaFolder, translate_os_errors
from supertuner.arena.format import (
    JOURNAL_NBYTES,
    PAGE,
    TABLE_SEGMENT,
    UNIT_SEGMENT,
    record_end,
    round_up,
    segment_name,
)
from supertuner.arena.journal import JournalReader
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError

_CHUNK = 1 << 20


def collect_segments(folder: ArenaFolder, uuid: bytes, expected: dict[int, int]) -> CatalogBuilder:
    """Collect all committed units for sealing. Removes uncommitted tails and empty segments of dead writers.

    `expected` maps the segments of this process's writers to the number of units they committed; none may be missing.
    """
    remove_orphaned_data(folder)
    catalog_builder = CatalogBuilder(uuid)
    for number in folder.segment_numbers():
        with _lock_segment(folder, number) as locked:
            if not locked:
                file = folder.file_path(segment_name(number, "journal"))
                raise ArenaBusyError(
                    f"{file}: another process is still writing this segment; wait until it has closed its writer"
                )
            if _is_unfinished(folder, number):
                remove_segment(folder, number)
                continue
            _collect_segment(folder, catalog_builder, JournalReader(folder, number, uuid), expected.get(number))
    return catalog_builder


def restore_segments(folder: ArenaFolder, uuid: bytes) -> None:
    """Prepare an arena whose builder died for further writing: truncate everything that cannot be trusted.

    Payloads are read and checked as well: after a power failure the disk may hold a journal entry without its data.
    """
    remove_orphaned_data(folder)
    for number in folder.segment_numbers():
        with _lock_segment(folder, number) as locked:
            if locked:
                _restore_segment(folder, uuid, number)


def committed_keys(folder: ArenaFolder, uuid: bytes) -> Iterator[bytes]:
    """Keys of all units that any writer has committed so far."""
    for number in folder.segment_numbers():
        if not _is_unfinished(folder, number):
            journal = JournalReader(folder, number, uuid)
            try:
                if journal.kind == UNIT_SEGMENT:
                    yield from (entry.key for entry in journal.read_entries())
            finally:
                journal.close()


def remove_segment(folder: ArenaFolder, number: int) -> None:
    """Delete a segment, journal first: a live reader that still finds the journal also finds its data."""
    folder.unlink(segment_name(number, "journal"))
    folder.unlink(segment_name(number, "data"))


def remove_orphaned_data(folder: ArenaFolder) -> None:
    """Delete data files without a journal, which a kill during `remove_segment` leaves."""
    for number in set(folder.segment_numbers("data")) - set(folder.segment_numbers("journal")):
        folder.unlink(segment_name(number, "data"))


def sync_data_files(folder: ArenaFolder, numbers: list[int]) -> None:
    for number in numbers:
        name = segment_name(number, "data")
        fd = folder.open_file(name)
        try:
            with translate_os_errors(folder.file_path(name)):
                os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _lock_segment(folder: ArenaFolder, number: int) -> Iterator[bool]:
    """Yield whether the segment has no writer; no writer can open it inside the block."""
    fd = folder.open_file(segment_name(number, "journal"))
    try:
        yield locks.lock(fd, exclusive=True)
    finally:
        os.close(fd)


def _is_unfinished(folder: ArenaFolder, number: int) -> bool:
    """Whether its writer died, or still is, between claiming the number and finishing the headers."""
    name = segment_name(number, "journal")
    return len(folder.read(name, JOURNAL_NBYTES)) < JOURNAL_NBYTES


def _collect_segment(
    folder: ArenaFolder, catalog_builder: CatalogBuilder, journal: JournalReader, expected: int | None
) -> None:
    try:
        columns = catalog_builder.add_segment(journal.number, journal.kind)
        segment_index, count = len(catalog_builder.segments) - 1, 0
        for entry in journal.read_entries():
            catalog_builder.add(columns, segment_index, entry)
            count += 1
        if journal.has_damaged_entry() or expected not in (None, count):
            raise ArenaDamagedError(
                journal.file, f"is not readable after {count} units (byte {journal.position})", "build the arena again"
            )
        if len(columns) == 0:
            catalog_builder.segments.pop()
            remove_segment(folder, journal.number)
            return
        _cut_uncommitted_data(folder, journal, columns)
    finally:
        journal.close()


def _cut_uncommitted_data(folder: ArenaFolder, journal: JournalReader, columns: SegmentColumns) -> None:
    """Truncate the data file after the page of the last committed record."""
    end = round_up(record_end(columns.offset[-1], columns.nbytes[-1]), PAGE)
    columns.file_nbytes = end
    _truncate(folder, segment_name(journal.number, "data"), columns.offset[-1] + columns.nbytes[-1], end)


def _truncate(folder: ArenaFolder, name: str, written: int, end: int) -> None:
    """Set the length of a file to `end`; raise ArenaDamagedError if it has fewer than `written` bytes."""
    os.close(folder.open_file(name))  # raises for a link
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
    try:
        with translate_os_errors(folder.file_path(name)):
            size = os.fstat(fd).st_size
            if size < written:
                raise ArenaDamagedError(folder.file_path(name), f"has {size} bytes, although {written} were committed")
            os.ftruncate(fd, end)
    finally:
        os.close(fd)


def _restore_segment(folder: ArenaFolder, uuid: bytes, number: int) -> None:
    if _is_unfinished(folder, number):
        remove_segment(folder, number)
        return
    journal = JournalReader(folder, number, uuid)
    data = folder.open_file(segment_name(number, "data"))
    try:
        good_end, written_end = JOURNAL_NBYTES, PAGE
        for entry in journal.read_entries():
            if not all(_checksum_matches(data, f.offset, f.nbytes, f.checksum) for f in entry.fields):
                break
            good_end, written_end = entry.end, max([written_end, *(f.offset + f.nbytes for f in entry.fields)])
    finally:
        journal.close()
        os.close(data)
    if journal.kind == TABLE_SEGMENT or good_end == JOURNAL_NBYTES:
        remove_segment(folder, number)
        return
    _truncate(folder, segment_name(number, "journal"), good_end, good_end)
    _truncate(folder, segment_name(number, "data"), written_end, written_end)


def _checksum_matches(fd: int, offset: int, nbytes: int, checksum: int) -> bool:
    digest = xxhash.xxh3_64()
    for at in range(offset, offset + nbytes, _CHUNK):
        chunk = os.pread(fd, min(_CHUNK, offset + nbytes - at), at)
        if not chunk:
            return False
        digest.update(chunk)
    return digest.intdigest() == checksum

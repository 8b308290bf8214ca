"""The segments of an unsealed arena, as their journals tell them; what was not committed is cut off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from supertuner.arena import locks
from supertuner.arena.catalog import Collected, SegmentColumns
from supertuner.arena.files import Folder, naming
from supertuner.arena.format import JOURNAL_NBYTES, PAGE, TABLES, UNITS, end_of, round_up, segment_name
from supertuner.arena.journal import Journal
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError

_CHUNK = 1 << 20


def collect(folder: Folder, uuid: bytes, expected: dict[int, int]) -> Collected:
    """All committed units, for sealing. Tails and empty segments of dead writers are removed on the way.

    `expected` says how many units our own writers committed in their segments: none may have been lost since.
    """
    remove_orphans(folder)
    collected = Collected(uuid)
    for number in folder.segments():
        with _owned(folder, number) as owned:
            if not owned:
                file = folder.file(segment_name(number, "journal"))
                raise ArenaBusyError(
                    f"{file}: another process still writes this segment; wait until it has closed its writer"
                )
            if _is_void(folder, number):
                remove_segment(folder, number)
                continue
            _collect_segment(folder, collected, Journal(folder, number, uuid), expected.get(number))
    return collected


def restore(folder: Folder, uuid: bytes) -> None:
    """Make an arena whose builder died writable again: whatever cannot be trusted is cut off.

    Payloads are read and checked too: after a power cut a journal may have reached the disk before its data.
    """
    remove_orphans(folder)
    for number in folder.segments():
        with _owned(folder, number) as owned:
            if owned:
                _restore_segment(folder, uuid, number)


def committed_keys(folder: Folder, uuid: bytes) -> Iterator[bytes]:
    """Keys of all units that are committed now, by any writer."""
    for number in folder.segments():
        if not _is_void(folder, number):
            journal = Journal(folder, number, uuid)
            try:
                if journal.kind == UNITS:
                    yield from (entry.key for entry in journal.advance())
            finally:
                journal.close()


def remove_segment(folder: Folder, number: int) -> None:
    """The journal goes first: a live reader that still finds it finds its data too."""
    folder.unlink(segment_name(number, "journal"))
    folder.unlink(segment_name(number, "data"))


def remove_orphans(folder: Folder) -> None:
    """Data without a journal: a kill cut `remove_segment` short."""
    for number in set(folder.segments("data")) - set(folder.segments("journal")):
        folder.unlink(segment_name(number, "data"))


def sync_data(folder: Folder, numbers: list[int]) -> None:
    for number in numbers:
        name = segment_name(number, "data")
        fd = folder.open_file(name)
        try:
            with naming(folder.file(name)):
                os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _owned(folder: Folder, number: int) -> Iterator[bool]:
    """Whether the segment has no writer; none can take it while we look."""
    fd = folder.open_file(segment_name(number, "journal"))
    try:
        yield locks.lock(fd, exclusive=True)
    finally:
        os.close(fd)


def _is_void(folder: Folder, number: int) -> bool:
    """Whether its writer died (or still is) between claiming the number and finishing the headers."""
    name = segment_name(number, "journal")
    return len(folder.read(name, JOURNAL_NBYTES)) < JOURNAL_NBYTES


def _collect_segment(folder: Folder, collected: Collected, journal: Journal, expected: int | None) -> None:
    try:
        columns = collected.add_segment(journal.number, journal.kind)
        order, count = len(collected.segments) - 1, 0
        for entry in journal.advance():
            collected.add(columns, order, entry)
            count += 1
        if journal.is_wrong() or expected not in (None, count):
            raise ArenaDamagedError(
                journal.file, f"is unreadable after {count} units (byte {journal.position})", "build the arena again"
            )
        if len(columns) == 0:
            collected.segments.pop()
            remove_segment(folder, journal.number)
            return
        _cut(folder, journal, columns)
    finally:
        journal.close()


def _cut(folder: Folder, journal: Journal, columns: SegmentColumns) -> None:
    """End the data with the last committed record's page."""
    end = round_up(end_of(columns.offset[-1], columns.nbytes[-1]), PAGE)
    columns.nbytes_of_file = end
    _truncate(folder, segment_name(journal.number, "data"), columns.offset[-1] + columns.nbytes[-1], end)


def _truncate(folder: Folder, name: str, written: int, end: int) -> None:
    """Make a file `end` bytes long, of which at least `written` must be there."""
    os.close(folder.open_file(name))  # refuses links
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
    try:
        with naming(folder.file(name)):
            size = os.fstat(fd).st_size
            if size < written:
                raise ArenaDamagedError(folder.file(name), f"has {size} bytes where {written} were committed")
            os.ftruncate(fd, end)
    finally:
        os.close(fd)


def _restore_segment(folder: Folder, uuid: bytes, number: int) -> None:
    if _is_void(folder, number):
        remove_segment(folder, number)
        return
    journal = Journal(folder, number, uuid)
    data = folder.open_file(segment_name(number, "data"))
    try:
        good, written = JOURNAL_NBYTES, PAGE
        for entry in journal.advance():
            if not all(_holds(data, f.offset, f.nbytes, f.checksum) for f in entry.fields):
                break
            good, written = entry.end, max([written, *(f.offset + f.nbytes for f in entry.fields)])
    finally:
        journal.close()
        os.close(data)
    if journal.kind == TABLES or good == JOURNAL_NBYTES:
        remove_segment(folder, number)
        return
    _truncate(folder, segment_name(number, "journal"), good, good)
    _truncate(folder, segment_name(number, "data"), written, written)


def _holds(fd: int, offset: int, nbytes: int, checksum: int) -> bool:
    digest = xxhash.xxh3_64()
    for at in range(offset, offset + nbytes, _CHUNK):
        chunk = os.pread(fd, min(_CHUNK, offset + nbytes - at), at)
        if not chunk:
            return False
        digest.update(chunk)
    return digest.intdigest() == checksum

"""The segments of an unsealed arena, read from their journals; uncommitted data is truncated."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import xxhash

from supertuner.arena import format as fmt
from supertuner.arena import locks
from supertuner.arena.catalog import ArenaSegment, CatalogBuilder
from supertuner.arena.folder import ArenaFolder, translate_os_errors
from supertuner.arena.journal import JournalReader
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError

_CHUNK = 1 << 20


def collect_segments(folder: ArenaFolder, uuid: bytes, expected: dict[int, int]) -> CatalogBuilder:
    """Collect all committed units for sealing. Removes uncommitted tails and empty segments of dead writers.

    `expected` maps the segments of this process's writers to the number of units they committed; none may be missing.
    """
    remove_orphaned_data(folder)
    builder = CatalogBuilder(uuid)
    for number in folder.segment_numbers():
        name = fmt.segment_name(number, "journal")
        with folder.opened(name) as fd:
            if not locks.lock(fd, exclusive=True):
                problem = "another process is still writing this segment; wait until it has closed its writer"
                raise ArenaBusyError(f"{folder.file_path(name)}: {problem}")
            if _is_unfinished(folder, number):
                remove_segment(folder, number)
                continue
            with JournalReader(folder, number, uuid) as journal:
                _collect_segment(folder, builder, journal, expected.get(number))
    return builder


def restore_segments(folder: ArenaFolder, uuid: bytes) -> None:
    """Prepare an arena whose builder died for further writing: truncate everything that cannot be trusted.

    Payloads are read and checked as well: after a power failure the disk may hold a journal entry without its data.
    """
    remove_orphaned_data(folder)
    for number in folder.segment_numbers():
        with folder.opened(fmt.segment_name(number, "journal")) as fd:
            if locks.lock(fd, exclusive=True):
                _restore_segment(folder, uuid, number)


def committed_keys(folder: ArenaFolder, uuid: bytes) -> Iterator[bytes]:
    """Keys of all units that any writer has committed so far."""
    for number in folder.segment_numbers():
        if not _is_unfinished(folder, number):
            with JournalReader(folder, number, uuid) as journal:
                if journal.kind == fmt.UNIT_SEGMENT:
                    yield from (entry.key for entry in journal.read_entries())


def remove_segment(folder: ArenaFolder, number: int) -> None:
    """Delete a segment, journal first: a process that still finds the journal also finds its data."""
    folder.unlink(fmt.segment_name(number, "journal"))
    folder.unlink(fmt.segment_name(number, "data"))


def remove_orphaned_data(folder: ArenaFolder) -> None:
    """Delete data files without a journal, which a kill during `remove_segment` leaves."""
    for number in set(folder.segment_numbers("data")) - set(folder.segment_numbers("journal")):
        folder.unlink(fmt.segment_name(number, "data"))


def sync_data_files(folder: ArenaFolder, segments: Iterable[ArenaSegment]) -> None:
    for segment in segments:
        name = fmt.segment_name(segment.number, "data")
        with folder.opened(name) as fd, translate_os_errors(folder.file_path(name)):
            os.fsync(fd)


def _is_unfinished(folder: ArenaFolder, number: int) -> bool:
    """Whether its writer died, or still is, between claiming the number and finishing the headers."""
    return len(folder.read(fmt.segment_name(number, "journal"), fmt.JOURNAL_NBYTES)) < fmt.JOURNAL_NBYTES


def _collect_segment(
    folder: ArenaFolder, builder: CatalogBuilder, journal: JournalReader, expected: int | None
) -> None:
    first_record, count = len(builder.offset), 0
    for entry in journal.read_entries():
        builder.add(journal.kind, entry)
        count += 1
    if journal.has_damaged_entry() or expected not in (None, count):
        problem = f"is not readable after {count} units (byte {journal.position})"
        raise ArenaDamagedError(journal.file, problem, "build the arena again")
    records = len(builder.offset) - first_record
    if not records:
        remove_segment(folder, journal.number)
        return
    # truncate the data file after the page of the last committed record
    offset, nbytes = builder.offset[-1], builder.nbytes[-1]
    end = fmt.round_up(fmt.record_end(offset, nbytes), fmt.PAGE)
    _truncate(folder, fmt.segment_name(journal.number, "data"), offset + nbytes, end)
    builder.end_segment(journal.number, journal.kind, records, end)


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
    with JournalReader(folder, number, uuid) as journal, folder.opened(fmt.segment_name(number, "data")) as data:
        good_end, written_end = fmt.JOURNAL_NBYTES, fmt.PAGE
        for entry in journal.read_entries():
            if not all(_checksum_matches(data, f.offset, f.nbytes, f.checksum) for f in entry.fields):
                break
            good_end, written_end = entry.end, max([written_end, *(f.offset + f.nbytes for f in entry.fields)])
    if journal.kind == fmt.TABLE_SEGMENT or good_end == fmt.JOURNAL_NBYTES:
        remove_segment(folder, number)
        return
    _truncate(folder, fmt.segment_name(number, "journal"), good_end, good_end)
    _truncate(folder, fmt.segment_name(number, "data"), written_end, written_end)


def _checksum_matches(fd: int, offset: int, nbytes: int, checksum: int) -> bool:
    digest = xxhash.xxh3_64()
    for at in range(offset, offset + nbytes, _CHUNK):
        chunk = os.pread(fd, min(_CHUNK, offset + nbytes - at), at)
        if not chunk:
            return False
        digest.update(chunk)
    return digest.intdigest() == checksum

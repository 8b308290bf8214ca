"""Writers of an arena: each writes one segment and commits units one by one; an uncommitted unit leaves no trace."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack

import xxhash

from supertuner.arena import format as fmt
from supertuner.arena import locks
from supertuner.arena.folder import HEAD_FILE, INDEX_FILE, ArenaFolder, translate_os_errors
from supertuner.arena.format import RecordKind
from supertuner.arena.journal import JournalField, pack_entry, single_field_packer
from supertuner.arena.payload import Payload, as_bytes
from supertuner.core.bulk_io import BulkReader, read_all, write_all
from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import ArenaBusyError, ArenaError, BrokenMediaError

_CHUNK_BYTES = 256 << 10
"""Chunk size for reading, checksumming and writing, so that a chunk stays in the CPU cache for all three."""
_BUFFER_BYTES = 1 << 20
"""Files up to this size stay in the writer's buffer; larger ones are returned as a mapping of the written data."""
_SEAL_WAIT_S = 60.0


class SegmentWriter(CloseOnExit):
    """Writes one segment. For one thread; open one writer per thread."""

    def __init__(self, folder: ArenaFolder, uuid: bytes, kind: int) -> None:
        self._folder = folder
        self.number, self._journal, self._data = open_segment(folder, uuid, kind)
        self._data_file = folder.file_path(fmt.segment_name(self.number, "data"))
        self._journal_file = folder.file_path(fmt.segment_name(self.number, "journal"))
        self._end = fmt.PAGE
        self._journal_end = fmt.JOURNAL_NBYTES
        self._buffer = bytearray()
        self._open_unit: UnitWriter | None = None
        self.units_committed = 0

    def begin(self, key: str) -> UnitWriter:
        """Start a unit. Only one can be open: commit or abort it before the next."""
        assert self._open_unit is None, f"unit {self._open_unit.key!r} is still open"
        assert self._data >= 0, "this writer is closed"
        self._open_unit = UnitWriter(self, encoded_key(key))
        return self._open_unit

    def close(self) -> None:
        """Abort an open unit and release the segment. Committed units stay."""
        if self._data < 0:
            return
        try:
            if self._open_unit is not None:
                self._open_unit.abort()
        finally:
            os.close(self._data)
            os.close(self._journal)
            self._data = self._journal = -1

    def _write(self, content: memoryview, offset: int) -> int:
        """Write at `offset` and return the checksum of the content."""
        if len(content) <= _CHUNK_BYTES:
            with translate_os_errors(self._data_file):
                if not len(content):
                    # the file extends to every record's offset, including an empty record's
                    os.ftruncate(self._data, offset)
                write_all(self._data, content, offset)
            return xxhash.xxh3_64_intdigest(content)
        digest = xxhash.xxh3_64()
        with translate_os_errors(self._data_file):
            for at in range(0, len(content), _CHUNK_BYTES):
                digest.update(content[at : at + _CHUNK_BYTES])
                write_all(self._data, content[at : at + _CHUNK_BYTES], offset + at)
        return digest.intdigest()

    def _copy_file(self, fd: int, nbytes: int, offset: int) -> tuple[memoryview, int]:
        """Copy the first `nbytes` of a file to `offset`; return a view of them and their checksum.

        An OSError from reading passes unchanged.
        """
        if len(self._buffer) < min(nbytes, _BUFFER_BYTES):
            self._buffer = bytearray(min(fmt.round_up(nbytes, _CHUNK_BYTES), _BUFFER_BYTES))
        buffer, digest = memoryview(self._buffer), xxhash.xxh3_64()
        for at in range(0, nbytes, _CHUNK_BYTES):
            buffer_offset = at % _BUFFER_BYTES
            chunk = buffer[buffer_offset : buffer_offset + min(_CHUNK_BYTES, nbytes - at)]
            _read_exactly(fd, chunk, at, nbytes)
            digest.update(chunk)
            with translate_os_errors(self._data_file):
                write_all(self._data, chunk, offset + at)
        if not nbytes:
            return memoryview(b""), self._write(memoryview(b""), offset)
        if nbytes <= _BUFFER_BYTES:
            return buffer[:nbytes].toreadonly(), digest.intdigest()
        mapped = mmap.mmap(self._data, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
        return memoryview(mapped), digest.intdigest()

    def _append_entries(self, entries: bytes, end: int, units: int) -> None:
        """Append journal entries, all or none; `end` is where the last of their records ends."""
        if os.fstat(self._journal).st_nlink == 0:
            raise ArenaError(f"{self._folder.path}: its owner has abandoned the build; nothing can be committed")
        with translate_os_errors(self._journal_file):
            try:
                write_all(self._journal, entries, self._journal_end)
            except OSError:
                os.ftruncate(self._journal, self._journal_end)
                raise
        self._journal_end += len(entries)
        self._end = end
        self.units_committed += units

    def _discard_uncommitted(self) -> None:
        """Truncate the data file to the last commit. The freed pages read as zeros again."""
        self._open_unit = None
        with translate_os_errors(self._data_file):
            if os.fstat(self._data).st_size > self._end:
                os.ftruncate(self._data, self._end)


class UnitWriter:
    """The fields that are committed together under one key. As a context manager it commits, or aborts after an
    exception.
    """

    def __init__(self, writer: SegmentWriter, key: bytes) -> None:
        self.key = key
        self._writer = writer
        self._end = writer._end
        self._fields: list[JournalField] = []

    def put(self, field: str, payload: Payload, *, codec: str = "raw", raw_nbytes: int | None = None) -> None:
        """Add bytes, an array or a tensor. `codec`: the caller has compressed them; `raw_nbytes` is the size before
        that."""
        content, kind = as_bytes(payload)
        if codec == "raw":
            assert raw_nbytes in (None, len(content)), f"raw bytes are {len(content)}, not {raw_nbytes}"
            raw_nbytes = len(content)
        else:
            assert raw_nbytes is not None, f"a payload of codec {codec!r} needs raw_nbytes, its uncompressed size"
            kind = RecordKind("uint8", None, codec)
        offset = self._reserve_offset(field, len(content))
        checksum = self._writer._write(content, offset)
        self._add_field(field, kind, offset, len(content), raw_nbytes, checksum)

    def put_file(self, field: str, fd: int, nbytes: int) -> memoryview:
        """Add the first `nbytes` of an open file, reading it once. Returns a read-only view, valid until the next
        `put_file`.

        The view lets the caller inspect the content and abort the unit if it is unusable. Raises BrokenMediaError if
        the file is shorter than `nbytes`, the original OSError if reading fails, and ArenaError if writing fails.
        """
        offset = self._reserve_offset(field, nbytes)
        view, checksum = self._writer._copy_file(fd, nbytes, offset)
        self._add_field(field, RecordKind("uint8", None), offset, nbytes, nbytes, checksum)
        return view

    def commit(self) -> None:
        """Make the unit visible to all readers; before this call no reader sees it."""
        assert self._writer._open_unit is self, "this unit is already committed or aborted"
        entry = pack_entry(self._writer._journal_end, self.key, self._fields)
        self._writer._append_entries(entry, self._end, units=1)
        self._writer._open_unit = None

    def abort(self) -> None:
        assert self._writer._open_unit is self, "this unit is already committed or aborted"
        self._writer._discard_uncommitted()

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._writer._open_unit is not self:
            return
        if error is None:
            self.commit()
        else:
            self.abort()

    def _reserve_offset(self, field: str, nbytes: int) -> int:
        assert self._writer._open_unit is self, "this unit is already committed or aborted"
        assert 0 < len(field) <= 64, f"field {field!r} is empty or too long"
        assert all(f.name != field.encode() for f in self._fields), f"field {field!r} is already present"
        assert len(self._fields) < fmt.MAX_FIELDS
        return fmt.next_record_offset(self._end, nbytes)

    def _add_field(
        self, field: str, kind: RecordKind, offset: int, nbytes: int, raw_nbytes: int, checksum: int
    ) -> None:
        self._fields.append(JournalField(field.encode(), fmt.pack_kind(kind), offset, nbytes, raw_nbytes, checksum))
        self._end = fmt.record_end(offset, nbytes)


class BulkUnitWriter:
    """Adds many small units with one raw field to `writer`, taking the bytes from `buffer`, and commits them in groups.

    A separate unit costs two writes and a dozen Python calls. Here one call without the GIL writes all payloads of a
    group from one buffer, and a second call appends their journal entries. Each unit is still complete or absent: no
    reader sees a unit before `flush`, and a kill loses only those added since the last `flush`. Call `flush` before
    using `writer` or `buffer` in any other way.
    """

    def __init__(self, writer: SegmentWriter, field: str, buffer: BulkReader) -> None:
        self._writer = writer
        self._buffer = buffer
        self._pack_entry = single_field_packer(field.encode(), fmt.pack_kind(RecordKind("uint8", None)))
        self._entries: list[bytes] = []
        self._payloads: list[tuple[int, int, int]] = []
        self._end = writer._end
        self._journal_end = writer._journal_end

    def add(self, key: str, buffer_offset: int, nbytes: int) -> None:
        """Add a unit of `nbytes` bytes at `buffer_offset`. These bytes must not change until `flush`."""
        writer, encoded = self._writer, encoded_key(key)
        assert nbytes and writer._open_unit is None, "the payload is empty, or a unit is open"
        if not self._entries:  # the writer may have been used directly in the meantime
            self._end, self._journal_end = writer._end, writer._journal_end
        offset = fmt.next_record_offset(self._end, nbytes)
        checksum = xxhash.xxh3_64_intdigest(self._buffer.view[buffer_offset : buffer_offset + nbytes])
        entry = self._pack_entry(self._journal_end, encoded, offset, nbytes, checksum)
        self._entries.append(entry)
        self._payloads.append((buffer_offset, nbytes, offset))
        self._end = fmt.record_end(offset, nbytes)
        self._journal_end += len(entry)

    def flush(self) -> None:
        """Commit the added units: every reader sees them from here on."""
        if not self._entries:
            return
        entries, payloads = self._entries, self._payloads
        self._entries, self._payloads = [], []
        with translate_os_errors(self._writer._data_file):
            self._buffer.write(self._writer._data, *zip(*payloads, strict=True))
        self._writer._append_entries(b"".join(entries), self._end, units=len(entries))


def open_segment(folder: ArenaFolder, uuid: bytes, kind: int) -> tuple[int, int, int]:
    """Create a segment in an unsealed arena: (number, journal, data). The journal stays locked while it is open."""
    with folder.opened(HEAD_FILE) as head_fd:
        if not locks.lock(head_fd, exclusive=False, wait_s=_SEAL_WAIT_S):
            raise ArenaBusyError(f"{folder.path}: is being sealed; no further writer can be opened")
        if folder.has(INDEX_FILE):
            raise ArenaError(f"{folder.path}: is sealed; no unit can be added")
        number, journal = _claim_segment(folder)
        return number, journal, _begin_segment(folder, uuid, kind, number, journal)


def _begin_segment(folder: ArenaFolder, uuid: bytes, kind: int, number: int, journal: int) -> int:
    """Create the data file of a claimed segment. The journal's header is written last: a journal with a header has
    data.
    """
    name = fmt.segment_name(number, "data")
    with ExitStack() as stack:
        stack.callback(os.close, journal)
        locks.lock(journal, exclusive=True)
        data = folder.create(name)
        stack.callback(os.close, data)
        with translate_os_errors(folder.file_path(name)):
            write_all(data, fmt.pack_segment_header(fmt.DATA_MAGIC, uuid, number, kind), 0)
            write_all(journal, fmt.pack_segment_header(fmt.JOURNAL_MAGIC, uuid, number, kind), 0)
        stack.pop_all()
    return data


def encoded_key(key: str) -> bytes:
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise ArenaError(f"{key!r} is not a valid key: it is not Unicode text; rename the file") from error
    if not 0 < len(encoded) <= fmt.MAX_KEY_NBYTES:
        raise ArenaError(f"the key {key[:80]!r} has {len(encoded)} bytes; an arena accepts 1 to {fmt.MAX_KEY_NBYTES}")
    return encoded


def _claim_segment(folder: ArenaFolder) -> tuple[int, int]:
    """Claim the next free number by creating its journal exclusively."""
    number = max(folder.segment_numbers("journal") + folder.segment_numbers("data"), default=-1) + 1
    while True:
        try:
            return number, folder.create(fmt.segment_name(number, "journal"))
        except FileExistsError:
            number += 1


def _read_exactly(fd: int, chunk: memoryview, at: int, nbytes: int) -> None:
    count = read_all(fd, chunk, at)
    if count < len(chunk):
        raise BrokenMediaError(f"ends after {at + count} of {nbytes} bytes; it was changed while it was being read")

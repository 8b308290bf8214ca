"""Many small units through one writer: each is whole or absent like any other, but they are committed some at a time.

A unit of its own costs two writes and a dozen Python calls. Here the payloads lie together in one buffer and are
written by one call that needs no lock of the interpreter, then their journal entries by another: a reader sees none of
them before `flush`, and a kill loses those since the last one.
"""

from __future__ import annotations

import xxhash

from supertuner.arena.folder import translate_os_errors
from supertuner.arena.format import RecordKind, next_record_offset, record_end
from supertuner.arena.journal import single_field_packer
from supertuner.arena.writer import SegmentWriter, encoded_key
from supertuner.core.bulk_io import BulkReader


class BulkUnitWriter:
    """Adds units of one raw field to `writer`, from `buffer`. Flush before either is used in any other way."""

    def __init__(self, writer: SegmentWriter, field: str, buffer: BulkReader) -> None:
        self._writer = writer
        self._buffer = buffer
        self._pack_entry = single_field_packer(field.encode(), writer._packed_kind(RecordKind("uint8", None)))
        self._entries: list[bytes] = []
        self._payloads: list[tuple[int, int, int]] = []
        self._end = writer._end
        self._journal_end = writer._journal_end

    def add(self, key: str, buffer_offset: int, nbytes: int) -> None:
        """A unit of the `nbytes` at place `at` of the buffer, which must stay as they are until `flush`."""
        writer, encoded = self._writer, encoded_key(key)
        assert nbytes and writer._open_unit is None, "an empty payload, or a unit is open"
        if not self._entries:  # the writer may have been used directly since
            self._end, self._journal_end = writer._end, writer._journal_end
        offset = next_record_offset(self._end, nbytes)
        checksum = xxhash.xxh3_64_intdigest(self._buffer.view[buffer_offset : buffer_offset + nbytes])
        entry = self._pack_entry(self._journal_end, encoded, offset, nbytes, checksum)
        self._entries.append(entry)
        self._payloads.append((buffer_offset, nbytes, offset))
        self._end = record_end(offset, nbytes)
        self._journal_end += len(entry)

    def flush(self) -> None:
        """Commit what was added: from here on it is there for every reader."""
        if not self._entries:
            return
        entries, payloads = self._entries, self._payloads
        self._entries, self._payloads = [], []
        with translate_os_errors(self._writer._data_file):
            self._buffer.write(self._writer._data, *zip(*payloads, strict=True))
        self._writer._append_entries(b"".join(entries), self._end, units=len(entries))

"""Many small units through one writer: each is whole or absent like any other, but they are committed some at a time.

A unit of its own costs two writes and a dozen Python calls. Here the payloads lie together in one buffer and are
written by one call that needs no lock of the interpreter, then their journal entries by another: a reader sees none of
them before `flush`, and a kill loses those since the last one.
"""

from __future__ import annotations

import xxhash

from supertuner.arena.files import naming
from supertuner.arena.format import Kind, end_of, place
from supertuner.arena.journal import one_field_packer
from supertuner.arena.writer import Writer, encoded_key
from supertuner.core.bulk_io import BulkReader


class Bulk:
    """Adds units of one raw field to `writer`, from `buffer`. Flush before either is used in any other way."""

    def __init__(self, writer: Writer, field: str, buffer: BulkReader) -> None:
        self._writer = writer
        self._buffer = buffer
        self._pack = one_field_packer(field.encode(), writer._kind(Kind("uint8", None)))
        self._entries: list[bytes] = []
        self._pieces: list[tuple[int, int, int]] = []
        self._end = writer._end
        self._journal_end = writer._journal_end

    def add(self, key: str, at: int, nbytes: int) -> None:
        """A unit of the `nbytes` at place `at` of the buffer, which must stay as they are until `flush`."""
        writer, name = self._writer, encoded_key(key)
        assert nbytes and writer._open is None, "an empty payload, or a unit is open"
        if not self._entries:  # the writer may have been used directly since
            self._end, self._journal_end = writer._end, writer._journal_end
        offset = place(self._end, nbytes)
        checksum = xxhash.xxh3_64_intdigest(self._buffer.view[at : at + nbytes])
        entry = self._pack(self._journal_end, name, offset, nbytes, checksum)
        self._entries.append(entry)
        self._pieces.append((at, nbytes, offset))
        self._end = end_of(offset, nbytes)
        self._journal_end += len(entry)

    def flush(self) -> None:
        """Commit what was added: from here on it is there for every reader."""
        if not self._entries:
            return
        entries, pieces = self._entries, self._pieces
        self._entries, self._pieces = [], []
        with naming(self._writer._data_file):
            self._buffer.write(self._writer._data, *zip(*pieces, strict=True))
        self._writer._append(b"".join(entries), self._end, units=len(entries))

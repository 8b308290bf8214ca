"""Many small units through one writer: each is whole or absent like any other, but they are committed some at a time.

A unit of its own costs a write to the journal and a dozen Python calls. Here payloads are written as they come, and
their journal entries together: a reader sees none of them before `flush`, and a kill loses those since the last one.
"""

from __future__ import annotations

import xxhash

from supertuner.arena.files import naming, write_all
from supertuner.arena.format import Kind, end_of, place
from supertuner.arena.journal import one_field_packer
from supertuner.arena.writer import Writer, encoded_key

_FLUSH_UNITS = 256


class Bulk:
    """Adds units of one raw field to `writer`. Flush before using the writer in any other way."""

    def __init__(self, writer: Writer, field: str) -> None:
        self._writer = writer
        self._pack = one_field_packer(field.encode(), writer._kind(Kind("uint8", None)))
        self._entries: list[bytes] = []
        self._end = writer._end
        self._journal_end = writer._journal_end

    def add(self, key: str, content: memoryview) -> None:
        """Write one unit's bytes. It is committed by the next `flush`, at the latest after some more units."""
        writer, name, nbytes = self._writer, encoded_key(key), len(content)
        assert nbytes and writer._open is None, "an empty payload, or a unit is open"
        if not self._entries:  # the writer may have been used directly since
            self._end, self._journal_end = writer._end, writer._journal_end
        offset = place(self._end, nbytes)
        try:
            write_all(writer._data, content, offset)
        except OSError:
            with naming(writer._data_file):
                raise
        entry = self._pack(self._journal_end, name, offset, nbytes, xxhash.xxh3_64_intdigest(content))
        self._entries.append(entry)
        self._end = end_of(offset, nbytes)
        self._journal_end += len(entry)
        if len(self._entries) >= _FLUSH_UNITS:
            self.flush()

    def flush(self) -> None:
        """Commit what was added: from here on it is there for every reader."""
        if self._entries:
            entries, self._entries = self._entries, []
            self._writer._append(b"".join(entries), self._end, units=len(entries))

"""The journal of a segment: one checksummed entry per committed unit, appended in one write; incomplete entries are
ignored.

An entry consists of the length and checksum of its body (the checksum is seeded with the entry's position in the file)
and the body: the key and, per field, name, kind and location of the bytes. A file's length grows only after its bytes
are in place, and the data is written before the entry. A complete entry therefore refers to completely written data, on
every memory model. An entry that extends beyond the end of the file is a torn tail.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from supertuner.arena import format as fmt
from supertuner.arena.folder import ArenaFolder, translate_os_errors
from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import ArenaDamagedError

_ENTRY = struct.Struct("<QQ")
_BODY = struct.Struct("<II")
_FIELD = struct.Struct("<QQQQHH")
_CHUNK = 1 << 20
assert _ENTRY.size + _BODY.size + fmt.MAX_KEY_NBYTES + fmt.MAX_FIELDS * (_FIELD.size + fmt.KIND_NBYTES + 256) < _CHUNK


class JournalField(NamedTuple):
    """One field of a committed unit. The kind is a packed row: equal rows mean equal kinds."""

    name: bytes
    kind: bytes
    offset: int
    nbytes: int
    raw_nbytes: int
    checksum: int


class JournalEntry(NamedTuple):
    end: int
    """Where the entry ends in the journal."""
    key: bytes
    fields: list[JournalField]


def pack_entry(position: int, key: bytes, fields: Sequence[JournalField]) -> bytes:
    parts = [_BODY.pack(len(key), len(fields)), key]
    for name, kind, *numbers in fields:
        short = kind.rstrip(b"\0")
        parts += (_FIELD.pack(*numbers, len(name), len(short)), name, short)
    body = b"".join(parts)
    return _ENTRY.pack(len(body), xxhash.xxh3_64_intdigest(body, position)) + body


def single_field_packer(name: bytes, kind: bytes) -> Callable[[int, bytes, int, int, int], bytes]:
    """`pack_entry` for units with one raw field of this name and kind: the common part is packed once."""
    short = kind.rstrip(b"\0")
    tail = name + short
    body_pack, field_pack, entry_pack, digest = _BODY.pack, _FIELD.pack, _ENTRY.pack, xxhash.xxh3_64_intdigest

    def pack(position: int, key: bytes, offset: int, nbytes: int, checksum: int) -> bytes:
        numbers = field_pack(offset, nbytes, nbytes, checksum, len(name), len(short))
        body = body_pack(len(key), 1) + key + numbers + tail
        return entry_pack(len(body), digest(body, position)) + body

    return pack


def unpack_body(file: object, body: bytes) -> tuple[bytes, list[JournalField]]:
    """Unpack key and fields of a body whose checksum matches. Raises ArenaDamagedError if the content is
    inconsistent.
    """
    try:
        key_nbytes, count = _BODY.unpack_from(body)
        at = _BODY.size + key_nbytes
        key = body[_BODY.size : at]
        fields = []
        for _ in range(min(count, fmt.MAX_FIELDS)):
            *numbers, name_nbytes, kind_nbytes = _FIELD.unpack_from(body, at)
            split = at + _FIELD.size + name_nbytes
            at = split + kind_nbytes
            name, kind = body[split - name_nbytes : split], body[split:at].ljust(fmt.KIND_NBYTES, b"\0")
            fields.append(JournalField(name, kind, *numbers))
    except struct.error as error:
        raise ArenaDamagedError(file, "a journal entry is shorter than its header says") from error
    if at != len(body) or not 0 < key_nbytes <= fmt.MAX_KEY_NBYTES:
        listed = f"{count} fields and a key of {key_nbytes} bytes"
        raise ArenaDamagedError(file, f"a journal entry of {len(body)} bytes lists {listed}")
    return key, fields


class JournalReader(CloseOnExit):
    """Reads a segment's journal from the beginning up to the first incomplete entry."""

    def __init__(self, folder: ArenaFolder, number: int, uuid: bytes) -> None:
        """Raises ArenaDamagedError unless the file is the journal of this segment of this arena."""
        name = fmt.segment_name(number, "journal")
        self.number, self.file, self.position = number, folder.file_path(name), fmt.JOURNAL_NBYTES
        header = folder.read(name, fmt.JOURNAL_NBYTES)
        self.kind = fmt.check_segment_header(self.file, header, fmt.JOURNAL_MAGIC, uuid, number)
        self.fd = folder.open_file(name)

    def close(self) -> None:
        os.close(self.fd)

    def read_entries(self) -> Iterator[JournalEntry]:
        """Yield the entries after the last one returned, up to the end of the file or the first incomplete entry."""
        while True:
            chunk = self._read(_CHUNK)
            begin, previous_position = self.position, self.position
            while (entry := self._parse_entry(chunk, begin)) is not None:
                self.position = entry.end
                yield entry
            if self.position == previous_position:
                return

    def has_damaged_entry(self) -> bool:
        """Whether a full-length entry with a wrong checksum follows: that is damage, not a torn tail."""
        chunk = self._read(_ENTRY.size)
        if len(chunk) < _ENTRY.size:
            return False
        nbytes = _ENTRY.unpack(chunk)[0]
        return bool(self.position + _ENTRY.size + nbytes <= os.fstat(self.fd).st_size)

    def _read(self, nbytes: int) -> bytes:
        with translate_os_errors(self.file):
            return os.pread(self.fd, nbytes, self.position)

    def _parse_entry(self, chunk: bytes, begin: int) -> JournalEntry | None:
        offset = self.position - begin
        if len(chunk) - offset < _ENTRY.size:
            return None
        nbytes, checksum = _ENTRY.unpack_from(chunk, offset)
        body = chunk[offset + _ENTRY.size : offset + _ENTRY.size + nbytes]
        if len(body) < nbytes or xxhash.xxh3_64_intdigest(body, self.position) != checksum:
            return None
        key, fields = unpack_body(self.file, body)
        return JournalEntry(self.position + _ENTRY.size + nbytes, key, fields)

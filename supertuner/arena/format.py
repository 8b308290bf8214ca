"""Constants and fixed-size structures of the arena format. Unpacking accepts exactly the bytes that
packing produces.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import xxhash

from supertuner.core.errors import ArenaDamagedError, ArenaError

VERSION = 1
PAGE = 4096
"""Every record begins on a multiple of this many bytes."""
BIG_PAGE = 65536
"""A record of at least this many bytes begins on a multiple of it, so that hints can cover whole 64 KiB pages."""
MAX_KEY_NBYTES = 65535
MAX_DIMS = 8
MAX_FIELDS = 1024
MAX_INFO_NBYTES = 4 << 20
"""Upper bound of the index's JSON section (meta, field names, table names), checked before the section is read."""
MAX_NBYTES = 1 << 62
ABSENT = 0xFFFFFFFF
"""Index value of a unit that has no record for a field."""

HEAD_MAGIC, DATA_MAGIC, JOURNAL_MAGIC, INDEX_MAGIC = b"STARhead", b"STARdata", b"STARjrnl", b"STARindx"
HEAD_NBYTES, JOURNAL_NBYTES, INDEX_NBYTES = 128, 128, 512

UNIT_SEGMENT, TABLE_SEGMENT = 0, 1
"""What a segment holds: committed units, or tables of the whole dataset."""

ArenaLifetime: TypeAlias = Literal["until_removed", "run"] | float
"""How long a sealed arena exists: until it is removed, while a process is attached ("run"), or this many hours after
its creation.
"""

DTYPES: dict[str, tuple[int, int]] = {
    "uint8": (1, 1),
    "int8": (2, 1),
    "uint16": (3, 2),
    "int16": (4, 2),
    "uint32": (5, 4),
    "int32": (6, 4),
    "uint64": (7, 8),
    "int64": (8, 8),
    "float16": (9, 2),
    "float32": (10, 4),
    "float64": (11, 8),
    "bool": (12, 1),
    "complex64": (13, 8),
    "complex128": (14, 16),
    "bfloat16": (15, 2),
    "float8_e4m3fn": (16, 1),
    "float8_e5m2": (17, 1),
}
"""Name in numpy and torch → (code in the file, bytes of one element)."""

_DTYPE_OF_CODE = {code: name for name, (code, _) in DTYPES.items()}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_CODEC = re.compile(r"[a-z0-9_-]{1,16}")
_PRELUDE = struct.Struct("<8sII16s")
_SEGMENT = struct.Struct("<IIII")
_HEAD = struct.Struct("<dIId")
_KIND = struct.Struct("<16sBBB5x8Q")
_U64 = struct.Struct("<Q")
KIND_NBYTES = _KIND.size
_LIFETIME_CODES: tuple[str, ...] = ("until_removed", "run", "hours")


@dataclass(frozen=True, slots=True)
class RecordKind:
    """Data type, shape and codec of a record. Equal kinds are stored once."""

    dtype: str
    shape: tuple[int, ...] | None
    """None: one dimension whose length follows from the record's size."""
    codec: str = "raw"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    def raw_nbytes(self) -> int | None:
        """Bytes of such a record before compression; None where the shape is not fixed."""
        return None if self.shape is None else self.itemsize * math.prod(self.shape)

    def shape_for(self, raw_nbytes: int) -> tuple[int, ...]:
        return (raw_nbytes // self.itemsize,) if self.shape is None else self.shape


@dataclass(frozen=True, slots=True)
class ArenaHead:
    """The identity of an arena: written once, when its build begins."""

    uuid: bytes
    created: float
    """Seconds since 1970."""
    life: ArenaLifetime
    resumable: bool
    """Whether committed units survive a builder that died, until another build resumes or replaces them."""


def check_arena_name(name: str) -> str:
    """Return `name`; raise ArenaError unless it is safe as a folder name."""
    if not _NAME.fullmatch(name):
        raise ArenaError(f"{name!r} is not a valid arena name; use 1 to 128 of A-Z a-z 0-9 . _ - and no leading dot")
    return name


def segment_name(number: int, suffix: str) -> str:
    return f"{number:04d}.{suffix}"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def next_record_offset(previous_end: int, nbytes: int) -> int:
    """The offset of a record of `nbytes` that follows a record ending at `previous_end`."""
    return round_up(previous_end, BIG_PAGE if nbytes >= BIG_PAGE else PAGE)


def record_end(offset: int, nbytes: int) -> int:
    """The first byte after a record. An empty record occupies one byte, so that no two records begin at the same
    offset.
    """
    return offset + max(nbytes, 1)


def pack_header(magic: bytes, uuid: bytes, body: bytes, nbytes: int) -> bytes:
    """The header of every arena file: magic, version, uuid, `body`, zero padding, and a checksum over all of it."""
    content = (_PRELUDE.pack(magic, VERSION, 0, uuid) + body).ljust(nbytes - 8, b"\0")
    assert len(content) == nbytes - 8
    return content + _U64.pack(xxhash.xxh3_64_intdigest(content))


def unpack_header(file: object, content: bytes, magic: bytes, nbytes: int) -> tuple[bytes, bytes]:
    """Return (uuid, body) of a header; raise ArenaDamagedError if it is not valid.

    The version is checked before the checksum, because a later format may store the checksum elsewhere.
    """
    if len(content) < nbytes:
        raise ArenaDamagedError(file, f"its header is truncated: {len(content)} of {nbytes} bytes")
    found_magic, version, _, uuid = _PRELUDE.unpack_from(content)
    if found_magic != magic:
        found = f"begins with {found_magic!r} instead of {magic!r}"
        raise ArenaDamagedError(file, f"{found}; it is not an arena file, or it was overwritten")
    if version != VERSION:
        problem = f"has version {version} of the arena format; this SuperTuner reads version {VERSION}"
        remedy = "use the SuperTuner that wrote it, or remove it with `supertuner arena rm` and stage again"
        raise ArenaDamagedError(file, problem, remedy)
    if _U64.unpack_from(content, nbytes - 8)[0] != xxhash.xxh3_64_intdigest(content[: nbytes - 8]):
        raise ArenaDamagedError(file, "the checksum of its header does not match")
    return uuid, content[_PRELUDE.size : nbytes - 8]


def pack_head(head: ArenaHead) -> bytes:
    kind, hours = (head.life, 0.0) if isinstance(head.life, str) else ("hours", head.life)
    body = _HEAD.pack(head.created, _LIFETIME_CODES.index(kind), head.resumable, hours)
    return pack_header(HEAD_MAGIC, head.uuid, body, HEAD_NBYTES)


def unpack_head(file: object, content: bytes) -> ArenaHead:
    uuid, body = unpack_header(file, content, HEAD_MAGIC, HEAD_NBYTES)
    if len(content) != HEAD_NBYTES:
        raise ArenaDamagedError(file, f"is longer than {HEAD_NBYTES} bytes")
    created, kind, resumable, hours = _HEAD.unpack_from(body)
    if kind >= len(_LIFETIME_CODES) or resumable > 1 or not hours >= 0:
        raise ArenaDamagedError(file, f"has an unknown lifetime ({kind}, {resumable}, {hours})")
    life: ArenaLifetime = "until_removed" if kind == 0 else "run" if kind == 1 else float(hours)
    return ArenaHead(uuid, created, life, bool(resumable))


def pack_segment_header(magic: bytes, uuid: bytes, number: int, kind: int) -> bytes:
    """The header of a segment's data file (one page) or journal. It holds no variable content, so readers compare all
    of it.
    """
    nbytes = PAGE if magic == DATA_MAGIC else JOURNAL_NBYTES
    return pack_header(magic, uuid, _SEGMENT.pack(number, kind, PAGE, BIG_PAGE), nbytes)


def check_segment_header(file: object, content: bytes, magic: bytes, uuid: bytes, number: int) -> int:
    """Return the kind of a segment's file: UNIT_SEGMENT or TABLE_SEGMENT.

    Raises ArenaDamagedError unless the file is segment `number` of the arena `uuid`.
    """
    found_uuid, body = unpack_header(file, content, magic, PAGE if magic == DATA_MAGIC else JOURNAL_NBYTES)
    found_number, kind, page, big_page = _SEGMENT.unpack_from(body)
    if found_uuid != uuid:
        raise ArenaDamagedError(file, f"belongs to the arena {found_uuid.hex()}, not to {uuid.hex()}")
    if found_number != number:
        raise ArenaDamagedError(file, f"contains segment {found_number}, but its name says segment {number}")
    if kind not in (UNIT_SEGMENT, TABLE_SEGMENT) or (page, big_page) != (PAGE, BIG_PAGE):
        found = f"kind {kind} and pages of {page} and {big_page} bytes"
        raise ArenaDamagedError(file, f"has {found}, which this version does not know")
    return int(kind)


@lru_cache(maxsize=1024)
def pack_kind(kind: RecordKind) -> bytes:
    shape = kind.shape or ()
    assert len(shape) <= MAX_DIMS, f"{len(shape)} dimensions; an arena stores at most {MAX_DIMS}"
    assert _CODEC.fullmatch(kind.codec), f"codec {kind.codec!r}: use 1 to 16 of a-z 0-9 _ -"
    dims = tuple(shape) + (0,) * (MAX_DIMS - len(shape))
    return _KIND.pack(kind.codec.encode(), DTYPES[kind.dtype][0], len(shape), kind.shape is None, *dims)


def unpack_kind(file: object, row: bytes) -> RecordKind:
    """Unpack a kind. Accepts only the one byte sequence that `pack_kind` produces for it."""
    if len(row) != _KIND.size:
        raise ArenaDamagedError(file, f"a record kind has {len(row)} bytes instead of {_KIND.size}")
    codec, dtype, dims, flat, *shape = _KIND.unpack(row)
    text = codec.rstrip(b"\0").decode("ascii", "replace")
    if dtype not in _DTYPE_OF_CODE or dims > MAX_DIMS or not _CODEC.fullmatch(text):
        raise ArenaDamagedError(file, f"unknown record kind: dtype {dtype}, {dims} dimensions, codec {text!r}")
    kind = RecordKind(_DTYPE_OF_CODE[dtype], None if flat else tuple(shape[:dims]), text)
    if pack_kind(kind) != row or (kind.raw_nbytes() or 0) > MAX_NBYTES:
        raise ArenaDamagedError(file, f"impossible record kind: {kind}")
    return kind

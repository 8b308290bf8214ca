"""The arena format's constants and fixed-size pieces: packed, and refused if they are not exactly what was packed."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

import xxhash

from supertuner.core.errors import ArenaDamagedError, ArenaError

VERSION = 1
PAGE = 4096
"""Every record begins on a multiple of this."""
BIG_PAGE = 65536
"""A record of at least this size begins on a multiple of this, so that whole 64 KiB pages can be hinted."""
MAX_KEY_NBYTES = 65535
MAX_DIMS = 8
MAX_FIELDS = 1024
MAX_INFO_NBYTES = 4 << 20
"""Bound of the index's JSON (meta, field names, table names): read before it can be trusted."""
MAX_NBYTES = 1 << 62
ABSENT = 0xFFFFFFFF
"""In the index: this unit has no record under this field."""

HEAD_MAGIC, DATA_MAGIC, JOURNAL_MAGIC, INDEX_MAGIC = b"STARhead", b"STARdata", b"STARjrnl", b"STARindx"
HEAD_NBYTES, JOURNAL_NBYTES, INDEX_NBYTES = 128, 128, 512

UNIT_SEGMENT, TABLE_SEGMENT = 0, 1
"""What a segment holds."""

ArenaLifetime: TypeAlias = Literal["until_removed", "run"] | float
"""How long a sealed arena stays: until removed, while anyone is attached, or so many hours from its creation."""

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
    """What a record's bytes mean. Equal kinds are stored once."""

    dtype: str
    shape: tuple[int, ...] | None
    """None: one dimension, as long as the record is."""
    codec: str = "raw"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    def raw_nbytes(self) -> int | None:
        """Bytes of such a record before compression, where the kind alone says it."""
        return None if self.shape is None else self.itemsize * _product(self.shape)

    def shape_for(self, raw_nbytes: int) -> tuple[int, ...]:
        return (raw_nbytes // self.itemsize,) if self.shape is None else self.shape


@dataclass(frozen=True, slots=True)
class ArenaHead:
    """Who an arena is: written once, when its build begins."""

    uuid: bytes
    created: float
    """Seconds since 1970."""
    life: ArenaLifetime
    resumable: bool
    """Committed units outlive a builder that died, until a build resumes them or starts afresh."""


def check_arena_name(name: str) -> str:
    """`name`, if it can be a folder's name without surprises."""
    if not _NAME.fullmatch(name):
        raise ArenaError(f"{name!r} cannot name an arena: use 1 to 128 of A-Z a-z 0-9 . _ - and no dot in front")
    return name


def check_codec(codec: str) -> str:
    assert _CODEC.fullmatch(codec), f"codec {codec!r}: use 1 to 16 of a-z 0-9 _ -"
    return codec


def segment_name(number: int, suffix: str) -> str:
    return f"{number:04d}.{suffix}"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def next_record_offset(previous_end: int, nbytes: int) -> int:
    """Where a record of `nbytes` goes that follows one ending at `end`."""
    return round_up(previous_end, BIG_PAGE if nbytes >= BIG_PAGE else PAGE)


def record_end(offset: int, nbytes: int) -> int:
    """First byte after a record. An empty one still takes an address: no two records begin at the same place."""
    return offset + max(nbytes, 1)


def pack_header(magic: bytes, uuid: bytes, body: bytes, nbytes: int) -> bytes:
    """The opening of every file of an arena: magic, version, uuid, `body`, zeros, and a checksum over all of it."""
    content = (_PRELUDE.pack(magic, VERSION, 0, uuid) + body).ljust(nbytes - 8, b"\0")
    assert len(content) == nbytes - 8
    return content + _U64.pack(xxhash.xxh3_64_intdigest(content))


def unpack_header(file: object, content: bytes, magic: bytes, nbytes: int) -> tuple[bytes, bytes]:
    """(uuid, body) of a header. The version is looked at before the checksum: a later format may lay that elsewhere."""
    if len(content) < nbytes:
        raise ArenaDamagedError(file, f"its header is cut short: {len(content)} of {nbytes} bytes")
    found_magic, version, _, uuid = _PRELUDE.unpack_from(content)
    if found_magic != magic:
        raise ArenaDamagedError(
            file, f"begins with {found_magic!r}, not with {magic!r}: not a file of an arena, or overwritten"
        )
    if version != VERSION:
        raise ArenaDamagedError(
            file,
            f"has version {version} of the arena format, this SuperTuner reads version {VERSION}",
            "use the SuperTuner that wrote it, or remove it with `supertuner arena rm` and stage again",
        )
    if _U64.unpack_from(content, nbytes - 8)[0] != xxhash.xxh3_64_intdigest(content[: nbytes - 8]):
        raise ArenaDamagedError(file, "its header's checksum does not hold")
    return uuid, content[_PRELUDE.size : nbytes - 8]


def pack_head(head: ArenaHead) -> bytes:
    life = head.life
    kind = _LIFETIME_CODES.index(life) if isinstance(life, str) else _LIFETIME_CODES.index("hours")
    body = _HEAD.pack(head.created, kind, head.resumable, 0.0 if isinstance(life, str) else life)
    return pack_header(HEAD_MAGIC, head.uuid, body, HEAD_NBYTES)


def unpack_head(file: object, content: bytes) -> ArenaHead:
    uuid, body = unpack_header(file, content, HEAD_MAGIC, HEAD_NBYTES)
    if len(content) != HEAD_NBYTES:
        raise ArenaDamagedError(file, f"is longer than its {HEAD_NBYTES} bytes")
    created, kind, resumable, hours = _HEAD.unpack_from(body)
    if kind >= len(_LIFETIME_CODES) or resumable > 1 or not hours >= 0:
        raise ArenaDamagedError(file, f"states an unknown life ({kind}, {resumable}, {hours})")
    life: ArenaLifetime = "until_removed" if kind == 0 else "run" if kind == 1 else float(hours)
    return ArenaHead(uuid, created, life, bool(resumable))


def pack_segment_header(magic: bytes, uuid: bytes, number: int, kind: int) -> bytes:
    """The header of a segment's data (one page) or journal. It holds nothing else, so readers compare it as a whole."""
    nbytes = PAGE if magic == DATA_MAGIC else JOURNAL_NBYTES
    return pack_header(magic, uuid, _SEGMENT.pack(number, kind, PAGE, BIG_PAGE), nbytes)


def check_segment_header(file: object, content: bytes, magic: bytes, uuid: bytes, number: int) -> int:
    """The kind (UNITS or TABLES) of a segment's file, which must be segment `number` of the arena `uuid`."""
    found_uuid, body = unpack_header(file, content, magic, PAGE if magic == DATA_MAGIC else JOURNAL_NBYTES)
    found_number, kind, page, big_page = _SEGMENT.unpack_from(body)
    if found_uuid != uuid:
        raise ArenaDamagedError(file, f"belongs to the arena {found_uuid.hex()}, not to {uuid.hex()}")
    if found_number != number:
        raise ArenaDamagedError(file, f"is segment {found_number} under the name of segment {number}")
    if kind not in (UNIT_SEGMENT, TABLE_SEGMENT) or (page, big_page) != (PAGE, BIG_PAGE):
        raise ArenaDamagedError(file, f"states kind {kind} and pages of {page} and {big_page} bytes")
    return int(kind)


def pack_kind(kind: RecordKind) -> bytes:
    shape = kind.shape or ()
    assert len(shape) <= MAX_DIMS, f"{len(shape)} dimensions; an arena stores at most {MAX_DIMS}"
    flat = kind.shape is None
    dims = tuple(shape) + (0,) * (MAX_DIMS - len(shape))
    return _KIND.pack(check_codec(kind.codec).encode(), DTYPES[kind.dtype][0], len(shape), flat, *dims)


def unpack_kind(file: object, row: bytes) -> RecordKind:
    """A kind from its row. Only the one canonical spelling is accepted."""
    if len(row) != _KIND.size:
        raise ArenaDamagedError(file, f"a record's kind has {len(row)} bytes, not {_KIND.size}")
    codec, dtype, dims, flat, *shape = _KIND.unpack(row)
    text = codec.rstrip(b"\0").decode("ascii", "replace")
    if dtype not in _DTYPE_OF_CODE or dims > MAX_DIMS or not _CODEC.fullmatch(text):
        raise ArenaDamagedError(file, f"a record's kind is unknown: dtype {dtype}, {dims} dimensions, codec {text!r}")
    kind = RecordKind(_DTYPE_OF_CODE[dtype], None if flat else tuple(shape[:dims]), text)
    if pack_kind(kind) != row or (kind.raw_nbytes() or 0) > MAX_NBYTES:
        raise ArenaDamagedError(file, f"a record's kind is not a possible one: {kind}")
    return kind


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for side in shape:
        result *= side
    return result

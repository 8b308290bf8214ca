"""Size, orientation and completeness of a PNG from its chunks, without decoding."""

from __future__ import annotations

import struct

from supertuner.core.errors import BrokenMedia
from supertuner.data.probe.exif import orientation
from supertuner.data.probe.facts import Facts, picture

_CHUNK = struct.Struct(">I4s")
_SIZE = struct.Struct(">II")
_SIGNATURE_BYTES = 8
_MAX_CHUNKS = 1_000_000


def facts(payload: memoryview) -> Facts:
    """Facts of a whole PNG file; BrokenMedia says what is wrong with it."""
    if len(payload) < 33 or bytes(payload[12:16]) != b"IHDR":
        raise BrokenMedia("truncated: ends inside the PNG header" if len(payload) < 33 else "a PNG without a header")
    width, height = _SIZE.unpack_from(payload, 16)
    return picture("png", width, height, _walk(payload))


def _walk(payload: memoryview) -> int:
    """Follow the chunks to the end; the orientation found on the way."""
    at, turn, pictures, unpack, total = _SIGNATURE_BYTES, 1, 0, _CHUNK.unpack_from, len(payload)
    for _ in range(_MAX_CHUNKS):
        if at + 12 > total:
            raise BrokenMedia(f"truncated: a PNG of at least {at + 12} bytes has {total}")
        length, name = unpack(payload, at)
        if name == b"IDAT":
            pictures += 1
        elif name == b"eXIf":
            turn = orientation(payload[at + 8 : at + 8 + length])
        elif name == b"IEND":
            if not pictures:
                raise BrokenMedia("a PNG without a picture")
            return turn
        at += 12 + length
    raise BrokenMedia(f"a PNG of more than {_MAX_CHUNKS} chunks")

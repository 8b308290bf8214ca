"""Size, orientation and completeness of a PNG from its chunks, without decoding."""

from __future__ import annotations

import struct

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.exif import exif_orientation
from supertuner.data.probe.media_info import MediaInfo, image_info

_CHUNK = struct.Struct(">I4s")
_IHDR_SIZE = struct.Struct(">II")
_SIGNATURE_BYTES = 8
_MAX_CHUNKS = 1_000_000


def probe_png(payload: memoryview) -> MediaInfo:
    """Facts of a whole PNG file; BrokenMedia says what is wrong with it."""
    if len(payload) < 33 or bytes(payload[12:16]) != b"IHDR":
        raise BrokenMediaError(
            "truncated: ends inside the PNG header" if len(payload) < 33 else "a PNG without a header"
        )
    width, height = _IHDR_SIZE.unpack_from(payload, 16)
    return image_info("png", width, height, _walk_chunks(payload))


def _walk_chunks(payload: memoryview) -> int:
    """Follow the chunks to the end; the orientation found on the way."""
    at, orientation, data_chunks, unpack, total = _SIGNATURE_BYTES, 1, 0, _CHUNK.unpack_from, len(payload)
    for _ in range(_MAX_CHUNKS):
        if at + 12 > total:
            raise BrokenMediaError(f"truncated: a PNG of at least {at + 12} bytes has {total}")
        length, name = unpack(payload, at)
        if name == b"IDAT":
            data_chunks += 1
        elif name == b"eXIf":
            orientation = exif_orientation(payload[at + 8 : at + 8 + length])
        elif name == b"IEND":
            if not data_chunks:
                raise BrokenMediaError("a PNG without a picture")
            return orientation
        at += 12 + length
    raise BrokenMediaError(f"a PNG of more than {_MAX_CHUNKS} chunks")

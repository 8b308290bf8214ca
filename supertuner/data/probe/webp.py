"""Size, orientation and completeness of a WebP from its chunks, without decoding."""

from __future__ import annotations

import struct

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.exif import exif_orientation
from supertuner.data.probe.media_info import MediaInfo, image_info

_CHUNK = struct.Struct("<4sI")
_RIFF_HEADER_BYTES = 12
_MAX_CHUNKS = 100_000


def probe_webp(payload: memoryview) -> MediaInfo:
    """Facts of a whole WebP file; BrokenMedia says what is wrong with it."""
    stated_bytes = int.from_bytes(payload[4:8], "little") + 8
    if len(payload) < stated_bytes:
        raise BrokenMediaError(f"truncated: a WebP of {stated_bytes} bytes has {len(payload)}")
    width = height = image_chunks = 0
    orientation = 1
    for name, body in _chunks(payload[:stated_bytes]):
        if name == b"VP8X" and len(body) >= 10:
            width = 1 + int.from_bytes(body[4:7], "little")
            height = 1 + int.from_bytes(body[7:10], "little")
        elif name in (b"VP8 ", b"VP8L"):
            image_chunks += 1
            if not width:
                width, height = _lossy_size(body) if name == b"VP8 " else _lossless_size(body)
        elif name == b"ANMF":
            image_chunks += 1
        elif name == b"EXIF":
            orientation = exif_orientation(body[6:] if bytes(body[:6]) == b"Exif\0\0" else body)
    if not image_chunks:
        raise BrokenMediaError("a WebP without a picture")
    return image_info("webp", width, height, orientation)


def _chunks(payload: memoryview) -> list[tuple[bytes, memoryview]]:
    chunks = []
    at = _RIFF_HEADER_BYTES
    while at + 8 <= len(payload):
        name, length = _CHUNK.unpack_from(payload, at)
        if at + 8 + length > len(payload):
            raise BrokenMediaError(f"truncated: chunk {name!r} of a WebP runs past its end")
        chunks.append((name, payload[at + 8 : at + 8 + length]))
        if len(chunks) > _MAX_CHUNKS:
            raise BrokenMediaError(f"a WebP of more than {_MAX_CHUNKS} chunks")
        at += 8 + length + (length & 1)
    return chunks


def _lossy_size(body: memoryview) -> tuple[int, int]:
    if len(body) < 10 or bytes(body[3:6]) != b"\x9d\x01\x2a":
        raise BrokenMediaError("a WebP whose picture has no start code")
    width, height = struct.unpack_from("<HH", body, 6)
    return width & 0x3FFF, height & 0x3FFF


def _lossless_size(body: memoryview) -> tuple[int, int]:
    if len(body) < 5 or body[0] != 0x2F:
        raise BrokenMediaError("a WebP whose lossless picture has no signature")
    bits = int.from_bytes(body[1:5], "little")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1

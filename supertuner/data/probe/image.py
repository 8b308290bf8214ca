"""Size, orientation and completeness of JPEG, PNG and WebP files, read from their headers without decoding."""

from __future__ import annotations

import struct

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.media_info import MediaInfo, image_info

JPEG_HEAD_BYTES = 4096
"""Enough for the headers of most JPEG files. Indexing `bytes` is faster than indexing a memoryview."""

_MARKER = struct.Struct(">HH")
"""A JPEG marker and the length of its segment."""
_SOS, _EOI, _APP1 = 0xFFDA, 0xFFD9, 0xFFE1
_FRAME_MARKERS = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
_STANDALONE_MARKERS = frozenset((0xFF01, *range(0xFFD0, 0xFFD9)))
_HANDLED_MARKERS = _FRAME_MARKERS | _STANDALONE_MARKERS | {_SOS, _EOI, _APP1, 0xFFFF}
"""Markers that `_jpeg_header` does not simply skip."""
_MAX_JPEG_SEGMENTS = 4096

_PNG_CHUNK = struct.Struct(">I4s")
_PNG_SIZE = struct.Struct(">II")
_PNG_SIGNATURE_BYTES = 8
_MAX_PNG_CHUNKS = 1_000_000

_WEBP_CHUNK = struct.Struct("<4sI")
_RIFF_HEADER_BYTES = 12
_MAX_WEBP_CHUNKS = 100_000

_ORIENTATION_TAG = 0x0112
_EXIF_SHORT = 3
_EXIF_ENTRY_BYTES = 12


def probe_jpeg(payload: memoryview, head: bytes) -> MediaInfo:
    """Metadata of a complete JPEG file whose first bytes are `head`. Raises BrokenMediaError if it is not complete."""
    try:
        width, height, orientation, scan_begin = _jpeg_header(head)
    except struct.error:  # its EXIF block, colour profile or thumbnail does not fit into JPEG_HEAD_BYTES
        try:
            width, height, orientation, scan_begin = _jpeg_header(payload)
        except struct.error:
            raise BrokenMediaError("truncated: ends inside the JPEG header") from None
    if not _has_end_marker(payload, scan_begin):
        raise BrokenMediaError("truncated: a JPEG without its end marker")
    return image_info("jpeg", width, height, orientation)


def probe_png(payload: memoryview) -> MediaInfo:
    """Metadata of a complete PNG file. Raises BrokenMediaError if it is not complete."""
    if len(payload) < 33:
        raise BrokenMediaError("truncated: ends inside the PNG header")
    if bytes(payload[12:16]) != b"IHDR":
        raise BrokenMediaError("a PNG without a header")
    width, height = _PNG_SIZE.unpack_from(payload, 16)
    return image_info("png", width, height, _walk_png_chunks(payload))


def probe_webp(payload: memoryview) -> MediaInfo:
    """Metadata of a complete WebP file. Raises BrokenMediaError if it is not complete."""
    stated_bytes = int.from_bytes(payload[4:8], "little") + 8
    if len(payload) < stated_bytes:
        raise BrokenMediaError(f"truncated: the header of the WebP states {stated_bytes} bytes, it has {len(payload)}")
    width = height = image_chunks = 0
    orientation = 1
    for name, body in _webp_chunks(payload[:stated_bytes]):
        if name == b"VP8X" and len(body) >= 10:
            width = 1 + int.from_bytes(body[4:7], "little")
            height = 1 + int.from_bytes(body[7:10], "little")
        elif name in (b"VP8 ", b"VP8L"):
            image_chunks += 1
            if not width:
                width, height = _lossy_webp_size(body) if name == b"VP8 " else _lossless_webp_size(body)
        elif name == b"ANMF":
            image_chunks += 1
        elif name == b"EXIF":
            orientation = exif_orientation(body[6:] if bytes(body[:6]) == b"Exif\0\0" else body)
    if not image_chunks:
        raise BrokenMediaError("a WebP without an image")
    return image_info("webp", width, height, orientation)


def exif_orientation(tiff: memoryview | bytes) -> int:
    """EXIF orientation, 1 to 8, of a TIFF-structured block (without the leading `Exif\\0\\0`).

    A malformed block counts as 1 (display as stored), as in image viewers. Never raises.
    """
    if len(tiff) < 14:
        return 1
    byte_order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(tiff[:4]))
    if byte_order is None:
        return 1
    (start,) = struct.unpack_from(byte_order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(byte_order + "H", tiff, start)
    first = start + 2
    count = min(count, (len(tiff) - first) // _EXIF_ENTRY_BYTES)
    tags = struct.iter_unpack(byte_order + "HHIHH", tiff[first : first + count * _EXIF_ENTRY_BYTES])
    for tag, kind, _, value, _ in tags:
        if tag == _ORIENTATION_TAG:
            return value if kind == _EXIF_SHORT and 1 <= value <= 8 else 1
    return 1


def _jpeg_header(payload: bytes | memoryview) -> tuple[int, int, int, int]:
    """Stored width and height, orientation, and offset of the scan. Raises struct.error if `payload` is too short."""
    width = height = 0
    orientation, at, unpack = 1, 2, _MARKER.unpack_from
    for _ in range(_MAX_JPEG_SEGMENTS):
        marker, length = unpack(payload, at)
        if marker not in _HANDLED_MARKERS:
            if marker < 0xFF00:
                raise BrokenMediaError(f"damaged JPEG header: no marker at byte {at}")
        elif marker == _SOS:
            return width, height, orientation, at + 2 + length
        elif marker in _FRAME_MARKERS:
            width, height = _jpeg_frame_size(payload, at, marker)
        elif marker == _APP1:
            if orientation == 1:
                orientation = _app1_orientation(payload, at, length)
        elif marker == _EOI:
            raise BrokenMediaError("a JPEG without an image")
        else:  # a marker without a segment, or a fill byte
            at += 2 if marker in _STANDALONE_MARKERS else 1
            continue
        at += 2 + length
    raise BrokenMediaError(f"damaged JPEG header: no image within {_MAX_JPEG_SEGMENTS} markers")


def _app1_orientation(payload: bytes | memoryview, at: int, length: int) -> int:
    """Orientation in an APP1 segment if that contains EXIF. Raises struct.error if the segment is cut off."""
    if bytes(payload[at + 4 : at + 10]) != b"Exif\0\0":
        return 1
    if at + 2 + length > len(payload):
        raise struct.error
    return exif_orientation(payload[at + 10 : at + 2 + length])


def _jpeg_frame_size(payload: bytes | memoryview, at: int, marker: int) -> tuple[int, int]:
    bits, height, width = struct.unpack_from(">BHH", payload, at + 4)
    if bits != 8 or marker == 0xFFC3:
        raise BrokenMediaError(f"a {bits}-bit{' lossless' if marker == 0xFFC3 else ''} JPEG; save it with 8 bits")
    return width, height


def _has_end_marker(payload: memoryview, scan_begin: int) -> bool:
    """Whether the end marker follows the scan. Cameras append padding and second images after it."""
    if len(payload) >= scan_begin + 2 and payload[-1] == 0xD9 and payload[-2] == 0xFF:
        return True
    return bytes(payload[scan_begin:]).rfind(b"\xff\xd9") >= 0  # 0xFF inside compressed data is never followed by 0xD9


def _walk_png_chunks(payload: memoryview) -> int:
    """Follow the chunks to the end of the file; returns the orientation."""
    at, orientation, data_chunks, unpack, total = _PNG_SIGNATURE_BYTES, 1, 0, _PNG_CHUNK.unpack_from, len(payload)
    for _ in range(_MAX_PNG_CHUNKS):
        if at + 12 > total:
            raise BrokenMediaError(f"truncated: the PNG needs at least {at + 12} bytes, it has {total}")
        length, name = unpack(payload, at)
        if name == b"IDAT":
            data_chunks += 1
        elif name == b"eXIf":
            orientation = exif_orientation(payload[at + 8 : at + 8 + length])
        elif name == b"IEND":
            if not data_chunks:
                raise BrokenMediaError("a PNG without an image")
            return orientation
        at += 12 + length
    raise BrokenMediaError(f"a PNG of more than {_MAX_PNG_CHUNKS} chunks")


def _webp_chunks(payload: memoryview) -> list[tuple[bytes, memoryview]]:
    chunks = []
    at = _RIFF_HEADER_BYTES
    while at + 8 <= len(payload):
        name, length = _WEBP_CHUNK.unpack_from(payload, at)
        if at + 8 + length > len(payload):
            raise BrokenMediaError(f"truncated: chunk {name!r} of a WebP runs past its end")
        chunks.append((name, payload[at + 8 : at + 8 + length]))
        if len(chunks) > _MAX_WEBP_CHUNKS:
            raise BrokenMediaError(f"a WebP of more than {_MAX_WEBP_CHUNKS} chunks")
        at += 8 + length + (length & 1)
    return chunks


def _lossy_webp_size(body: memoryview) -> tuple[int, int]:
    if len(body) < 10 or bytes(body[3:6]) != b"\x9d\x01\x2a":
        raise BrokenMediaError("a WebP whose image has no start code")
    width, height = struct.unpack_from("<HH", body, 6)
    return width & 0x3FFF, height & 0x3FFF


def _lossless_webp_size(body: memoryview) -> tuple[int, int]:
    if len(body) < 5 or body[0] != 0x2F:
        raise BrokenMediaError("a WebP whose lossless image has no signature")
    bits = int.from_bytes(body[1:5], "little")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1

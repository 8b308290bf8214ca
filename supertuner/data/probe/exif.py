"""The orientation inside an EXIF block; anything malformed means 'as stored', as viewers do. Never raises."""

from __future__ import annotations

import struct

_ORIENTATION_TAG = 0x0112
_SHORT_TYPE = 3
_ENTRY_BYTES = 12


def exif_orientation(tiff: memoryview | bytes) -> int:
    """EXIF orientation 1 to 8 of a TIFF-structured block (without the `Exif\\0\\0` in front)."""
    if len(tiff) < 14:
        return 1
    byte_order_mark = bytes(tiff[:4])
    if byte_order_mark == b"II*\0":
        byte_order = "<"
    elif byte_order_mark == b"MM\0*":
        byte_order = ">"
    else:
        return 1
    (start,) = struct.unpack_from(byte_order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(byte_order + "H", tiff, start)
    first = start + 2
    count = min(count, (len(tiff) - first) // _ENTRY_BYTES)
    tags = struct.iter_unpack(byte_order + "HHIHH", tiff[first : first + count * _ENTRY_BYTES])
    for tag, kind, _, value, _ in tags:
        if tag == _ORIENTATION_TAG:
            return value if kind == _SHORT_TYPE and 1 <= value <= 8 else 1
    return 1

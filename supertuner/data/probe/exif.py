"""The orientation inside an EXIF block; anything malformed means 'as stored', as viewers do. Never raises."""

from __future__ import annotations

import struct

_ORIENTATION = 0x0112
_SHORT = 3
_ENTRY = 12


def orientation(tiff: memoryview | bytes) -> int:
    """EXIF orientation 1 to 8 of a TIFF-structured block (without the `Exif\\0\\0` in front)."""
    if len(tiff) < 14:
        return 1
    mark = bytes(tiff[:4])
    if mark == b"II*\0":
        order = "<"
    elif mark == b"MM\0*":
        order = ">"
    else:
        return 1
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(order + "H", tiff, start)
    first = start + 2
    count = min(count, (len(tiff) - first) // _ENTRY)
    tags = struct.iter_unpack(order + "HHIHH", tiff[first : first + count * _ENTRY])
    for tag, kind, _, value, _ in tags:
        if tag == _ORIENTATION:
            return value if kind == _SHORT and 1 <= value <= 8 else 1
    return 1

"""Size, orientation and completeness of a JPEG from its markers, without decoding."""

from __future__ import annotations

import struct

from supertuner.core.errors import BrokenMedia
from supertuner.data.probe.exif import orientation
from supertuner.data.probe.facts import Facts, picture

_MARK = struct.Struct(">HH")
"""A marker and the length of its segment."""
_SOS, _EOI, _APP1 = 0xFFDA, 0xFFD9, 0xFFE1
_FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
_ALONE = frozenset((0xFF01, *range(0xFFD0, 0xFFD9)))
_ODD = _FRAMES | _ALONE | {_SOS, _EOI, _APP1, 0xFFFF}
"""Markers that need more than being passed over."""
_MAX_SEGMENTS = 4096
HEAD_BYTES = 4096
"""Enough for the headers of most files; bytes are quicker to look into than a view."""


def facts(payload: memoryview, head: bytes) -> Facts:
    """Facts of a whole JPEG file that begins with `head`; BrokenMedia says what is wrong with it."""
    try:
        width, height, turn, scan = _header(head)
    except struct.error:
        width, height, turn, scan = _long_header(payload)
    if not _ends(payload, scan):
        raise BrokenMedia("truncated: a JPEG without its end marker")
    return picture("jpeg", width, height, turn)


def _long_header(payload: memoryview) -> tuple[int, int, int, int]:
    """The header of a file whose EXIF, colour profile or thumbnail reaches beyond the first bytes."""
    try:
        return _header(payload)
    except struct.error:
        raise BrokenMedia("truncated: ends inside the JPEG header") from None


def _header(payload: bytes | memoryview) -> tuple[int, int, int, int]:
    """Stored width and height, orientation, and where the picture begins; struct.error if that is not all here."""
    width = height = 0
    turn, at, unpack = 1, 2, _MARK.unpack_from
    for _ in range(_MAX_SEGMENTS):
        mark, length = unpack(payload, at)
        if mark not in _ODD:
            if mark < 0xFF00:
                raise BrokenMedia(f"damaged JPEG header: no marker at byte {at}")
        elif mark == _SOS:
            return width, height, turn, at + 2 + length
        elif mark in _FRAMES:
            width, height = _frame(payload, at, mark)
        elif mark == _APP1:
            if turn == 1:
                turn = _turn(payload, at, length)
        elif mark == _EOI:
            raise BrokenMedia("a JPEG without a picture")
        else:  # a marker without a segment, or a byte of filling
            at += 2 if mark in _ALONE else 1
            continue
        at += 2 + length
    raise BrokenMedia(f"damaged JPEG header: more than {_MAX_SEGMENTS} segments")


def _turn(payload: bytes | memoryview, at: int, length: int) -> int:
    """Orientation in an APP1 segment, if that is EXIF; it must be here as a whole."""
    if bytes(payload[at + 4 : at + 10]) != b"Exif\0\0":
        return 1
    if at + 2 + length > len(payload):
        raise struct.error
    return orientation(payload[at + 10 : at + 2 + length])


def _frame(payload: bytes | memoryview, at: int, mark: int) -> tuple[int, int]:
    bits, height, width = struct.unpack_from(">BHH", payload, at + 4)
    if bits != 8 or mark == 0xFFC3:
        raise BrokenMedia(f"a {bits}-bit{' lossless' if mark == 0xFFC3 else ''} JPEG; save it with 8 bits")
    return width, height


def _ends(payload: memoryview, scan: int) -> bool:
    """Whether the end marker follows the scan. Cameras append padding and second pictures after it."""
    if len(payload) >= scan + 2 and payload[-1] == 0xD9 and payload[-2] == 0xFF:
        return True
    return bytes(payload[scan:]).rfind(b"\xff\xd9") >= 0  # 0xFF inside compressed data is never followed by 0xD9

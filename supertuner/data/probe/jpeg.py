"""Size, orientation and completeness of a JPEG from its markers, without decoding."""

from __future__ import annotations

import struct

from supertuner.core.errors import BrokenMediaError
from supertuner.data.probe.exif import exif_orientation
from supertuner.data.probe.media_info import MediaInfo, image_info

_MARKER = struct.Struct(">HH")
"""A marker and the length of its segment."""
_SOS, _EOI, _APP1 = 0xFFDA, 0xFFD9, 0xFFE1
_FRAME_MARKERS = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
_STANDALONE_MARKERS = frozenset((0xFF01, *range(0xFFD0, 0xFFD9)))
_HANDLED_MARKERS = _FRAME_MARKERS | _STANDALONE_MARKERS | {_SOS, _EOI, _APP1, 0xFFFF}
"""Markers that need more than being passed over."""
_MAX_SEGMENTS = 4096
HEAD_BYTES = 4096
"""Enough for the headers of most files; bytes are quicker to look into than a view."""


def probe_jpeg(payload: memoryview, head: bytes) -> MediaInfo:
    """Facts of a whole JPEG file that begins with `head`; BrokenMedia says what is wrong with it."""
    try:
        width, height, orientation, scan_begin = _header(head)
    except struct.error:
        width, height, orientation, scan_begin = _full_header(payload)
    if not _has_end_marker(payload, scan_begin):
        raise BrokenMediaError("truncated: a JPEG without its end marker")
    return image_info("jpeg", width, height, orientation)


def _full_header(payload: memoryview) -> tuple[int, int, int, int]:
    """The header of a file whose EXIF, colour profile or thumbnail reaches beyond the first bytes."""
    try:
        return _header(payload)
    except struct.error:
        raise BrokenMediaError("truncated: ends inside the JPEG header") from None


def _header(payload: bytes | memoryview) -> tuple[int, int, int, int]:
    """Stored width and height, orientation, and where the picture begins; struct.error if that is not all here."""
    width = height = 0
    orientation, at, unpack = 1, 2, _MARKER.unpack_from
    for _ in range(_MAX_SEGMENTS):
        marker, length = unpack(payload, at)
        if marker not in _HANDLED_MARKERS:
            if marker < 0xFF00:
                raise BrokenMediaError(f"damaged JPEG header: no marker at byte {at}")
        elif marker == _SOS:
            return width, height, orientation, at + 2 + length
        elif marker in _FRAME_MARKERS:
            width, height = _frame_size(payload, at, marker)
        elif marker == _APP1:
            if orientation == 1:
                orientation = _segment_orientation(payload, at, length)
        elif marker == _EOI:
            raise BrokenMediaError("a JPEG without a picture")
        else:  # a marker without a segment, or a byte of filling
            at += 2 if marker in _STANDALONE_MARKERS else 1
            continue
        at += 2 + length
    raise BrokenMediaError(f"damaged JPEG header: more than {_MAX_SEGMENTS} segments")


def _segment_orientation(payload: bytes | memoryview, at: int, length: int) -> int:
    """Orientation in an APP1 segment, if that is EXIF; it must be here as a whole."""
    if bytes(payload[at + 4 : at + 10]) != b"Exif\0\0":
        return 1
    if at + 2 + length > len(payload):
        raise struct.error
    return exif_orientation(payload[at + 10 : at + 2 + length])


def _frame_size(payload: bytes | memoryview, at: int, marker: int) -> tuple[int, int]:
    bits, height, width = struct.unpack_from(">BHH", payload, at + 4)
    if bits != 8 or marker == 0xFFC3:
        raise BrokenMediaError(f"a {bits}-bit{' lossless' if marker == 0xFFC3 else ''} JPEG; save it with 8 bits")
    return width, height


def _has_end_marker(payload: memoryview, scan_begin: int) -> bool:
    """Whether the end marker follows the scan. Cameras append padding and second pictures after it."""
    if len(payload) >= scan_begin + 2 and payload[-1] == 0xD9 and payload[-2] == 0xFF:
        return True
    return bytes(payload[scan_begin:]).rfind(b"\xff\xd9") >= 0  # 0xFF inside compressed data is never followed by 0xD9

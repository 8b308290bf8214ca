"""Size, orientation and completeness of a JPEG from its markers, without decoding."""

from __future__ import annotations

from supertuner.core.errors import BrokenMedia
from supertuner.data.probe.exif import orientation
from supertuner.data.probe.facts import Facts, picture

_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SOS, _EOI, _APP1 = 0xDA, 0xD9, 0xE1
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
_MAX_SEGMENTS = 4096


def facts(payload: memoryview) -> Facts:
    """Facts of a whole JPEG file; BrokenMedia says what is wrong with it."""
    try:
        width, height, turn, scan = _header(payload)
    except IndexError:
        raise BrokenMedia("truncated: ends inside the JPEG header") from None
    if not _ends(payload, scan):
        raise BrokenMedia("truncated: a JPEG without its end marker")
    return picture("jpeg", width, height, turn)


def _header(payload: memoryview) -> tuple[int, int, int, int]:
    """Stored width and height, orientation, and where the compressed picture begins."""
    width = height = 0
    turn = 1
    at = 2
    for _ in range(_MAX_SEGMENTS):
        code = payload[at + 1]
        if payload[at] != 0xFF:
            raise BrokenMedia(f"damaged JPEG header: no marker at byte {at}")
        if code == 0xFF:  # a fill byte
            at += 1
            continue
        if code in _ALONE:
            at += 2
            continue
        if code == _EOI:
            raise BrokenMedia("a JPEG without a picture")
        length = payload[at + 2] << 8 | payload[at + 3]
        if code in _SOF:
            width, height = _frame(payload, at, code)
        elif code == _APP1 and turn == 1 and bytes(payload[at + 4 : at + 10]) == b"Exif\0\0":
            turn = orientation(payload[at + 10 : at + 2 + length])
        at += 2 + length
        if code == _SOS:
            return width, height, turn, at
    raise BrokenMedia(f"damaged JPEG header: more than {_MAX_SEGMENTS} segments")


def _frame(payload: memoryview, at: int, code: int) -> tuple[int, int]:
    bits = payload[at + 4]
    if bits != 8 or code == 0xC3:
        raise BrokenMedia(f"a {bits}-bit{' lossless' if code == 0xC3 else ''} JPEG; save it with 8 bits")
    height = payload[at + 5] << 8 | payload[at + 6]
    width = payload[at + 7] << 8 | payload[at + 8]
    return width, height


def _ends(payload: memoryview, scan: int) -> bool:
    """Whether the end marker follows the scan. Cameras append padding and second pictures after it."""
    if len(payload) >= scan + 2 and bytes(payload[-2:]) == b"\xff\xd9":
        return True
    return bytes(payload[scan:]).rfind(b"\xff\xd9") >= 0  # 0xFF inside compressed data is never followed by 0xD9

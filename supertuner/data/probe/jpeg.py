"""Size, orientation and completeness of a JPEG from its markers, without decoding."""

from __future__ import annotations

from supertuner.core.errors import BrokenMedia
from supertuner.data.probe.exif import orientation
from supertuner.data.probe.facts import Facts, picture

_SOS, _EOI, _APP1 = 0xDA, 0xD9, 0xE1
_PASS, _FRAME, _EXIF, _ALONE, _FILL, _SCAN, _END = range(7)
_MAX_SEGMENTS = 4096
HEAD_BYTES = 4096
"""Enough for the headers of most files; bytes are quicker to look into than a view."""


def _actions() -> bytes:
    """What to do at each marker, by its code."""
    table = bytearray(256)
    for code in set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}:
        table[code] = _FRAME
    for code in (0x01, *range(0xD0, 0xD9)):
        table[code] = _ALONE
    table[_APP1], table[0xFF], table[_SOS], table[_EOI] = _EXIF, _FILL, _SCAN, _END
    return bytes(table)


_ACTION = _actions()


def facts(payload: memoryview, head: bytes) -> Facts:
    """Facts of a whole JPEG file that begins with `head`; BrokenMedia says what is wrong with it."""
    try:
        width, height, turn, scan = _header(head)
    except IndexError:
        width, height, turn, scan = _long_header(payload)
    if not _ends(payload, scan):
        raise BrokenMedia("truncated: a JPEG without its end marker")
    return picture("jpeg", width, height, turn)


def _long_header(payload: memoryview) -> tuple[int, int, int, int]:
    """The header of a file whose EXIF, colour profile or thumbnail reaches beyond the first bytes."""
    try:
        return _header(payload)
    except IndexError:
        raise BrokenMedia("truncated: ends inside the JPEG header") from None


def _header(payload: bytes | memoryview) -> tuple[int, int, int, int]:
    """Stored width and height, orientation, and where the picture begins; IndexError if that is not all here."""
    width = height = 0
    turn = 1
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if payload[at] != 0xFF:
            raise BrokenMedia(f"damaged JPEG header: no marker at byte {at}")
        code = payload[at + 1]
        action = _ACTION[code]
        if action in (_FILL, _ALONE):
            at += 1 if action == _FILL else 2
            continue
        if action == _END:
            raise BrokenMedia("a JPEG without a picture")
        end = at + 2 + (payload[at + 2] << 8 | payload[at + 3])
        if action == _FRAME:
            width, height = _frame(payload, at, code)
        elif action == _EXIF and turn == 1 and bytes(payload[at + 4 : at + 10]) == b"Exif\0\0":
            payload[end - 1]  # the whole block must be here
            turn = orientation(payload[at + 10 : end])
        elif action == _SCAN:
            return width, height, turn, end
        at = end
    raise BrokenMedia(f"damaged JPEG header: more than {_MAX_SEGMENTS} segments")


def _frame(payload: bytes | memoryview, at: int, code: int) -> tuple[int, int]:
    bits = payload[at + 4]
    if bits != 8 or code == 0xC3:
        raise BrokenMedia(f"a {bits}-bit{' lossless' if code == 0xC3 else ''} JPEG; save it with 8 bits")
    return payload[at + 7] << 8 | payload[at + 8], payload[at + 5] << 8 | payload[at + 6]


def _ends(payload: memoryview, scan: int) -> bool:
    """Whether the end marker follows the scan. Cameras append padding and second pictures after it."""
    if len(payload) >= scan + 2 and payload[-1] == 0xD9 and payload[-2] == 0xFF:
        return True
    return bytes(payload[scan:]).rfind(b"\xff\xd9") >= 0  # 0xFF inside compressed data is never followed by 0xD9

"""Checks that a container (MP4, Matroska, RIFF, Ogg, MP3) has as many bytes as its headers state. Pure arithmetic."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from supertuner.core.errors import BrokenMediaError

_MAX_BOXES = 100_000
_EBML_SEGMENT = 0x18538067
_OGG_PAGE_BYTES = 27 + 255 + 255 * 255
_MP3_SLACK = 0.99
"""Tag editors remove a frame or two without updating the header."""


def require_complete(format: str, payload: memoryview) -> None:
    """Raise BrokenMediaError if the outermost structure extends beyond the end of the file."""
    find_end = _END_FINDERS.get(format)
    stated_bytes = find_end(payload) if find_end else 0
    if stated_bytes > len(payload):
        raise BrokenMediaError(f"truncated: its header states {stated_bytes} bytes, the file has {len(payload)}")


def _mp4_end(payload: memoryview) -> int:
    """Offset at which the last top-level box ends. A box of size 0 extends to the end of the file."""
    at = 0
    for _ in range(_MAX_BOXES):
        if at + 8 > len(payload):
            return at
        (size,) = struct.unpack_from(">I", payload, at)
        if size == 1 and at + 16 <= len(payload):
            (size,) = struct.unpack_from(">Q", payload, at + 8)
        if size == 0:
            return len(payload)
        if size < 8:
            return at  # padding or garbage after the last box; the demuxer decides
        at += size
    raise BrokenMediaError(f"an MP4 of more than {_MAX_BOXES} boxes")


def _matroska_end(payload: memoryview) -> int:
    """Offset at which the segment ends; 0 if it is unknown, as in live recordings."""
    at = 0
    for _ in range(8):  # the EBML header, optional void elements, then the segment
        name, at = _ebml_number(payload, at, keep_marker=True)
        size, at = _ebml_number(payload, at, keep_marker=False)
        if name < 0 or size < 0:
            return 0
        if name == _EBML_SEGMENT:
            return at + size
        at += size
    return 0


def _ebml_number(payload: memoryview, at: int, *, keep_marker: bool) -> tuple[int, int]:
    """A variable-length EBML number, or -1 if it is unknown or missing, and the offset after it."""
    if at >= len(payload) or payload[at] == 0:
        return -1, at
    length = 9 - payload[at].bit_length()
    value = int.from_bytes(payload[at : at + length], "big")
    if not keep_marker:
        value &= (1 << 7 * length) - 1
        if value == (1 << 7 * length) - 1:
            return -1, at + length
    return value, at + length


def _riff_end(payload: memoryview) -> int:
    """Offset at which the RIFF chunk ends; 0 if unknown: in a streamed WAV (size 0 or 0xFFFFFFFF) and in RF64."""
    size = int.from_bytes(payload[4:8], "little")
    return 0 if size in (0, 0xFFFFFFFF) or bytes(payload[:4]) == b"RF64" else size + 8


def _ogg_end(payload: memoryview) -> int:
    """Offset at which the last page ends, from its segment table. A cut between two pages is not detected."""
    tail_begin = max(0, len(payload) - _OGG_PAGE_BYTES)
    last = bytes(payload[tail_begin:]).rfind(b"OggS")
    at = tail_begin + last
    if last < 0 or at + 27 > len(payload):
        return len(payload) + 1
    lengths = payload[at + 27 : at + 27 + payload[at + 26]]
    return at + 27 + payload[at + 26] + sum(lengths)


def _mp3_end(payload: memoryview) -> int:
    """Offset at which the audio ends, from the Xing or Info header, which most encoders write; 0 without one."""
    start = 0
    if bytes(payload[:3]) == b"ID3" and len(payload) >= 10:
        a, b, c, d = payload[6:10]
        start = 10 + (a << 21 | b << 14 | c << 7 | d)
    head = bytes(payload[start : start + 64])
    at = max(head.find(b"Xing"), head.find(b"Info"))
    if at < 0 or len(head) < at + 16:
        return 0
    flags, _, nbytes = struct.unpack_from(">III", head, at + 4)
    return start + int(nbytes * _MP3_SLACK) if flags & 3 == 3 else 0


_END_FINDERS: Mapping[str, Callable[[memoryview], int]] = {
    "mp4": _mp4_end,
    "matroska": _matroska_end,
    "wav": _riff_end,
    "avi": _riff_end,
    "ogg": _ogg_end,
    "mp3": _mp3_end,
}

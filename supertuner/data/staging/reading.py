"""Reading what was listed, safely: only regular files, never blocking, and only if they are still what they were."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence

from supertuner.core.bulk_io import READ_FLAGS, Found, Together
from supertuner.core.errors import BrokenMedia
from supertuner.data.sources.captions import MAX_CAPTION_BYTES, from_bytes, from_json
from supertuner.data.sources.listing import Item, Span

_LINE = 64
"""Spans begin at such places of the buffer: a cache line each."""


def open_span(span: Span) -> int:
    """A descriptor of the span's file; BrokenMedia if it is gone or unreadable. Never waits, whatever is there now."""
    try:
        return os.open(span.path, READ_FLAGS)
    except OSError as error:
        raise _unreadable(error.errno or 0) from error


def require_unchanged(status: os.stat_result, span: Span) -> None:
    """BrokenMedia unless the open file is the one that was listed. Asked after reading, it covers both changes before
    and changes meanwhile; the listing already left out whatever is not a regular file."""
    _require(Found(0, status.st_size, status.st_mtime_ns, stat.S_ISREG(status.st_mode)), span)


def room_of(spans: Sequence[Span]) -> int:
    """Bytes of a buffer that `spans` take."""
    return sum([-(-span.nbytes // _LINE) * _LINE for span in spans])


class Shelf:
    """Spans that were read together into one buffer, to be taken one by one until the next are read."""

    def __init__(self, buffer: Together) -> None:
        self._buffer = buffer
        self._held: dict[Span, tuple[int, Found]] = {}

    def fill(self, spans: Sequence[Span]) -> None:
        """Read all of them, instead of those before; what is wrong with one is said when it is taken."""
        places, at = [], 0
        for span in spans:
            places.append(at)
            at += -(-span.nbytes // _LINE) * _LINE
        paths, offsets, sizes = [s.path for s in spans], [s.offset for s in spans], [s.nbytes for s in spans]
        found = self._buffer.read(paths, offsets, sizes, places)
        self._held = dict(zip(spans, zip(places, found, strict=True), strict=True))

    def place(self, span: Span) -> int:
        """Where the span's bytes are in the buffer. BrokenMedia if they are not what was listed."""
        at, found = self._held[span]
        if found.error:
            raise _unreadable(found.error)
        _require(found, span)
        return at

    def take(self, span: Span) -> memoryview:
        """The span's bytes: from the shelf, or read now if it is not there."""
        if span not in self._held:
            return read_span(span)
        at = self.place(span)
        return self._buffer.view[at : at + span.nbytes]


def read_span(span: Span) -> memoryview:
    """All bytes of a span, in private memory of their own."""
    shelf = Shelf(Together(max(1, room_of([span])), None))
    shelf.fill([span])
    return shelf.take(span).toreadonly()


def _unreadable(error: int) -> BrokenMedia:
    if error == errno.ENOENT:
        return BrokenMedia("vanished after it was listed")
    return BrokenMedia(f"unreadable: {os.strerror(error)}")


def _require(found: Found, span: Span) -> None:
    if found.file_bytes < span.file_bytes:
        raise BrokenMedia("became shorter after it was listed")
    if found.file_bytes != span.file_bytes or found.mtime_ns != span.mtime_ns or not found.is_regular:
        raise BrokenMedia("changed after it was listed")


def read_captions(
    item: Item, syntax: str, column: str, *, several: bool, read: Callable[[Span], memoryview] = read_span
) -> tuple[str, ...]:
    """An item's captions; empty if it has none. BrokenMedia says what is wrong with its caption file."""
    caption = item.caption
    if not isinstance(caption, Span):
        return caption or ()
    if caption.nbytes > MAX_CAPTION_BYTES:
        raise BrokenMedia(f"caption of {caption.nbytes} bytes; at most {MAX_CAPTION_BYTES} are allowed")
    if caption.file_bytes < 0:
        raise BrokenMedia("its caption file: not a file that can be read")
    try:
        content = bytes(read(caption))
    except BrokenMedia as error:
        raise BrokenMedia(f"its caption file: {error}") from error
    return from_bytes(content, several=several) if syntax == "text" else from_json(content, column) or ()

"""Opening what was listed, safely: only regular files, never blocking, and only if they are still what they were."""

from __future__ import annotations

import os
import stat

from supertuner.core.errors import BrokenMedia
from supertuner.data.sources.captions import MAX_CAPTION_BYTES, from_bytes, from_json
from supertuner.data.sources.listing import Item, Span

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def open_span(span: Span) -> int:
    """A descriptor of the span's file; BrokenMedia if it is gone or unreadable. Never waits, whatever is there now."""
    try:
        return os.open(span.path, _FLAGS)
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> BrokenMedia:
    if isinstance(error, FileNotFoundError):
        return BrokenMedia("vanished after it was listed")
    return BrokenMedia(f"unreadable: {error.strerror}")


def require_unchanged(status: os.stat_result, span: Span) -> None:
    """BrokenMedia unless the open file is the one that was listed. Asked after reading, it covers both changes before
    and changes meanwhile; the listing already left out whatever is not a regular file."""
    if status.st_size != span.file_bytes or status.st_mtime_ns != span.mtime_ns or not stat.S_ISREG(status.st_mode):
        raise BrokenMedia("changed after it was listed")


def read_into(span: Span, buffer: memoryview) -> memoryview:
    """All bytes of a span, in the buffer; the part of it that they fill."""
    path, offset, nbytes, _, _ = span
    view = buffer[:nbytes]
    try:
        fd = os.open(path, _FLAGS)
        try:
            done = os.preadv(fd, (view,), offset)
            while done < nbytes:
                got = os.preadv(fd, (view[done:],), offset + done)
                if not got:
                    raise BrokenMedia("became shorter after it was listed")
                done += got
            status = os.fstat(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(error) from error
    require_unchanged(status, span)
    return view


def read_span(span: Span) -> memoryview:
    """All bytes of a span, in private memory of their own."""
    return read_into(span, memoryview(bytearray(span.nbytes))).toreadonly()


def read_captions(item: Item, syntax: str, column: str, *, several: bool) -> tuple[str, ...]:
    """An item's captions; empty if it has none. BrokenMedia says what is wrong with its caption file."""
    caption = item.caption
    if not isinstance(caption, Span):
        return caption or ()
    if caption.nbytes > MAX_CAPTION_BYTES:
        raise BrokenMedia(f"caption of {caption.nbytes} bytes; at most {MAX_CAPTION_BYTES} are allowed")
    if caption.file_bytes < 0:
        raise BrokenMedia("its caption file: not a file that can be read")
    try:
        content = bytes(read_span(caption))
    except BrokenMedia as error:
        raise BrokenMedia(f"its caption file: {error}") from error
    return from_bytes(content, several=several) if syntax == "text" else from_json(content, column) or ()

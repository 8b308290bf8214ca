"""Opening what was listed, safely: only regular files, never blocking, and only if they are still what they were."""

from __future__ import annotations

import os
import stat

from supertuner.core.errors import BrokenMedia
from supertuner.data.sources.captions import MAX_CAPTION_BYTES, from_bytes, from_json
from supertuner.data.sources.listing import Item, Span

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_open, _fstat, _isreg = os.open, os.fstat, stat.S_ISREG


def open_span(span: Span) -> int:
    """A descriptor of the span's file; BrokenMedia if it is gone, unreadable, or not what was listed."""
    try:
        fd = _open(span.path, _FLAGS)
    except FileNotFoundError:
        raise BrokenMedia("vanished after it was listed") from None
    except OSError as error:
        raise BrokenMedia(f"unreadable: {error.strerror}") from error
    status = _fstat(fd)
    if status.st_size == span.file_bytes and status.st_mtime_ns == span.mtime_ns and _isreg(status.st_mode):
        return fd
    os.close(fd)
    raise BrokenMedia("changed after it was listed" if _isreg(status.st_mode) else "not a file any more")


def require_unchanged(fd: int, span: Span) -> None:
    """After reading: a file that was written meanwhile may be a mix of old and new."""
    status = _fstat(fd)
    if status.st_size != span.file_bytes or status.st_mtime_ns != span.mtime_ns:
        raise BrokenMedia("changed while it was read")


def read_span(span: Span) -> bytes:
    """All bytes of a span, in private memory; for captions, samples of a trial, and files that are compressed."""
    fd = open_span(span)
    try:
        parts: list[bytes] = []
        at, end = span.offset, span.offset + span.nbytes
        while at < end:
            part = os.pread(fd, end - at, at)
            if not part:
                raise BrokenMedia("became shorter while it was read")
            parts.append(part)
            at += len(part)
        require_unchanged(fd, span)
    except OSError as error:
        raise BrokenMedia(f"unreadable: {error.strerror}") from error
    finally:
        os.close(fd)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_captions(item: Item, syntax: str, column: str, *, several: bool) -> tuple[str, ...]:
    """An item's captions; empty if it has none. BrokenMedia says what is wrong with its caption file."""
    caption = item.caption
    if not isinstance(caption, Span):
        return caption or ()
    if caption.nbytes > MAX_CAPTION_BYTES:
        raise BrokenMedia(f"caption of {caption.nbytes} bytes; at most {MAX_CAPTION_BYTES} are allowed")
    try:
        content = read_span(caption)
    except BrokenMedia as error:
        raise BrokenMedia(f"its caption file: {error}") from error
    return from_bytes(content, several=several) if syntax == "text" else from_json(content, column) or ()

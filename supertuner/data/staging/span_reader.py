"""Reads listed files safely: only regular files, without blocking, and only if they have not changed since."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.bulk_io import READ_FLAGS, BulkReader, FileReadResult
from supertuner.core.errors import BrokenMediaError
from supertuner.data.sources.caption_parsing import parse_caption_file, parse_caption_json, require_caption_size
from supertuner.data.sources.listing import FileSpan, SourceItem

_ALIGNMENT = 64
"""Spans begin at multiples of this in the buffer: a cache line."""


def open_span(span: FileSpan) -> int:
    """Open the span's file without blocking, even if it is a FIFO now. Raises BrokenMediaError if it is unreadable."""
    try:
        return os.open(span.path, READ_FLAGS)
    except OSError as error:
        raise _unreadable(error.errno or 0) from error


def require_unchanged(status: os.stat_result, span: FileSpan) -> None:
    """Raise BrokenMediaError unless the open file is the one that was listed.

    Call it after reading, so that it detects changes before and during the read. The listing contains only regular
    files.
    """
    _require_as_listed(FileReadResult(0, status.st_size, status.st_mtime_ns, stat.S_ISREG(status.st_mode)), span)


def buffer_bytes(spans: Sequence[FileSpan]) -> int:
    """Bytes that `spans` occupy in a buffer."""
    return sum([-(-span.nbytes // _ALIGNMENT) * _ALIGNMENT for span in spans])


class SpanBuffer:
    """Spans that are read together into one buffer and used one by one until the next `load`."""

    def __init__(self, buffer: BulkReader) -> None:
        self._buffer = buffer
        self._loaded_spans: dict[FileSpan, tuple[int, FileReadResult]] = {}

    def load(self, spans: Sequence[FileSpan]) -> None:
        """Read these spans, replacing the previous ones. Errors are raised when a span is used."""
        offsets_in_buffer, at = [], 0
        for span in spans:
            offsets_in_buffer.append(at)
            at += -(-span.nbytes // _ALIGNMENT) * _ALIGNMENT
        paths, offsets, sizes = [s.path for s in spans], [s.offset for s in spans], [s.nbytes for s in spans]
        read_results = self._buffer.read(paths, offsets, sizes, offsets_in_buffer)
        self._loaded_spans = dict(zip(spans, zip(offsets_in_buffer, read_results, strict=True), strict=True))

    def offset_of(self, span: FileSpan) -> int:
        """Offset of the span's bytes in the buffer. Raises BrokenMediaError if the file changed since the listing."""
        at, read_result = self._loaded_spans[span]
        if read_result.error:
            raise _unreadable(read_result.error)
        _require_as_listed(read_result, span)
        return at

    def view(self, span: FileSpan) -> memoryview:
        """The span's bytes: from the buffer, or read now if they are not loaded."""
        if span not in self._loaded_spans:
            return read_span(span)
        at = self.offset_of(span)
        return self._buffer.view[at : at + span.nbytes]


def read_span(span: FileSpan) -> memoryview:
    """All bytes of a span, in new memory."""
    span_buffer = SpanBuffer(BulkReader(max(1, buffer_bytes([span])), None))
    span_buffer.load([span])
    return span_buffer.view(span).toreadonly()


def _unreadable(error: int) -> BrokenMediaError:
    if error == errno.ENOENT:
        return BrokenMediaError("removed after it was listed")
    return BrokenMediaError(f"unreadable: {os.strerror(error)}")


def _require_as_listed(read_result: FileReadResult, span: FileSpan) -> None:
    if read_result.file_bytes < span.file_bytes:
        raise BrokenMediaError("became shorter after it was listed")
    if read_result.file_bytes != span.file_bytes or read_result.mtime_ns != span.mtime_ns or not read_result.is_regular:
        raise BrokenMediaError("changed after it was listed")


def read_captions(
    item: SourceItem, syntax: str, settings: CaptionSettings, read: Callable[[FileSpan], memoryview] = read_span
) -> tuple[str, ...]:
    """An item's captions; empty if it has none. Raises BrokenMediaError if its caption file is unusable."""
    caption = item.caption
    if not isinstance(caption, FileSpan):
        return caption or ()
    require_caption_size(caption.nbytes)
    if caption.file_bytes < 0:
        raise BrokenMediaError("its caption file: not a readable regular file")
    try:
        content = bytes(read(caption))
    except BrokenMediaError as error:
        raise BrokenMediaError(f"its caption file: {error}") from error
    if syntax == "text":
        return parse_caption_file(content, one_per_line=settings.several)
    return parse_caption_json(content, settings.caption_column) or ()

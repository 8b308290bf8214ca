"""A read-only file object over bytes in memory, for libraries that require one; copies only what they read."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from av.container import InputContainer


class MemoryviewFile(io.RawIOBase):
    """Unlike `io.BytesIO`, it does not copy the whole payload first."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._payload)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, out: memoryview, /) -> int:  # type: ignore[override]
        part = self._payload[self._position : self._position + len(out)]
        out[: len(part)] = part
        self._position += len(part)
        return len(part)

    def read(self, size: int = -1, /) -> bytes:
        end = len(self._payload) if size < 0 else self._position + size
        part = bytes(self._payload[self._position : end])
        self._position += len(part)
        return part


def open_with_av(payload: memoryview) -> InputContainer:
    """Open a video or audio file with PyAV, which is imported only here, so that image datasets never load it."""
    import av

    return av.open(MemoryviewFile(payload), mode="r", metadata_errors="replace")

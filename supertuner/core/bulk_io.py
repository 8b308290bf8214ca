"""Reads many small files, or writes many records, in one call that releases the GIL.

With two or more threads, a thread that must take the GIL again after each short system call spends most of its time
waiting for it. The work is done by a few lines of C, built when the package is installed; without them, in Python.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Opening never blocks, even on a pipe, and never makes a terminal the controlling one."""


class FileReadResult(NamedTuple):
    """The state of a file after it was read."""

    error: int
    """errno, or 0. After an error the other fields are meaningless."""
    file_bytes: int
    mtime_ns: int
    is_regular: bool


class BulkReader:
    """A buffer into which many files are read, or from which many records are written, in one call. For one thread."""

    def __init__(self, nbytes: int, library: Path | None) -> None:
        """`library` is the result of `find_native_library`; None uses Python."""
        self._buffer = bytearray(nbytes)
        self.view = memoryview(self._buffer)
        self._library = None if library is None else ctypes.CDLL(str(library))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def read(
        self, paths: Sequence[str], offsets: Sequence[int], nbytes: Sequence[int], buffer_offsets: Sequence[int]
    ) -> list[FileReadResult]:
        """Read `nbytes` bytes at `offsets` of each file into the buffer at `buffer_offsets`. A shorter file is read to
        its end."""
        self._check_inside(buffer_offsets, nbytes)
        if self._library is None:
            return [self._read_file(*file) for file in zip(paths, offsets, nbytes, buffer_offsets, strict=True)]
        count = len(paths)
        names = (ctypes.c_char_p * count)(*map(os.fsencode, paths))
        facts, errors = (ctypes.c_int64 * (3 * count))(), (ctypes.c_int64 * count)()
        buffer = ctypes.c_void_p(self._address)
        n = ctypes.c_int64(count)
        self._library.supertuner_read_files(
            n, names, _int64_array(offsets), _int64_array(nbytes), buffer, _int64_array(buffer_offsets), facts, errors
        )
        rows = zip(errors, facts[0::3], facts[1::3], facts[2::3], strict=True)
        return [FileReadResult(error, size, mtime, bool(regular)) for error, size, mtime, regular in rows]

    def write(self, fd: int, buffer_offsets: Sequence[int], nbytes: Sequence[int], offsets: Sequence[int]) -> None:
        """Write `nbytes` bytes of the buffer at `buffer_offsets` to the file at `offsets`. Raises OSError."""
        self._check_inside(buffer_offsets, nbytes)
        if self._library is None:
            for buffer_offset, size, offset in zip(buffer_offsets, nbytes, offsets, strict=True):
                write_all(fd, self.view[buffer_offset : buffer_offset + size], offset)
            return
        buffer, count = ctypes.c_void_p(self._address), ctypes.c_int64(len(buffer_offsets))
        error = self._library.supertuner_write_pieces(
            fd, count, buffer, _int64_array(buffer_offsets), _int64_array(nbytes), _int64_array(offsets)
        )
        if error:
            raise OSError(error, os.strerror(error))

    def _check_inside(self, buffer_offsets: Sequence[int], nbytes: Sequence[int]) -> None:
        ranges = zip(buffer_offsets, nbytes, strict=True)
        assert all(0 <= begin <= begin + size <= len(self._buffer) for begin, size in ranges)

    def _read_file(self, path: str, offset: int, nbytes: int, buffer_offset: int) -> FileReadResult:
        try:
            fd = os.open(path, READ_FLAGS)
            try:
                read_all(fd, self.view[buffer_offset : buffer_offset + nbytes], offset)
                status = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            return FileReadResult(error.errno or 0, 0, 0, False)
        return FileReadResult(0, status.st_size, status.st_mtime_ns, stat.S_ISREG(status.st_mode))


def read_all(fd: int, into: memoryview, offset: int) -> int:
    """Fill `into` from the file at `offset`. Returns the number of bytes read; it is smaller only at the end of the
    file."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_all(fd: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of `content` with pwrite. (Writing through a memory map raises SIGBUS on a full tmpfs; this,
    OSError.)"""
    done, view = 0, memoryview(content)
    while done < len(content):
        done += os.pwrite(fd, view[done:], offset + done)


def find_native_library() -> Path | None:
    """The path of the C library; None if it was not built when the package was installed."""
    candidates = (Path(__file__).with_name(f"_bulk_io{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def _int64_array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)

"""Many small files read, or many records written, in one call that leaves the interpreter's lock to other threads.

A thread that takes the lock again after each short system call waits more than it works, as soon as there are two. The
work is a few lines of C, built when the package is installed; where that was not possible, the same is done in Python.
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
"""Never waits, whatever is there, and never becomes a terminal's."""


class FileReadResult(NamedTuple):
    """What a file was after it had been read."""

    error: int
    """errno, or 0. With an error the rest means nothing."""
    file_bytes: int
    mtime_ns: int
    is_regular: bool


class BulkReader:
    """A buffer that files are read into, and records written from, together. For one thread."""

    def __init__(self, nbytes: int, library: Path | None) -> None:
        """`library`: what `built()` gave; None does everything in Python."""
        self._buffer = bytearray(nbytes)
        self.view = memoryview(self._buffer)
        self._library = None if library is None else ctypes.CDLL(str(library))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def read(
        self, paths: Sequence[str], offsets: Sequence[int], nbytes: Sequence[int], buffer_offsets: Sequence[int]
    ) -> list[FileReadResult]:
        """Read `nbytes` from `offsets` of each file to its place in the buffer. A shorter file is read to its end."""
        assert all(
            0 <= buffer_offset <= buffer_offset + size <= len(self._buffer)
            for buffer_offset, size in zip(buffer_offsets, nbytes, strict=True)
        )
        if self._library is None:
            return [
                self._read_file(*file_request)
                for file_request in zip(paths, offsets, nbytes, buffer_offsets, strict=True)
            ]
        count = len(paths)
        names = (ctypes.c_char_p * count)(*map(os.fsencode, paths))
        facts, errors = (ctypes.c_int64 * (3 * count))(), (ctypes.c_int64 * count)()
        buffer = ctypes.c_void_p(self._address)
        n = ctypes.c_int64(count)
        self._library.supertuner_read_files(
            n, names, _int64_array(offsets), _int64_array(nbytes), buffer, _int64_array(buffer_offsets), facts, errors
        )
        facts_list = list(facts)
        rows = zip(list(errors), facts_list[0::3], facts_list[1::3], facts_list[2::3], strict=True)
        return [FileReadResult(error, size, mtime, bool(regular)) for error, size, mtime, regular in rows]

    def write(self, fd: int, buffer_offsets: Sequence[int], nbytes: Sequence[int], offsets: Sequence[int]) -> None:
        """Write the bytes at each place of the buffer to their offset of the file; OSError if one cannot be written."""
        assert all(
            0 <= buffer_offset <= buffer_offset + size <= len(self._buffer)
            for buffer_offset, size in zip(buffer_offsets, nbytes, strict=True)
        )
        if self._library is None:
            for place, size, offset in zip(buffer_offsets, nbytes, offsets, strict=True):
                write_all(fd, self.view[place : place + size], offset)
            return
        buffer, count = ctypes.c_void_p(self._address), ctypes.c_int64(len(buffer_offsets))
        error = self._library.supertuner_write_pieces(
            fd, count, buffer, _int64_array(buffer_offsets), _int64_array(nbytes), _int64_array(offsets)
        )
        if error:
            raise OSError(error, os.strerror(error))

    def _read_file(self, path: str, offset: int, nbytes: int, buffer_offset: int) -> FileReadResult:
        try:
            fd = os.open(path, READ_FLAGS)
            try:
                done = 0
                while done < nbytes:
                    count = os.preadv(fd, [self.view[buffer_offset + done : buffer_offset + nbytes]], offset + done)
                    if not count:
                        break
                    done += count
                status = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            return FileReadResult(error.errno or 0, 0, 0, False)
        return FileReadResult(0, status.st_size, status.st_mtime_ns, stat.S_ISREG(status.st_mode))


def read_all(fd: int, into: memoryview, offset: int) -> int:
    """Fill `into` from a place in a file; how many bytes there were, fewer than asked for only where the file ends."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_all(fd: int, content: bytes | memoryview, offset: int) -> None:
    """pwrite until all is there. Not through a map: on a full tmpfs that is a SIGBUS, here it is an error."""
    done = os.pwrite(fd, content, offset)
    if done == len(content):
        return
    rest = memoryview(content)
    while done < len(content):
        done += os.pwrite(fd, rest[done:], offset + done)


def find_native_library() -> Path | None:
    """The C part, if it was built when the package was installed."""
    here = Path(__file__)
    return next(
        (path for suffix in EXTENSION_SUFFIXES if (path := here.with_name(f"_bulk_io{suffix}")).is_file()), None
    )


def _int64_array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)

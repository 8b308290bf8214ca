"""Maps all segments of an arena as one contiguous memory range that is shared with every other reader.

The mapping is copy-on-write: if a tensor over it is written by mistake, only this process sees the changed page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

from supertuner.arena.catalog import ArenaSegment
from supertuner.arena.folder import ArenaFolder
from supertuner.arena.format import segment_name
from supertuner.core.errors import ArenaError

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000  # Linux on x86-64 and aarch64; Python has a name for it only from 3.13 on
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_segments(folder: ArenaFolder, segments: Sequence[ArenaSegment], total_bytes: int) -> mmap.mmap:
    """Map each segment at its base. The memory is unmapped when the last view of it is garbage-collected."""
    try:
        # Reserve one address range for the whole arena, then place each segment's file inside it with MAP_FIXED, so
        # that one memoryview and one offset column address every record.
        memory = mmap.mmap(
            -1, total_bytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except OSError as error:
        raise ArenaError(
            f"{folder.path}: cannot map {total_bytes} bytes: {error.strerror}; raise `ulimit -v`, "
            "or set vm.overcommit_memory to 0 or 1"
        ) from error
    base_address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc_mmap = _libc_mmap()
    for segment in segments:
        fd = folder.open_file(segment_name(segment.number, "data"))
        try:
            flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
            address = base_address + segment.base
            mapped_at = libc_mmap(address, segment.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
            if mapped_at == _MAP_FAILED:
                file = folder.file_path(segment_name(segment.number, "data"))
                raise ArenaError(f"{file}: cannot be mapped: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(fd)
    return memory


def _libc_mmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return function

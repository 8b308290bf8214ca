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
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_segments(folder: ArenaFolder, segments: Sequence[ArenaSegment], total_bytes: int) -> mmap.mmap:
    """Map each segment at its base. The memory is unmapped when the last view of it is garbage-collected."""
    try:
        # Reserve one address range for the whole arena, then place each segment's file inside it with MAP_FIXED, so
        # that one memoryview and one offset column address every record.
        memory = mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=_READ_WRITE)
    except OSError as error:
        remedy = "raise `ulimit -v`, or set vm.overcommit_memory to 0 or 1"
        raise ArenaError(f"{folder.path}: cannot map {total_bytes} bytes: {error.strerror}; {remedy}") from error
    base_address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    for segment in segments:
        name = segment_name(segment.number, "data")
        with folder.opened(name) as fd:
            mapped_at = libc_mmap(base_address + segment.base, segment.nbytes, _READ_WRITE, flags, fd, 0)
        if mapped_at == _MAP_FAILED:
            problem = os.strerror(ctypes.get_errno())
            raise ArenaError(f"{folder.file_path(name)}: cannot be mapped: {problem}")
    return memory

"""Opening a sealed arena: head, index and every segment's header must be what was written, or it is not opened."""

from __future__ import annotations

import os

from supertuner.arena.catalog import ArenaCatalog, ArenaSegment
from supertuner.arena.folder import HEAD_FILE, ArenaFolder, translate_os_errors
from supertuner.arena.format import (
    DATA_MAGIC,
    HEAD_NBYTES,
    PAGE,
    ArenaHead,
    check_segment_header,
    segment_name,
    unpack_head,
)
from supertuner.arena.index import read_index
from supertuner.core.errors import ArenaDamagedError


def read_head(folder: ArenaFolder) -> ArenaHead:
    return unpack_head(folder.file_path(HEAD_FILE), folder.read(HEAD_FILE, HEAD_NBYTES + 1))


def open_sealed(folder: ArenaFolder) -> tuple[ArenaHead, ArenaCatalog]:
    """Everything but the payloads' own bytes is checked."""
    head = read_head(folder)
    catalog = read_index(folder, head.uuid)
    for segment in catalog.segments:
        _check_data_file(folder, catalog.uuid, segment)
    return head, catalog


def _check_data_file(folder: ArenaFolder, uuid: bytes, segment: ArenaSegment) -> None:
    name = segment_name(segment.number, "data")
    fd = folder.open_file(name)
    try:
        with translate_os_errors(folder.file_path(name)):
            size, page = os.fstat(fd).st_size, os.pread(fd, PAGE, 0)
    finally:
        os.close(fd)
    kind = check_segment_header(folder.file_path(name), page, DATA_MAGIC, uuid, segment.number)
    if kind != segment.kind:
        raise ArenaDamagedError(folder.file_path(name), f"is of kind {kind}; the index says {segment.kind}")
    if size != segment.nbytes:
        raise ArenaDamagedError(folder.file_path(name), f"has {size} bytes; the index says {segment.nbytes}")

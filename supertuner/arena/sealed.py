"""Opening a sealed arena: head, index and every segment's header must be what was written, or it is not opened."""

from __future__ import annotations

import os

from supertuner.arena.catalog import Catalog, Segment
from supertuner.arena.files import HEAD, Folder, naming
from supertuner.arena.format import DATA_MAGIC, HEAD_NBYTES, PAGE, Head, check_segment, segment_name, unpack_head
from supertuner.arena.index import read_index
from supertuner.core.errors import ArenaDamagedError


def read_head(folder: Folder) -> Head:
    return unpack_head(folder.file(HEAD), folder.read(HEAD, HEAD_NBYTES + 1))


def open_sealed(folder: Folder) -> tuple[Head, Catalog]:
    """Everything but the payloads' own bytes is checked."""
    head = read_head(folder)
    catalog = read_index(folder, head.uuid)
    for segment in catalog.segments:
        _check_data(folder, catalog.uuid, segment)
    return head, catalog


def _check_data(folder: Folder, uuid: bytes, segment: Segment) -> None:
    name = segment_name(segment.number, "data")
    fd = folder.open_file(name)
    try:
        with naming(folder.file(name)):
            size, page = os.fstat(fd).st_size, os.pread(fd, PAGE, 0)
    finally:
        os.close(fd)
    kind = check_segment(folder.file(name), page, DATA_MAGIC, uuid, segment.number)
    if kind != segment.kind:
        raise ArenaDamagedError(folder.file(name), f"is of kind {kind}; the index says {segment.kind}")
    if size != segment.nbytes:
        raise ArenaDamagedError(folder.file(name), f"has {size} bytes; the index says {segment.nbytes}")

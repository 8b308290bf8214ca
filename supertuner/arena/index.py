"""The index of a sealed arena, and opening such an arena. Written once, mapped by every reader, all of it covered by
checksums.

The header holds only counts, from which the position of each column follows. It contains no offset that could be wrong.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from supertuner.arena import format as fmt
from supertuner.arena.catalog import KIND_ROW, ArenaCatalog, ArenaSegment, SortedKeys, next_segment_base
from supertuner.arena.catalog_checks import check_catalog
from supertuner.arena.folder import HEAD_FILE, INDEX_FILE, INDEX_TEMPORARY_FILE, ArenaFolder, translate_os_errors
from supertuner.arena.format import ArenaHead
from supertuner.core.bulk_io import write_all
from supertuner.core.errors import ArenaDamagedError, ArenaError
from supertuner.core.types import JSON

_ALIGN = 64
_COUNTS = struct.Struct("<7Q")
_RECORD_COLUMNS = ("offset", "nbytes", "raw_nbytes", "checksum", "kind")
_SEGMENT_ROW = np.dtype([("number", "<u4"), ("kind", "<u4"), ("records", "<u8"), ("nbytes", "<u8")])


class IndexCounts(NamedTuple):
    units: int
    records: int
    kinds: int
    fields: int
    segments: int
    key_nbytes: int
    info_nbytes: int


@dataclass(frozen=True, slots=True)
class IndexSection:
    name: str
    dtype: np.dtype[Any]
    count: int
    begin: int
    end: int
    """Includes zero padding to a multiple of 64; the checksum covers the padding."""


def index_sections(counts: IndexCounts) -> list[IndexSection]:
    """The position of every column."""
    columns: list[tuple[str, np.dtype[Any], int]] = [
        *((name, np.dtype("<u8"), counts.records) for name in ("offset", "nbytes", "raw_nbytes", "checksum")),
        ("key_end", np.dtype("<u8"), counts.units),
        ("kind", np.dtype("<u4"), counts.records),
        ("fields", np.dtype("<u4"), counts.fields * counts.units),
        ("segments", _SEGMENT_ROW, counts.segments),
        ("kinds", KIND_ROW, counts.kinds),
        ("keys", np.dtype("u1"), counts.key_nbytes),
        ("info", np.dtype("u1"), counts.info_nbytes),
    ]
    laid_out, at = [], fmt.INDEX_NBYTES
    for name, dtype, count in columns:
        end = fmt.round_up(at + dtype.itemsize * count, _ALIGN)
        laid_out.append(IndexSection(name, dtype, count, at, end))
        at = end
    return laid_out


def write_index(folder: ArenaFolder, catalog: ArenaCatalog, meta: Mapping[str, JSON]) -> None:
    """Seal the arena: write the complete index to a temporary file, sync it, and rename it."""
    columns = _index_columns(catalog, _info_json(catalog, meta))
    counts = IndexCounts(
        units=len(catalog.keys),
        records=len(catalog.offset),
        kinds=len(catalog.kinds),
        fields=len(catalog.fields),
        segments=len(catalog.segments),
        key_nbytes=len(columns["keys"]),
        info_nbytes=len(columns["info"]),
    )
    folder.unlink(INDEX_TEMPORARY_FILE)
    fd = folder.create(INDEX_TEMPORARY_FILE)
    try:
        with translate_os_errors(folder.file_path(INDEX_FILE)):
            checksums = [_write_section(fd, section, columns[section.name]) for section in index_sections(counts)]
            body = _COUNTS.pack(*counts) + struct.pack(f"<{len(checksums)}Q", *checksums)
            write_all(fd, fmt.pack_header(fmt.INDEX_MAGIC, catalog.uuid, body, fmt.INDEX_NBYTES), 0)
            os.fsync(fd)
            os.rename(INDEX_TEMPORARY_FILE, INDEX_FILE, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            os.fsync(folder.fd)
    finally:
        os.close(fd)


def read_index(folder: ArenaFolder, uuid: bytes) -> ArenaCatalog:
    """The validated catalog of a sealed arena, without copies, over a shared mapping of the index."""
    file = folder.file_path(INDEX_FILE)
    with folder.opened(INDEX_FILE) as fd, translate_os_errors(file):
        size, header = os.fstat(fd).st_size, os.pread(fd, fmt.INDEX_NBYTES, 0)
        found_uuid, body = fmt.unpack_header(file, header, fmt.INDEX_MAGIC, fmt.INDEX_NBYTES)
        counts = IndexCounts(*_COUNTS.unpack_from(body))
        sections = index_sections(counts)
        _check_header(file, found_uuid == uuid, counts, size, sections[-1].end)
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    checksums = struct.unpack_from(f"<{len(sections)}Q", body, _COUNTS.size)
    for section, checksum in zip(sections, checksums, strict=True):
        if xxhash.xxh3_64_intdigest(memoryview(memory)[section.begin : section.end]) != checksum:
            raise ArenaDamagedError(file, f"the checksum of its section {section.name} does not match")
    parts = {s.name: np.frombuffer(memory, s.dtype, s.count, s.begin) for s in sections}
    catalog = _build_catalog(file, uuid, counts, parts)
    check_catalog(file, catalog)
    return catalog


def read_head(folder: ArenaFolder) -> ArenaHead:
    return fmt.unpack_head(folder.file_path(HEAD_FILE), folder.read(HEAD_FILE, fmt.HEAD_NBYTES + 1))


def open_sealed(folder: ArenaFolder) -> tuple[ArenaHead, ArenaCatalog]:
    """Open a sealed arena and check everything except the payload bytes: head, index, and each segment's header and
    size.
    """
    head = read_head(folder)
    catalog = read_index(folder, head.uuid)
    for segment in catalog.segments:
        _check_data_file(folder, catalog.uuid, segment)
    return head, catalog


def _check_data_file(folder: ArenaFolder, uuid: bytes, segment: ArenaSegment) -> None:
    name = fmt.segment_name(segment.number, "data")
    file = folder.file_path(name)
    with folder.opened(name) as fd, translate_os_errors(file):
        size, page = os.fstat(fd).st_size, os.pread(fd, fmt.PAGE, 0)
    kind = fmt.check_segment_header(file, page, fmt.DATA_MAGIC, uuid, segment.number)
    if (kind, size) != (segment.kind, segment.nbytes):
        listed = f"kind {segment.kind} and {segment.nbytes} bytes"
        raise ArenaDamagedError(file, f"has kind {kind} and {size} bytes; the index lists {listed}")


def _check_header(file: object, same_arena: bool, counts: IndexCounts, size: int, expected_size: int) -> None:
    if not same_arena:
        raise ArenaDamagedError(file, "belongs to a different arena than the `head` in the same folder")
    if size != expected_size:
        raise ArenaDamagedError(file, f"has {size} bytes; its header implies {expected_size}")
    if counts.info_nbytes > fmt.MAX_INFO_NBYTES or counts.fields > fmt.MAX_FIELDS:
        contents = f"{counts.fields} fields and {counts.info_nbytes} bytes of description"
        raise ArenaDamagedError(file, f"has {contents}, more than the format allows")


def _build_catalog(file: object, uuid: bytes, counts: IndexCounts, parts: dict[str, NDArray[Any]]) -> ArenaCatalog:
    info = _read_info(file, parts["info"].tobytes(), counts.fields)
    ends = parts["key_end"]
    last = int(ends[-1]) if len(ends) else 0
    if last != counts.key_nbytes or (len(ends) and ends[0] == 0) or (ends[1:] <= ends[:-1]).any():
        raise ArenaDamagedError(file, "its keys do not fill their section exactly")
    segments, base = [], 0
    for number, kind, records, nbytes in parts["segments"].tolist():
        segments.append(ArenaSegment(number, kind, records, nbytes, base))
        base = next_segment_base(base, segments[-1].nbytes)
    columns = parts["fields"].reshape(counts.fields, counts.units)
    return ArenaCatalog(
        uuid=uuid,
        segments=tuple(segments),
        fields=dict(zip(info["fields"], columns, strict=True)),
        keys=SortedKeys(ends, parts["keys"]),
        tables=info["tables"],
        meta=info["meta"],
        kinds=parts["kinds"],
        **{name: parts[name] for name in _RECORD_COLUMNS},
    )


def _info_json(catalog: ArenaCatalog, meta: Mapping[str, JSON]) -> bytes:
    info = {"fields": list(catalog.fields), "tables": dict(catalog.tables), "meta": dict(meta)}
    text = json.dumps(info, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > fmt.MAX_INFO_NBYTES:
        raise ArenaError(f"meta has {len(text)} bytes, more than {fmt.MAX_INFO_NBYTES}; put it in a table")
    return text


def _read_info(file: object, text: bytes, fields: int) -> dict[str, Any]:
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArenaDamagedError(file, f"its description is not JSON: {error}") from error
    expected_types = {"fields": list, "tables": dict, "meta": dict}
    if not isinstance(info, dict) or {k: type(v) for k, v in info.items()} != expected_types:
        raise ArenaDamagedError(file, "its description does not consist of fields, tables and meta")
    names, tables = info["fields"], info["tables"]
    if len(names) != fields or not all(isinstance(n, str) for n in names) or len(set(names)) != fields:
        raise ArenaDamagedError(file, f"names {len(names)} fields for {fields} columns")
    if not all(type(record) is int for record in tables.values()):
        raise ArenaDamagedError(file, "a table is not a record number")
    return info


def _index_columns(catalog: ArenaCatalog, info: bytes) -> dict[str, NDArray[Any]]:
    rows = [(s.number, s.kind, s.records, s.nbytes) for s in catalog.segments]
    fields = list(catalog.fields.values())
    return {
        **{name: getattr(catalog, name) for name in _RECORD_COLUMNS},
        "key_end": catalog.keys.ends,
        "fields": np.concatenate(fields) if fields else np.zeros(0, np.uint32),
        "segments": np.array(rows, _SEGMENT_ROW),
        "kinds": catalog.kinds,
        "keys": catalog.keys.content,
        "info": np.frombuffer(info, np.uint8),
    }


def _write_section(fd: int, section: IndexSection, column: NDArray[Any]) -> int:
    assert column.dtype == section.dtype and len(column) == section.count, section
    padding = bytes(section.end - section.begin - column.nbytes)
    content = memoryview(column.tobytes() + padding)
    write_all(fd, content, section.begin)
    return xxhash.xxh3_64_intdigest(content)

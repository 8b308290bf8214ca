"""Lists the members of a tar by their headers; a hostile archive can neither exhaust memory nor name outside paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from supertuner.core.types import MIB

BLOCK_BYTES = 512
_MAX_EXTENSION_BYTES = MIB
"""Limit for a long-name or pax header; real ones have a few hundred bytes."""
_TYPE_NAMES = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a named pipe"}


class TarMember(NamedTuple):
    name: str
    offset: int
    nbytes: int
    problem: str = ""
    """Why this member cannot be used; empty if it can. A truncated archive has no members after this one."""


def iter_tar_members(fd: int) -> Iterator[TarMember]:
    """The regular members of the tar open as `fd`, in order. Errors of the archive are members with a `problem`."""
    end = os.fstat(fd).st_size
    at = 0
    override: dict[str, str] = {}
    while True:
        header = os.pread(fd, BLOCK_BYTES, at)
        if not header or header == bytes(BLOCK_BYTES):
            if not header and at == 0:
                yield TarMember("", 0, 0, "zero bytes")  # without a name: the archive itself is at fault
            return
        problem, size = _check_header(header, at, end)
        size = int(override.get("size", size)) if override.get("size", "").isdigit() else size
        name = override.get("path") or _header_name(header)
        if not problem and at + BLOCK_BYTES + size > end:
            problem = f"the archive is truncated: it ends inside {name!r}"
        if problem:
            if at:  # else without a name: the archive itself is at fault
                yield TarMember(name, at, 0, f"{problem}; the rest of the archive is not read")
            else:
                yield TarMember("", 0, 0, problem)
            return
        body, at = at + BLOCK_BYTES, at + BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES
        kind = header[156:157]
        if kind in b"xgLK":
            if size > _MAX_EXTENSION_BYTES:
                yield TarMember(name, body, 0, f"a tar header of {size} bytes")
                return
            if kind in b"xL":
                override |= _parse_extension(kind, os.pread(fd, size, body))
            continue
        is_sparse = any(key.startswith("GNU.sparse") for key in override)
        if kind in (b"0", b"\0", b"7") and not is_sparse:
            yield TarMember(name, body, size, _unsafe_name_reason(name))
        elif kind != b"5":  # a folder
            type_name = _TYPE_NAMES.get(kind, "a sparse or unknown member")
            yield TarMember(name, body, 0, f"not a file but {type_name}")
        override = {}


def _unsafe_name_reason(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        return "its path is outside the archive"
    return "its name is not UTF-8" if any("\udc80" <= c <= "\udcff" for c in name) else ""


def _check_header(header: bytes, at: int, end: int) -> tuple[str, int]:
    """The error of a header ("" if it is valid), and the size it states."""
    if len(header) < BLOCK_BYTES:
        return "the archive is truncated: it ends inside a header", 0
    stated_checksum = _parse_number(header[148:156])
    actual_checksum = sum(header) - sum(header[148:156]) + 8 * 0x20
    size = _parse_number(header[124:136])
    if stated_checksum != actual_checksum or size < 0:
        return f"no tar header at byte {at}" if at == 0 else f"damaged header at byte {at} of {end}", 0
    return "", size


def _parse_number(field: bytes) -> int:
    """A number in a header: octal text, or binary if the first bit is set (GNU, above 8 GiB)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
    text = field.split(b"\0")[0].strip()
    return int(text, 8) if text and all(c in b"01234567" for c in text) else (0 if not text else -1)


def _header_name(header: bytes) -> str:
    name = header[:100].split(b"\0")[0]
    prefix = header[345:500].split(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return _decode_name(prefix + b"/" + name if prefix else name)


def _parse_extension(kind: bytes, content: bytes) -> dict[str, str]:
    """The fields that a long-name or pax header sets for the next member."""
    if kind == b"L":
        return {"path": _decode_name(content.split(b"\0")[0])}
    records: dict[str, str] = {}
    while content:
        length, _, _ = content.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(content):
            break
        key, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        records[_decode_name(key)] = _decode_name(value)
        content = content[int(length) :]
    return records


def _decode_name(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")

"""Writes files durably: temporary name, fsync, rename. A reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from supertuner.core.types import JSON


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Replace `path` with `content`. The temporary file is in the same folder and is removed on failure."""
    write_chunks(path, (content,))


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replace `path` with the concatenated chunks; only one chunk has to be in memory at a time."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            for chunk in chunks:
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)  # the error of a full disk does not name the file
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: JSON) -> None:
    """Replace `path` with `value` as JSON. Surrogates, from file names that are not UTF-8, are written as JSON escapes
    and read back unchanged."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode(errors="backslashreplace"))


def sync_folder(folder: Path) -> None:
    """Sync the folder, so that a rename inside it survives a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def resolve_inside(root: Path, relative: str) -> Path | None:
    """`root / relative` with symbolic links resolved, if that is inside `root`; else None."""
    joined = (root / relative).resolve()
    return joined if joined.is_relative_to(root.resolve()) else None

"""Writing what lasts: temporary name, sync, rename. A reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from supertuner.core.types import JSON


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Replace `path` with `content`, durably. The temporary file lies beside it and is gone afterwards."""
    write_chunks(path, (content,))


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """The same with content that comes in parts, of which no more than one needs to be in memory."""
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
            error.filename = str(path)  # a full disk does not say of which file
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: JSON) -> None:
    """A file name that is not UTF-8 has surrogates in it: they become JSON's own escapes, and are read back as such."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode(errors="backslashreplace"))


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def resolve_inside(root: Path, relative: str) -> Path | None:
    """`root / relative` if it stays inside `root` once links are followed, else None."""
    joined = (root / relative).resolve()
    return joined if joined.is_relative_to(root.resolve()) else None

"""Writes files durably: temporary name, fsync, rename. A reader sees the old file or the new one, never a part."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from supertuner.core.types import JSON

FILE_MODE = 0o666
"""Permissions of new files before the umask."""


def open_plain_file(path: Path, flags: int) -> int:
    """Open or create a file for writing. A link is not followed, and what is not a plain file is refused: OSError."""
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link, which is not followed for writing", str(path)) from error
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a plain file", str(path))


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Replace `path` with `content`. The temporary file is in the same folder and is removed on failure."""
    write_chunks(path, (content,))


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replace `path` with the concatenated chunks; only one chunk has to be in memory at a time."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with os.fdopen(handle, "wb") as out:
            for chunk in chunks:
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):  # an interrupt came after the rename
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

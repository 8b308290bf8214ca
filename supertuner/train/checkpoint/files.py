"""The files of a checkpoint, opened where they are and nowhere else, and checked against what its manifest says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from supertuner.core.events import ProgressPhase
from supertuner.train.checkpoint.manifest import FileFacts, damaged_checkpoint, open_regular_file

READ_BYTES = 4 << 20


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """The folder itself, so that what is opened in it cannot be elsewhere."""
    try:
        folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else str(error.strerror)
        raise damaged_checkpoint(path, f"is not a checkpoint's folder: {reason}") from error
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


@contextmanager
def open_file(folder_fd: int, file: Path) -> Iterator[int]:
    fd = open_regular_file(folder_fd, file.name, file)
    try:
        yield fd
    except OSError as error:
        raise damaged_checkpoint(file, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def check_size(fd: int, file: Path, facts: FileFacts) -> None:
    size = os.fstat(fd).st_size
    if size != facts.nbytes:
        raise damaged_checkpoint(file, f"it has {size} bytes, {facts.nbytes} were written")


def check_content(fd: int, file: Path, facts: FileFacts, phase: ProgressPhase) -> None:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(READ_BYTES, facts.nbytes)))
    at = 0
    while count := os.preadv(fd, [buffer], at) if buffer else 0:
        digest.update(buffer[:count])
        at += count
        phase.advance(nbytes=count)
    check_digest(file, digest.hexdigest(), facts)


def check_digest(file: Path, checksum: str, facts: FileFacts) -> None:
    if checksum != facts.checksum:
        raise damaged_checkpoint(
            file, f"it is not what was written: its checksum is {checksum}, written was {facts.checksum}"
        )

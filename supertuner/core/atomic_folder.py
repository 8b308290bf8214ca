"""Writes a folder atomically (samples, exports, merged models): hidden, then renamed, so that it is complete or absent.

The caller syncs the files that it writes; the folder itself is synced here.

.writing-NAME     being written, or being removed; after a kill, the next write removes it
.replaced-NAME    an earlier folder of that name, until the new one has it; after a kill in between, it is restored
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from supertuner.core.durable import sync_folder
from supertuner.core.errors import TrainError
from supertuner.core.interrupts import raise_lost_interrupt

WRITING_PREFIX, REPLACED_PREFIX = ".writing-", ".replaced-"


@contextmanager
def atomic_folder(parent: Path, name: str, is_same: Callable[[Path, Path], bool]) -> Iterator[Path]:
    """Yield a hidden folder to fill; afterwards it becomes `parent / name`, unless `is_same(existing, new)`.

    If the block raises, nothing is left behind, and an existing folder stays.
    """
    new, target = parent / f"{WRITING_PREFIX}{name}", parent / name
    with explain_write_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        finish_interrupted_writes(parent)
        new.mkdir()
    try:
        yield new
        raise_lost_interrupt()  # it may have left a file incomplete
        with explain_write_errors(parent):
            sync_folder(new)
            if not (target.is_dir() and is_same(target, new)):
                _publish(parent, new, name)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # the next write removes what cannot be removed now


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn OSError into TrainError."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise TrainError(f"{where} cannot be written: {error.strerror}; free some space, or check its owner") from error


def finish_interrupted_writes(parent: Path) -> None:
    """Clean up after a killed write."""
    for entry in sorted(parent.iterdir()):
        if entry.name.startswith(WRITING_PREFIX):
            shutil.rmtree(entry)
        elif entry.name.startswith(REPLACED_PREFIX):
            target = parent / entry.name.removeprefix(REPLACED_PREFIX)
            if target.exists():
                shutil.rmtree(entry)
            else:
                os.rename(entry, target)


def remove_folder(parent: Path, name: str) -> None:
    """Remove the folder `parent / name`, hidden first, so that no incomplete folder is ever found under its name."""
    hidden = parent / f"{WRITING_PREFIX}{name}"
    os.rename(parent / name, hidden)
    sync_folder(parent)
    shutil.rmtree(hidden)


def _publish(parent: Path, new: Path, name: str) -> None:
    target, old = parent / name, parent / f"{REPLACED_PREFIX}{name}"
    if target.exists():
        os.rename(target, old)  # after a kill before the next line, `finish_interrupted_writes` undoes this
    os.rename(new, target)
    sync_folder(parent)
    if old.exists():
        shutil.rmtree(old)

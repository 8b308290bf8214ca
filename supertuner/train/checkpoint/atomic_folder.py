"""A folder that appears whole or not at all: written under a hidden name, synced, renamed into place.

.writing-NAME     being written; left by a kill, and removed by the next who writes
.replaced-NAME    an earlier folder of that name, until the new one has it; a kill between the two gives it back
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from supertuner.core.durable import sync_folder
from supertuner.core.errors import TrainError

WRITING_PREFIX, REPLACED_PREFIX = ".writing-", ".replaced-"


@contextmanager
def atomic_folder(parent: Path, name: str, is_same: Callable[[Path, Path], bool]) -> Iterator[Path]:
    """Yield a hidden folder to fill; then it becomes `parent / name`, unless `same(there, new)` and there is no need.

    If filling fails, nothing is left behind, and what was there stays.
    """
    new, target = parent / f"{WRITING_PREFIX}{name}", parent / name
    with explain_write_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        finish_interrupted_writes(parent)
        new.mkdir()
    try:
        yield new
        with explain_write_errors(parent):
            sync_folder(new)
            if not (target.is_dir() and is_same(target, new)):
                _publish(parent, new, name)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # what cannot be removed now is removed by the next who writes


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """The system's refusal in our words."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise TrainError(f"{where} cannot be written: {error.strerror}; make room, or see who owns it") from error


def finish_interrupted_writes(parent: Path) -> None:
    """Finish what a kill interrupted."""
    for entry in sorted(parent.iterdir()):
        if entry.name.startswith(WRITING_PREFIX):
            shutil.rmtree(entry)
        elif entry.name.startswith(REPLACED_PREFIX):
            target = parent / entry.name.removeprefix(REPLACED_PREFIX)
            if target.exists():
                shutil.rmtree(entry)
            else:
                os.rename(entry, target)


def _publish(parent: Path, new: Path, name: str) -> None:
    target, old = parent / name, parent / f"{REPLACED_PREFIX}{name}"
    if target.exists():
        os.rename(target, old)  # a kill from here to the next line is undone by `sweep`
    os.rename(new, target)
    sync_folder(parent)
    if old.exists():
        shutil.rmtree(old)

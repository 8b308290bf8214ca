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

WRITING, REPLACED = ".writing-", ".replaced-"


@contextmanager
def new_folder(parent: Path, name: str, same: Callable[[Path, Path], bool]) -> Iterator[Path]:
    """Yield a hidden folder to fill; then it becomes `parent / name`, unless `same(there, new)` and there is no need.

    If filling fails, nothing is left behind, and what was there stays.
    """
    new, made = parent / f"{WRITING}{name}", parent / name
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        new.mkdir()
    try:
        yield new
        with writing(parent):
            sync_folder(new)
            if not (made.is_dir() and same(made, new)):
                _put_in_place(parent, new, name)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # what cannot be removed now is removed by the next who writes


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """The system's refusal in our words."""
    try:
        yield
    except OSError as error:
        where = error.filename or place
        raise TrainError(f"{where} cannot be written: {error.strerror}; make room, or see who owns it") from error


def sweep(parent: Path) -> None:
    """Finish what a kill interrupted."""
    for entry in sorted(parent.iterdir()):
        if entry.name.startswith(WRITING):
            shutil.rmtree(entry)
        elif entry.name.startswith(REPLACED):
            own = parent / entry.name.removeprefix(REPLACED)
            if own.exists():
                shutil.rmtree(entry)
            else:
                os.rename(entry, own)


def _put_in_place(parent: Path, new: Path, name: str) -> None:
    made, old = parent / name, parent / f"{REPLACED}{name}"
    if made.exists():
        os.rename(made, old)  # a kill from here to the next line is undone by `sweep`
    os.rename(new, made)
    sync_folder(parent)
    if old.exists():
        shutil.rmtree(old)

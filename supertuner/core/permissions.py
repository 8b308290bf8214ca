"""Gives files that libraries made the permissions of new files, those that the umask leaves."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o666, 0o777
"""Permissions of new files and folders before the umask."""


def follow_umask(folder: Path) -> None:
    """Set the permissions of all files below a folder. Safetensors makes files that only their owner can read."""
    mode = FILE_MODE & ~_umask(folder)
    for parent, _, names in os.walk(folder):
        for name in names:
            os.chmod(Path(parent) / name, mode)


def _umask(folder: Path) -> int:
    """The process's umask, from a new folder: `os.umask` would change it for a moment, for all threads."""
    with tempfile.TemporaryDirectory(dir=folder) as probe:
        os.mkdir(made := Path(probe) / "new", FOLDER_MODE)
        return FOLDER_MODE & ~made.stat().st_mode

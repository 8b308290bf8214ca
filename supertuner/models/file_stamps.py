"""Stamps of a model's files: whatever is read from them is unchanged while the stamps are. Needs no library."""

from __future__ import annotations

from pathlib import Path

from supertuner.config.settings.model import ModelSettings
from supertuner.config.sources.environment import current_environment
from supertuner.config.sources.hub_datasets import hub_cache_folder
from supertuner.core.types import JSON


def model_file_stamps(settings: ModelSettings) -> list[JSON]:
    """Name, size and time of change of every file of the model on this machine: in its folder, or in the hub's cache.

    Empty if it has no files here.
    """
    files = list(settings.single_files.values())
    if settings.path is not None:
        folder = Path(settings.path).expanduser()
        if not folder.is_dir():
            folder = hub_cache_folder(current_environment()) / f"models--{settings.path.replace('/', '--')}"
        files += sorted(folder.rglob("*"))
    return [_stamp(file) for file in files]


def _stamp(file: Path) -> JSON:
    try:
        status = file.stat()
    except OSError:
        return [str(file), None, None]  # missing, or a link to a file that is
    return [str(file), status.st_size, status.st_mtime_ns]

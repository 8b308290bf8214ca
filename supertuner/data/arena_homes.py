"""Which folder a dataset's arena lives in: memory for `in_memory`, a disk for `disk`."""

from __future__ import annotations

from pathlib import Path

from supertuner.arena.home import ArenaHome, default_home
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig


def dataset_home_path(dataset: DatasetSettings, config: RunConfig) -> Path:
    """The configured home of this type of dataset, or the default one."""
    if dataset.type == "in_memory":
        return config.arena.home or default_home()
    return config.arena.disk_home or config.run.output_dir / "arenas"


def dataset_home(dataset: DatasetSettings, config: RunConfig) -> ArenaHome:
    return ArenaHome(dataset_home_path(dataset, config))

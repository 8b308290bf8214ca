"""Finds a dataset's arenas: the home it is staged to, the arena of a source that is gone, and older versions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from supertuner.arena.arena_info import ArenaInfo
from supertuner.arena.home import ArenaHome, default_home
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import LoadedConfig
from supertuner.core.errors import ConfigError
from supertuner.data.sources import open_source
from supertuner.data.staging.fingerprint import STAGED_VERSION, arena_name, dataset_fingerprint, origin_digest


def dataset_home_path(dataset: DatasetSettings, config: RunConfig) -> Path:
    """The folder of the dataset's arena: in memory for `type: in_memory`, on a disk for `type: disk`."""
    if dataset.type == "in_memory":
        return config.arena.home or default_home()
    return config.arena.disk_home or config.run.output_dir / "arenas"


def is_source_gone(source: Path) -> bool:
    """Whether nothing is at this path, or only an empty folder, which is what an unmounted mount point looks like."""
    if not os.path.isdir(source):
        return not os.path.exists(source)
    with os.scandir(source) as entries:
        return next(entries, None) is None


def find_staged_arena(home: Path, dataset: DatasetSettings) -> ArenaInfo | None:
    """The newest arena in `home` that was staged from this dataset's source with these settings, if the source is gone
    now (moved, unmounted or removed). None if the source is there, or if there is no such arena."""
    source = dataset.instance_data_dir
    if source is None or not is_source_gone(source) or not home.is_dir():
        return None
    version, origin = STAGED_VERSION, origin_digest(dataset)
    expected_meta = {"holds": "staged dataset", "version": version, "dataset": dataset.id, "origin": origin}
    candidates = _sealed_with(ArenaHome(home).list_arenas(), expected_meta)
    return max(candidates, key=lambda arena: arena.created or 0.0, default=None)


def find_current_arena(home: Path, dataset: DatasetSettings) -> str:
    """Name of the arena that a run would use now, which need not exist. Lists the source, if it is there, and reads no
    file of it. Raises SourceError if the source is gone and no arena holds it, or if it cannot be listed."""
    staged_arena = find_staged_arena(home, dataset)
    if staged_arena is not None:
        return staged_arena.name
    return arena_name(dataset.id, dataset_fingerprint(dataset, open_source(dataset).fingerprint_parts()))


def require_paths(loaded: LoadedConfig) -> None:
    """Raise ConfigError if a folder of the configuration is missing, unless an arena holds a dataset whose source is
    gone."""
    homes = [(dataset_home_path(dataset, loaded.config), dataset) for dataset in loaded.config.datasets]
    if loaded.path_problems and all(find_staged_arena(home, dataset) is None for home, dataset in homes):
        raise ConfigError(loaded.source_name, loaded.path_problems)


def find_older_versions(arenas: Sequence[ArenaInfo], dataset: DatasetSettings, name: str) -> list[ArenaInfo]:
    """Sealed arenas, other than `name`, that hold this dataset as it was before its files or settings changed.

    Other projects on this node may use the same id, so only arenas staged from the same path count.
    """
    expected_meta = {"dataset": dataset.id, "source": str(dataset.instance_data_dir)}
    return [arena for arena in _sealed_with(arenas, expected_meta) if arena.name != name]


def _sealed_with(arenas: Sequence[ArenaInfo], expected_meta: Mapping[str, object]) -> list[ArenaInfo]:
    sealed = [arena for arena in arenas if arena.state == "sealed"]
    return [arena for arena in sealed if expected_meta.items() <= dict(arena.meta or {}).items()]

"""What was staged from a source that is gone now: moved away, unmounted, removed. The arena holds all of it."""

from __future__ import annotations

import os
from pathlib import Path

from supertuner.arena.arena_info import ArenaInfo
from supertuner.arena.home import ArenaHome
from supertuner.config.settings.data import DatasetSettings
from supertuner.data.staging.fingerprint import STAGED_VERSION, origin_digest


def is_source_gone(source: Path) -> bool:
    """Nothing there, or an empty folder: that is what a mount point is while nothing is mounted."""
    if not os.path.isdir(source):
        return not os.path.exists(source)
    with os.scandir(source) as entries:
        return next(entries, None) is None


def find_staged_arena(home: Path, dataset: DatasetSettings) -> ArenaInfo | None:
    """The newest arena in `home` that was staged from this dataset's source with these settings, if that is gone."""
    source = dataset.instance_data_dir
    if source is None or not is_source_gone(source) or not home.is_dir():
        return None
    expected_meta = {
        "holds": "staged dataset",
        "version": STAGED_VERSION,
        "dataset": dataset.id,
        "origin": origin_digest(dataset),
    }
    candidates = [
        one
        for one in ArenaHome(home).list_arenas()
        if one.state == "sealed" and expected_meta.items() <= dict(one.meta or {}).items()
    ]
    return max(candidates, key=lambda one: one.created or 0.0, default=None)

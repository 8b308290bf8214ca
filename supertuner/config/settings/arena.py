"""Settings of the memory that all processes of a node share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock


class ArenaSettings(SettingsBlock):
    home: Path | None = None
    """Folder for datasets of type "in_memory"; unset: a folder of this user's on tmpfs, /dev/shm/supertuner-<uid>."""
    disk_home: Path | None = None
    """Folder for datasets of type "disk"; unset: `arenas` below `run.output_dir`."""
    verify: Literal["on_demand", "background", "always"] = "on_demand"
    """When payload checksums are checked: by `supertuner arena verify`, in the background after attaching, or before
    every first use. Headers and indexes are always checked."""
    keep: Literal["until_removed", "run"] | Annotated[float, Field(gt=0)] = "until_removed"
    """How long a staged dataset stays: until `supertuner arena rm`, as long as the run, or this many hours."""

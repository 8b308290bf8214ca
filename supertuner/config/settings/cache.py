"""Settings of the caches of encoded latents and text; the names are those of the seeds' `cache_config`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue


class CacheConfig(SettingsBlock):
    vae_cache_type: Literal["unified_memory", "disk", "none"] = "unified_memory"
    """Where encoded images, videos and sounds live: one shared copy in RAM, a mapped file, or nowhere."""
    text_cache_type: Literal["unified_memory", "disk", "none"] = "unified_memory"
    """Where encoded captions live: one shared copy in RAM, a mapped file, or nowhere."""
    cache_dir: Path | None = None
    """Folder of persistent caches; unset: `cache` below `run.output_dir`."""
    persistent_cache: bool = False
    """Keep what was encoded in `cache_dir`, so that the next run need not encode it again."""

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.persistent_cache and self.vae_cache_type == self.text_cache_type == "none":
            yield SettingsIssue("persistent_cache", "has no effect: there is no cache to keep")
        elif self.cache_dir is not None and not self.persistent_cache:
            yield SettingsIssue("cache_dir", "has no effect while persistent_cache is false")


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

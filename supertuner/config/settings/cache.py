"""Settings of the caches of encoded latents and text (named as in the GH200 forks) and of staged datasets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue


class CacheConfig(SettingsBlock):
    vae_cache_type: Literal["unified_memory", "disk", "none"] = "unified_memory"
    """Where encoded images, videos and sounds are cached: in one copy in shared RAM, in a mapped file, or not at
    all."""
    text_cache_type: Literal["unified_memory", "disk", "none"] = "unified_memory"
    """Where encoded captions are cached: in one copy in shared RAM, in a mapped file, or not at all."""
    cache_dir: Path | None = None
    """Folder of persistent caches. Unset: `cache` below `run.output_dir`."""
    persistent_cache: bool = False
    """Keep encoded samples in `cache_dir`, so that the next run does not encode them again."""

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.persistent_cache and self.vae_cache_type == self.text_cache_type == "none":
            yield SettingsIssue("persistent_cache", "has no effect: there is no cache to keep")
        elif self.cache_dir is not None and not self.persistent_cache:
            yield SettingsIssue("cache_dir", "has no effect while persistent_cache is false")


class ArenaSettings(SettingsBlock):
    home: Path | None = None
    """Folder for datasets of type "in_memory". Unset: the user's folder on tmpfs, /dev/shm/supertuner-<uid>."""
    disk_home: Path | None = None
    """Folder for datasets of type "disk". Unset: `arenas` below `run.output_dir`."""
    verify: Literal["on_demand", "background", "always"] = "on_demand"
    """When checksums of the data are verified: only by `supertuner arena verify`, in the background after attaching, or
    before the first use. Headers and indexes are always verified."""
    keep: Literal["until_removed", "run"] | Annotated[float, Field(gt=0)] = "until_removed"
    """How long a staged dataset stays: until `supertuner arena rm`, until the run ends, or this many hours."""

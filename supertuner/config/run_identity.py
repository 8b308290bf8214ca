"""What makes a run the run it is: the settings that decide what comes out of it, where they are not the defaults.

A run goes on under its name if these are the same. A setting that a later version adds does not count while it is at
its default, and where memory is, how many threads work and what is reported may change between two sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from supertuner.config.sources import key_path as places

CHANGEABLE_SETTINGS: Final = (
    "checkpoints.in_background",
    "datasets[].in_memory.num_workers",
    "forecast",
    "loader.num_workers",
    "loader.prefetch_batches",
    "memory",
    "parallel",
    "plan",
    "report",
    "gh200_optimizations.enable_uvm_hints",
)
"""Settings, and blocks of them, that change nothing of what is trained; list positions are left out."""


@cache
def setting_defaults() -> Mapping[str, Any]:
    """Setting, list positions left out (`datasets[].resolution`) → its default as JSON; not those that have none."""
    settings = places.settings()
    return {pattern: setting.schema["default"] for pattern, setting in settings.items() if "default" in setting.schema}

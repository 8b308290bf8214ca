"""Settings of a run as a whole: its name, its folder, its seed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock

_NAME = {"allowed": "text of letters, digits, spaces and . _ - that starts with a letter or digit"}


class RunSettings(SettingsBlock):
    name: Annotated[
        str | None, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$", json_schema_extra=_NAME)
    ] = None
    """Name of the run, and of its folder below `output_dir`; unset: the file's name and a digest of its settings."""
    output_dir: Path = Path("runs")
    """Folder that holds run folders; made when needed."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Order of samples, augmentation and captions are pure functions of this number, the epoch and the sample."""

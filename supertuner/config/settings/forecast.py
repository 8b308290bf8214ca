"""Settings of the forecast that a run makes of itself before it begins."""

from __future__ import annotations

from typing import Literal

from supertuner.config.settings.block import SettingsBlock


class ForecastSettings(SettingsBlock):
    before_training: Literal["auto", "always", "never"] = "auto"
    """Work out whether the run fits into memory before anything is loaded, and say so in one line; "auto": on a GPU,
    and on a CPU where the model is not small beside its memory."""
    refuse: bool = True
    """End a run that cannot fit before it begins; otherwise it is only warned about."""

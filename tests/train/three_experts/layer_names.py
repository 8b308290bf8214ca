"""Layer names of the family: those of Wan."""

from __future__ import annotations

from dataclasses import replace

from supertuner.models.families.wan22 import layer_names

LAYERS = replace(layer_names.LAYERS, family="three-stages")

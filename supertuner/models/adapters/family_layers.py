"""The layer names of every family, from the families' folders. Imports neither torch nor diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from supertuner.config.families import FAMILIES, layers_of
from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys_modules import FamilyLayers


def _load_layers(package: str) -> FamilyLayers:
    layers = import_module(f"{package}.layer_names").LAYERS
    assert isinstance(layers, FamilyLayers)
    return layers


FAMILY_LAYERS: Final[Mapping[str, FamilyLayers]] = {
    name: _load_layers(record.package) for name, record in FAMILIES.items() if record.same_layers_as is None
}
"""By family, in order of preference for files that fit several. A family that shares its layers has no entry."""


def family_layers(family: str) -> FamilyLayers:
    """The layers of this family, or of the one whose layers it shares. Raises ModelError for an unknown family."""
    if family not in FAMILIES:
        raise ModelError(f"the family is {family!r}; use one of {', '.join(FAMILIES)}")
    return FAMILY_LAYERS[layers_of(family)]

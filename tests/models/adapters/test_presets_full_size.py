"""The presets of adapter targets on the published architectures, on the meta device."""

from __future__ import annotations

import pytest
from torch import nn

from supertuner.models.family_loader import load_family
from tests.models.adapters.architectures import FAMILIES, architecture


def named(module: nn.Module, endings: tuple[str, ...]) -> set[str]:
    return {name for name, _ in module.named_modules() if any(f".{name}".endswith(f".{one}") for one in endings)}


def layers(module: nn.Module, *kinds: type[nn.Module]) -> set[str]:
    return {name for name, layer in module.named_modules() if isinstance(layer, kinds)}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "wan2.2"])  # its table includes layers of Wan2.1
def test_presets_have_only_linear_layers_and_all_linear_has_all_of_them(name: str) -> None:
    module, targets = architecture(name), load_family(name).target_presets
    linear = layers(module, nn.Linear)
    found = [named(module, tuple(targets[preset])) for preset in ("attention", "attention_mlp", "all_linear")]
    assert set() < found[0] < found[1] < found[2] == linear


def test_sdxl_has_794_layers_of_which_51_are_convolutions() -> None:
    module = architecture("sdxl")
    found = named(module, tuple(load_family("sdxl").target_presets["all_layers"]))
    assert found == layers(module, nn.Linear, nn.Conv2d)
    assert (len(found), len(layers(module, nn.Conv2d))) == (794, 51)

"""An adapter that exists already: where a new one begins, or frozen below it.

Its tensors come by layer, under diffusers' names, and are called as LyCORIS calls them. Nothing is dropped unnoticed:
layers that are not there and tensors that do not fit are refused, with what would mend it, and change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models.adapters import lycoris as adapters_lycoris
from supertuner.models.adapters.attach import Trained, attach, load_state, state
from supertuner.models.adapters.keys_schemes import ALPHA
from supertuner.models.adapters.layers import layers_of, some
from supertuner.models.adapters.merge import changes_bias, merged_bias, merged_weight
from supertuner.models.spec import Tensors

OURS: Final = {
    "lora_A.weight": "lora_down.weight",
    "lora_B.weight": "lora_up.weight",
    "lora_magnitude_vector.weight": "dora_scale",
}
"""What peft calls a tensor → what LyCORIS does."""


class Given(NamedTuple):
    """A file that was read for one expert."""

    path: Path
    layers: Mapping[str, Tensors]
    digest: str
    """What its tensors are known by, whatever they are called in it."""


def start(trained: Trained, layers: Mapping[str, Tensors], path: Path) -> str:
    """Give the new adapter the values of the file; how many layers, for the log. It must be of the same kind and size;
    alpha may differ, and what the adapter adds stays the same."""
    load_state(trained, _values(trained, layers, path, state(trained)))
    return f"{len(layers)} of {len(trained.layers)} layers begin with the values of {path}"


def try_start(module: nn.Module, settings: AdapterSettings, targets: Sequence[str], name: str, given: Given) -> None:
    """Refuse what `start` would, on a module without weights. It is changed, and of no use afterwards."""
    if settings.type == "diff":  # attaching copies weights, and there are none
        layers = layers_of(module, settings, targets, name)
        own = {key: one for layer in layers for key, one in module.get_submodule(layer).named_parameters(layer)}
        trained = Trained(name, "diff", module, own, layers)
    else:
        trained = attach(module, settings, targets, seed=0, name=name)
    _values(trained, _without_numbers(given.layers), given.path, trained.parameters)


def try_freeze(module: nn.Module, given: Given) -> None:
    """Refuse what `freeze` would, on a module without weights."""
    freeze(module, _without_numbers(given.layers), given.path)


def _without_numbers(layers: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """The tensors' shapes; alpha is kept, because what is computed depends on it."""
    return {
        layer: {name: one if name == ALPHA else one.to("meta") for name, one in tensors.items()}
        for layer, tensors in layers.items()
    }


def _values(trained: Trained, layers: Mapping[str, Tensors], path: Path, now: Mapping[str, torch.Tensor]) -> Tensors:
    """What the trained parameters begin with: by the file, else as they are now."""
    unknown = [layer for layer in layers if layer not in trained.layers]
    if unknown:
        raise ModelError(
            f"{path} has {len(unknown)} layers that are not trained ({some(unknown, 3)}); say adapter.targets so that "
            "they are, or put the file below as adapter.frozen"
        )
    values = {**now}
    left = {layer: set(tensors) - {ALPHA} for layer, tensors in layers.items()}
    for name in values:
        layer, called = _own_name(name, trained)
        if layer in layers:
            values[name] = _value(trained, layer, called, layers[layer], values[name], path)
            left[layer].discard(called)
    over = [f"{layer}: {', '.join(sorted(names))}" for layer, names in left.items() if names]
    if over:
        raise ModelError(
            f"{path} does not fit the adapter, which has no place for {some(over, 3)}; set adapter.type, dora and "
            "modules as it was trained, or put the file below as adapter.frozen"
        )
    return values


def freeze(module: nn.Module, layers: Mapping[str, Tensors], path: Path) -> str:
    """Add the file's adapter to the weights of the module, in fp32 and rounded once; how many layers, for the log."""
    known = dict(module.named_modules())
    unknown = [layer for layer in layers if getattr(known.get(layer), "weight", None) is None]
    if unknown:
        raise ModelError(
            f"{path} has {len(unknown)} layers that the model has not ({some(unknown, 3)}); it is of another model"
        )
    bare = [key for key, own in layers.items() if changes_bias(own) and getattr(known[key], "bias", None) is None]
    if bare:
        raise ModelError(
            f"{path} changes the bias of {len(bare)} layers that have none ({some(bare, 3)}); it is of another model"
        )
    with torch.no_grad():
        for key, tensors in layers.items():
            layer: Any = known[key]
            device = layer.weight.device
            given = {name: one if name == ALPHA else one.to(device) for name, one in tensors.items()}
            try:
                layer.weight.copy_(merged_weight(layer.weight, given, key))
                if changes_bias(given):
                    layer.bias.copy_(merged_bias(layer.bias, given, key))
            except ModelError as error:
                raise ModelError(f"{path}: {error}; the file is damaged, or of another model") from error
    return f"{path} is frozen below what is trained, on {len(layers)} layers"


def _own_name(name: str, trained: Trained) -> tuple[str, str]:
    """A trained parameter as (its layer, what LyCORIS calls it)."""
    layer = next(key for key in _beginnings(name) if key in trained.layers)
    called = name.removeprefix(f"{layer}.")
    if trained.kind == "diff":
        return layer, {"weight": "diff", "bias": "diff_b"}[called]
    return layer, OURS.get(called, called)


def _beginnings(name: str) -> Sequence[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _value(trained: Trained, layer: str, called: str, tensors: Tensors, now: torch.Tensor, path: Path) -> torch.Tensor:
    given = tensors.get(called)
    if given is None and called == "diff_b":
        return now
    if given is None or given.numel() != now.numel() or (given.dim() == now.dim() and given.shape != now.shape):
        there = [f"{name} {list(one.shape)}" for name, one in tensors.items()]
        raise ModelError(
            f"{path} does not fit the adapter: {layer} needs {called} {list(now.shape)}, and the file has "
            f"{some(there, 4)}; set adapter.type, rank, dora and modules as it was trained"
        )
    if trained.kind == "diff":
        return now + given.reshape(now.shape)
    if called in adapters_lycoris.SCALED:
        own = trained.layers[layer].scale
        if trained.kind != "lora":
            adapter: Any = trained.module.get_submodule(f"{layer}.{adapters_lycoris.INSIDE}")
            own = adapter.scale
        scale = _scale(tensors) / own
        given = given if scale == 1.0 else given * scale
    return given.reshape(now.shape)


def _scale(tensors: Tensors) -> float:
    """alpha / rank of a file; whole Kronecker factors have no rank, and no scale."""
    ranked = ("lora_down.weight", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
    rank = next((tensors[name].shape[0] for name in ranked if name in tensors), None)
    return 1.0 if rank is None or ALPHA not in tensors else float(tensors[ALPHA]) / rank

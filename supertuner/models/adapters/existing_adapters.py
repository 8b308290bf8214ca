"""Uses an existing adapter file: as initial values of a new adapter, or merged into the frozen weights.

The tensors are grouped by layer, with the layer names of diffusers and the tensor names of LyCORIS. Nothing is ignored:
unknown layers and tensors that do not fit raise ModelError with the remedy, before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models.adapters import lycoris
from supertuner.models.adapters.attach import TrainableExpert, attach, load_trainable_state, trainable_state
from supertuner.models.adapters.keys_schemes import ALPHA
from supertuner.models.adapters.layers import select_layers, summarize_names
from supertuner.models.adapters.merge import changes_bias, merged_bias, merged_weight
from supertuner.models.library_guards import exclusive_construction
from supertuner.models.spec import Tensors

PEFT_TO_LYCORIS: Final = {
    "lora_A.weight": "lora_down.weight",
    "lora_B.weight": "lora_up.weight",
    "lora_magnitude_vector.weight": "dora_scale",
}
"""Tensor name of peft → tensor name of LyCORIS."""


class ExistingAdapter(NamedTuple):
    """An adapter file as read for one expert."""

    path: Path
    layers: Mapping[str, Tensors]
    digest: str
    """A digest of its tensors that does not depend on their names in the file."""


def load_initial_values(expert: TrainableExpert, layers: Mapping[str, Tensors], path: Path) -> str:
    """Set the new adapter's parameters to the values of the file; return a line for the log.

    Type and size must be equal. Alpha may differ: the values are rescaled so that the adapter's output is the same.
    """
    load_trainable_state(expert, _initial_values(expert, layers, path, trainable_state(expert)))
    return f"{len(layers)} of {len(expert.layers)} layers start from the values of {path}"


def check_initial_values(
    module: nn.Module, settings: AdapterSettings, targets: Sequence[str], name: str, adapter: ExistingAdapter
) -> None:
    """Raise the errors of `load_initial_values`, on a module without weights, which must not be used afterwards."""
    if settings.type == "diff":  # attaching copies weights, and there are none
        layers = select_layers(module, settings, targets, name)
        parameters = {key: p for layer in layers for key, p in module.get_submodule(layer).named_parameters(layer)}
        expert = TrainableExpert(name, "diff", module, parameters, layers)
    else:
        expert = attach(module, settings, targets, seed=0, name=name)
    _initial_values(expert, _shapes_only(adapter.layers), adapter.path, expert.parameters)


def check_merge_frozen(module: nn.Module, adapter: ExistingAdapter) -> None:
    """Raise the errors of `merge_frozen`, on a module without weights."""
    merge_frozen(module, _shapes_only(adapter.layers), adapter.path)


def _shapes_only(layers: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """The tensors on the meta device, except alpha, whose value determines the scale."""
    return {
        layer: {name: tensor if name == ALPHA else tensor.to("meta") for name, tensor in tensors.items()}
        for layer, tensors in layers.items()
    }


def _initial_values(
    expert: TrainableExpert, layers: Mapping[str, Tensors], path: Path, current: Mapping[str, torch.Tensor]
) -> Tensors:
    """The initial values of all trained parameters: from the file, or else their current values."""
    if unknown := [layer for layer in layers if layer not in expert.layers]:
        raise ModelError(
            f"{path} has {len(unknown)} layers that are not trained ({summarize_names(unknown, 3)}); extend "
            "adapter.targets to include them, or use the file as adapter.frozen"
        )
    values = {**current}
    unused = {layer: set(tensors) - {ALPHA} for layer, tensors in layers.items()}
    for name in values:
        layer, tensor_name = _lycoris_name(name, expert)
        if layer in layers:
            values[name] = _initial_value(expert, layer, tensor_name, layers[layer], values[name], path)
            unused[layer].discard(tensor_name)
    if leftovers := [f"{layer}: {', '.join(sorted(names))}" for layer, names in unused.items() if names]:
        raise ModelError(
            f"{path} does not fit the adapter, which has no parameters for {summarize_names(leftovers, 3)}; set "
            "adapter.type, dora and modules as in its training, or use the file as adapter.frozen"
        )
    return values


@exclusive_construction()
def merge_frozen(module: nn.Module, layers: Mapping[str, Tensors], path: Path) -> str:
    """Merge the file's adapter into the module's weights, in fp32 and rounded once; return a line for the log."""
    merge_layer = frozen_layer_merger(module, layers, path)
    for key in layers:
        merge_layer(key, module.get_submodule(key))
    return merge_summary(layers, path)


def merge_summary(layers: Mapping[str, Tensors], path: Path) -> str:
    """A line for the log."""
    return f"{path} is merged into the frozen weights of {len(layers)} layers"


def frozen_layer_merger(
    module: nn.Module, layers: Mapping[str, Tensors], path: Path, strength: float = 1.0
) -> Callable[[str, nn.Module], None]:
    """A function that merges the file's adapter into one layer of the module, with its name, on the layer's device.

    `strength` 1 is the adapter as trained, 0 leaves the weights as they are. ModelError now if the module lacks a
    weight or a bias that the file changes.
    """
    modules = dict(module.named_modules())
    if unknown := [layer for layer in layers if getattr(modules.get(layer), "weight", None) is None]:
        raise ModelError(
            f"{path} has {len(unknown)} layers that the model does not have ({summarize_names(unknown, 3)}); it "
            "belongs to another model"
        )
    biased = [key for key, tensors in layers.items() if changes_bias(tensors)]
    if missing := [key for key in biased if getattr(modules[key], "bias", None) is None]:
        raise ModelError(
            f"{path} changes the bias of {len(missing)} layers that have none ({summarize_names(missing, 3)}); it "
            "belongs to another model"
        )

    @torch.no_grad()
    def merge_layer(key: str, layer: Any) -> None:
        if key not in layers:
            return
        device = layer.weight.device
        tensors = {name: tensor if name == ALPHA else tensor.to(device) for name, tensor in layers[key].items()}
        try:
            layer.weight.copy_(merged_weight(layer.weight, tensors, key, strength))
            if changes_bias(tensors):
                layer.bias.copy_(merged_bias(layer.bias, tensors, key, strength))
        except ModelError as error:
            raise ModelError(f"{path}: {error}; the file is damaged or belongs to another model") from error

    return merge_layer


def _lycoris_name(name: str, expert: TrainableExpert) -> tuple[str, str]:
    """The layer of a trained parameter, and its tensor name in LyCORIS."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    layer = next(key for key in prefixes if key in expert.layers)
    tensor_name = name.removeprefix(f"{layer}.")
    if expert.adapter_type == "diff":
        return layer, {"weight": "diff", "bias": "diff_b"}[tensor_name]
    return layer, PEFT_TO_LYCORIS.get(tensor_name, tensor_name)


def _initial_value(
    expert: TrainableExpert, layer: str, tensor_name: str, tensors: Tensors, current: torch.Tensor, path: Path
) -> torch.Tensor:
    stored = tensors.get(tensor_name)
    if stored is None and tensor_name == "diff_b":
        return current
    fits = stored is not None and stored.numel() == current.numel()
    if stored is None or not fits or (stored.dim() == current.dim() and stored.shape != current.shape):
        stored_shapes = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()]
        raise ModelError(
            f"{path} does not fit the adapter: {layer} needs {tensor_name} {list(current.shape)}, but the file has "
            f"{summarize_names(stored_shapes, 4)}; set adapter.type, rank, dora and modules as in its training"
        )
    if expert.adapter_type == "diff":
        return current + stored.reshape(current.shape)
    if tensor_name in lycoris.SCALED_TENSORS:
        adapter: Any = expert.layers[layer]
        if expert.adapter_type != "lora":
            adapter = expert.module.get_submodule(f"{layer}.{lycoris.SUBMODULE_NAME}")
        scale = _file_scale(tensors) / adapter.scale
        stored = stored if scale == 1.0 else stored * scale
    return stored.reshape(current.shape)


def _file_scale(tensors: Tensors) -> float:
    """alpha / rank of a file; 1 without an alpha, and for full Kronecker factors, which have no rank."""
    rank_tensors = ("lora_down.weight", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
    rank = next((tensors[name].shape[0] for name in rank_tensors if name in tensors), None)
    return 1.0 if rank is None or ALPHA not in tensors else float(tensors[ALPHA]) / rank

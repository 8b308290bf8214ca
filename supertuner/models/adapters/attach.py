"""The trainable parameters of an expert: an adapter by peft or LyCORIS, or all weights; their state and their export.

attach ──► TrainableExpert ──► trainable_state, load_trainable_state   copies out and in; same parameter objects
                 ├───────────► temporary_weights                       other values (an average) inside a block
                 └───────────► export_tensors, save_full_weights       files that diffusers or lycoris-lora load
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils import swap_tensors

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.core.permissions import follow_umask
from supertuner.core.types import JSON
from supertuner.models.adapters import lora, lycoris
from supertuner.models.adapters.layers import (
    AdapterSize,
    resolve_targets,
    select_layers,
    settings_for_expert,
    summarize_names,
)
from supertuner.models.library_guards import exclusive_construction
from supertuner.models.meta_modules import MetaDeviceMode
from supertuner.models.spec import Tensors

__all__ = [
    "RowShard", "ShardedParameters", "TrainableExpert", "assign_values", "attach", "export_shapes", "export_tensors",
    "load_trainable_state", "resolve_targets", "save_full_weights", "select_layers", "settings_for_expert",
    "temporary_weights", "trainable_state",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowShard:
    """Which rows of a sharded tensor this process holds. Does not contain the data."""

    full_shape: tuple[int, ...]
    """The shape of the whole tensor."""
    first_row: int
    """The index of the first row. Their number is that of the local tensor, possibly 0."""


class ShardedParameters(Protocol):
    """The shards of a module (FSDP): each trained parameter is this process's rows of a whole parameter."""

    @property
    def row_shards(self) -> Mapping[str, RowShard]:
        """The shard of each trained parameter by name."""

    def mark_changed(self) -> None:
        """Call after writing into the parts: whole tensors gathered from them before are out of date."""

    def gather_full(self, name: str, part: torch.Tensor, /) -> torch.Tensor | None:
        """The whole tensor of which `part` is this process's shard, in host memory on the first process; None on the
        others. All processes must call it in the same order."""


@dataclass(frozen=True, eq=False, slots=True)
class TrainableExpert:
    """An expert's module and its trainable parameters."""

    name: str
    """The name of the expert."""
    adapter_type: Literal["lora", "locon", "loha", "lokr", "diff", "full"]
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """Name in the module (without the adapter's own name) → fp32 parameter, in the module's order."""
    layers: Mapping[str, AdapterSize] = field(default_factory=dict)
    """The layers with adapters, in the module's order; empty if all weights are trained."""
    note: str | None = None
    """A note for the user."""
    shards: ShardedParameters | None = None
    """The shards if the parameters are sharded over processes; None: they are whole."""


@exclusive_construction()
def attach(
    module: nn.Module, settings: AdapterSettings, targets: Sequence[str], *, seed: int, name: str
) -> TrainableExpert:
    """Attach the adapter that the settings of this expert describe, or make all weights trainable.

    Equal seeds give equal bits; torch's global random state does not change. `targets` are endings of module names and
    are ignored if all weights are trained.
    """
    if settings.type == "full":
        return _train_all_weights(module, name)
    layers = select_layers(module, settings, targets, name)
    if settings.type == "lora":
        trainable = lora.inject(module, settings, layers, seed=seed, name=name)
        return TrainableExpert(name, "lora", module, trainable, layers)
    if settings.type == "diff":
        _require_unquantized(module, layers, name, settings.type)
    trainable = lycoris.inject(module, settings, layers, seed=seed, name=name)
    return TrainableExpert(name, settings.type, module, trainable, layers, lycoris.full_matrix_note(module, layers))


def trainable_state(expert: TrainableExpert) -> Tensors:
    """Copies of the trained parameters on the CPU."""
    return {name: parameter.detach().to("cpu", copy=True).contiguous() for name, parameter in expert.parameters.items()}


def load_trainable_state(expert: TrainableExpert, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the values of all trained parameters from `tensors`, in place and to the bit.

    Raises ModelError, and changes nothing, if names, shapes or formats differ.
    """
    _check_tensors_fit(expert, tensors)
    _copy_values(expert, tensors)


def assign_values(expert: TrainableExpert, tensors: Mapping[str, torch.Tensor]) -> None:
    """Like `load_trainable_state`, for a module without weights: its trained parameters become these tensors."""
    _check_tensors_fit(expert, tensors)
    for name, parameter in expert.parameters.items():
        # `data` cannot be set: meta is another type of tensor.
        swap_tensors(parameter, nn.Parameter(tensors[name]))  # type: ignore[no-untyped-call]
    if expert.adapter_type not in ("lora", "full"):
        lycoris.restore_constants(expert.module, expert.layers)


@contextmanager
def temporary_weights(expert: TrainableExpert, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside the block the module computes with `values`. Afterwards it has its parameters back, unchanged."""
    _check_tensors_fit(expert, values)
    with _swapped_storage(expert, values) if expert.shards is None else _overwritten_in_place(expert, values):
        yield


def export_tensors(expert: TrainableExpert, prefix: str, settings: AdapterSettings) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of a .safetensors file: a LoRA for diffusers' `load_lora_weights`, other types for
    lycoris-lora's loader. The settings are those of this expert.

    Scales are multiplied into the tensors; the metadata records the rank and alpha of the training. (If all weights are
    trained, the tensors have no prefix; use `save_full_weights` for files.)
    """
    if expert.adapter_type == "full":
        return trainable_state(expert), {"format": "pt"}
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in _file_tensors(expert, prefix).items()}
    return tensors, {"format": "pt", "supertuner": json.dumps(_export_metadata(expert, settings))}


def export_shapes(
    module: nn.Module, settings: AdapterSettings, targets: Sequence[str], prefix: str
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `export_tensors` would return, from a module without weights, which must not
    be used afterwards."""
    if settings.type == "diff":  # attaching copies weights, and there are none
        layers = {key: module.get_submodule(key) for key in select_layers(module, settings, targets, "")}
        names = {"weight": "diff", "bias": "diff_b"}
        return {
            lycoris.file_key(key, names[name]): tuple(parameter.shape)
            for key, layer in layers.items()
            for name, parameter in layer.named_parameters()
        }
    with MetaDeviceMode():  # a large adapter would take seconds to initialize, and gigabytes
        tensors = _file_tensors(attach(module, settings, targets, seed=0, name=""), prefix)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _file_tensors(expert: TrainableExpert, prefix: str) -> Tensors:
    if expert.adapter_type == "lora":
        return lora.export_tensors({name: p.detach() for name, p in expert.parameters.items()}, expert.layers, prefix)
    return lycoris.export_tensors(expert.module, expert.layers)


def _export_metadata(expert: TrainableExpert, settings: AdapterSettings) -> dict[str, JSON]:
    facts: dict[str, JSON] = {"expert": expert.name, "type": expert.adapter_type}
    if expert.adapter_type == "diff":
        return facts
    alpha = float(settings.rank) if settings.alpha is None else settings.alpha
    facts |= {"rank": settings.rank, "alpha": alpha, "scale": "in the tensors"}
    facts |= {name: True for name in ("dora", "rslora") if getattr(settings, name)}
    if settings.modules:
        facts["ranks"] = {key: size.rank for key, size in expert.layers.items()}
    return facts


def save_full_weights(expert: TrainableExpert, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a fully trained module into a new folder for diffusers' `from_pretrained`, synced to disk.

    With sharded weights all processes must call it; the first one writes, and holds all weights in its host memory.
    """
    from diffusers import ModelMixin

    module = expert.module
    assert expert.adapter_type == "full" and isinstance(module, ModelMixin), expert.adapter_type
    values = {name: parameter.detach().to(dtype or parameter.dtype) for name, parameter in expert.parameters.items()}
    if expert.shards is not None:
        gathered = {name: expert.shards.gather_full(name, value) for name, value in values.items()}
        module = _unsharded_module(module, {name: value for name, value in gathered.items() if value is not None})
        if module is None:
            return
    folder.mkdir(parents=True)
    with _swapped_storage(expert, values) if expert.shards is None else nullcontext():
        module.save_pretrained(folder, safe_serialization=True)
    _remove_source_path(folder / "config.json")
    follow_umask(folder)
    for file in folder.iterdir():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)


@exclusive_construction()
def _unsharded_module(module: Any, values: Tensors) -> Any:
    """A module of the same class with these whole values; None if there are none, as on processes that do not write."""
    if not values:
        return None
    model_class: Any = next(base for base in type(module).__mro__ if base.__module__.startswith("diffusers."))
    with torch.device("meta"):
        unsharded = model_class.from_config(module.config)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in unsharded.state_dict()}
    unsharded.load_state_dict({**values, **buffers}, assign=True)
    return unsharded


def _remove_source_path(config: Path) -> None:
    """Remove the local path that diffusers writes into the config: the file may be published."""
    facts = json.loads(config.read_bytes())
    facts.pop("_name_or_path", None)
    config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


@contextmanager
def _swapped_storage(expert: TrainableExpert, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    originals = {name: parameter.data for name, parameter in expert.parameters.items()}
    try:
        for name, parameter in expert.parameters.items():
            parameter.data = values[name].detach().to(parameter.device)
        yield
    finally:
        for name, parameter in expert.parameters.items():
            parameter.data = originals[name]


@contextmanager
def _overwritten_in_place(expert: TrainableExpert, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Shards are views of memory that FSDP refers to by address, so values are copied instead of swapped."""
    originals = {name: parameter.detach().clone() for name, parameter in expert.parameters.items()}
    try:
        _copy_values(expert, values)
        yield
    finally:
        _copy_values(expert, originals)


@torch.no_grad()
def _copy_values(expert: TrainableExpert, values: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in expert.parameters.items():
        parameter.copy_(values[name])
    if expert.shards is not None:
        expert.shards.mark_changed()


def _train_all_weights(module: nn.Module, name: str) -> TrainableExpert:
    _require_unquantized(module, ("",), name, "full")
    module.float()
    module.requires_grad_(True)
    return TrainableExpert(name, "full", module, dict(module.named_parameters()))


def _require_unquantized(module: nn.Module, layers: Iterable[str], name: str, adapter_type: str) -> None:
    """Raise ModelError if a parameter of these layers is quantized, because it cannot be trained."""
    parameters = {key: p for layer in layers for key, p in module.get_submodule(layer).named_parameters(layer)}
    quantized = [key for key, parameter in parameters.items() if type(parameter.data) is not torch.Tensor]
    if quantized:
        raise ModelError(
            f'adapter.type is "{adapter_type}", but {len(quantized)} weights of {name} are 8-bit ({quantized[0]} …) '
            'and cannot be trained; set model.base_weights: "as_computed", or adapter.type: "lora"'
        )


def _check_tensors_fit(expert: TrainableExpert, tensors: Mapping[str, torch.Tensor]) -> None:
    expected = expert.parameters
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    problems = [f"{len(missing)} are missing ({summarize_names(missing, 3)})"] if missing else []
    problems += [f"{len(unexpected)} are unexpected ({summarize_names(unexpected, 3)})"] if unexpected else []
    for name in [name for name in expected if name in tensors]:
        actual, wanted = ((tuple(one[name].shape), one[name].dtype) for one in (tensors, expected))
        if actual != wanted:
            problems.append(f"{name} is {actual[0]} {actual[1]}, not {wanted[0]} {wanted[1]}")
    if problems:
        raise ModelError(
            f"the tensors do not match the trained parameters of {expert.name}: {'; '.join(problems[:4])}; they come "
            "from another model or other adapter settings (type, rank, targets)"
        )

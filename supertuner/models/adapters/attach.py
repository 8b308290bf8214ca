"""What is trained of an expert: an adapter by peft or LyCORIS, or all of its weights; its state, and what others load.

attach ──► Trained ──► state / load_state     copies out, copies in: the optimizer keeps its parameters
              ├──────► applied                other values (an average) for a while, then the same bits as before
              └──────► exported / save_full   files that diffusers or lycoris-lora load
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

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.core.types import JSON
from supertuner.models.adapters import lora, lycoris
from supertuner.models.adapters.layers import (
    AdapterSize,
    resolve_targets,
    select_layers,
    settings_for_expert,
    summarize_names,
)
from supertuner.models.spec import Tensors

__all__ = [
    "RowShard",
    "ShardedParameters",
    "TrainableExpert",
    "attach",
    "export_tensors",
    "load_trainable_state",
    "resolve_targets",
    "save_full_weights",
    "select_layers",
    "settings_for_expert",
    "temporary_weights",
    "trainable_state",
]


@dataclass(frozen=True, slots=True)
class RowShard:
    """Which part of a whole tensor is here: some of its rows, all there is of each."""

    full_shape: tuple[int, ...]
    """Of the whole tensor."""
    first_row: int
    """The first row that is here; how many there are, the part itself says. It may be none."""


class ShardedParameters(Protocol):
    """A module whose weights are shared out over processes: each trained parameter is this process's part of one."""

    @property
    def row_shards(self) -> Mapping[str, RowShard]:
        """Of each trained parameter, by name."""

    def mark_changed(self) -> None:
        """Somebody wrote into the parts: whatever was put together from them is out of date."""

    def gather_full(self, name: str, part: torch.Tensor, /) -> torch.Tensor | None:
        """A tensor of a parameter's shape put together in host memory, for the first process; None: this is another
        one. All processes call it, in the same order."""


@dataclass(frozen=True, eq=False, slots=True)
class TrainableExpert:
    """An expert's module and those of its parameters that learn."""

    name: str
    """The expert's."""
    adapter_type: Literal["lora", "locon", "loha", "lokr", "diff", "full"]
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """Name in the module (without the adapter's own name) → parameter in fp32, in the module's order."""
    layers: Mapping[str, AdapterSize] = field(default_factory=dict)
    """The layers that adapters are put on, in the module's order; all weights: none."""
    note: str | None = None
    """What the user should know."""
    shards: ShardedParameters | None = None
    """All weights, shared out over processes; None: what is trained is here as a whole."""


def attach(
    module: nn.Module, settings: AdapterSettings, targets: Sequence[str], *, seed: int, name: str
) -> TrainableExpert:
    """Make of `module` what the settings (of this expert) say. The same seed gives the same bits; the global random
    state stays.

    `targets` are endings of module names, and have a meaning only for an adapter.
    """
    if settings.type == "full":
        return _train_all_weights(module, name)
    layers = select_layers(module, settings, targets, name)
    if settings.type == "lora":
        return TrainableExpert(
            name, "lora", module, lora.inject(module, settings, layers, seed=seed, name=name), layers
        )
    if settings.type == "diff":
        _require_unquantized(module, layers, name, settings.type)
    trainable = lycoris.inject(module, settings, layers, seed=seed, name=name)
    return TrainableExpert(
        name, settings.type, module, trainable, layers, lycoris.full_matrix_note(module, layers)
    )


def trainable_state(expert: TrainableExpert) -> Tensors:
    """Copies of what is trained, on the CPU."""
    return {name: parameter.detach().to("cpu", copy=True).contiguous() for name, parameter in expert.parameters.items()}


def load_trainable_state(expert: TrainableExpert, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give every trained parameter its value from `tensors`, in place and to the bit, or change none of them."""
    _check_tensors_fit(expert, tensors)
    _copy_values(expert, tensors)


@contextmanager
def temporary_weights(expert: TrainableExpert, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Compute with `values` inside the block. The trained ones are set aside, and return unchanged."""
    _check_tensors_fit(expert, values)
    with _swapped_storage(expert, values) if expert.shards is None else _overwritten_in_place(expert, values):
        yield


def export_tensors(expert: TrainableExpert, prefix: str, settings: AdapterSettings) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of a .safetensors file: a LoRA as diffusers' `load_lora_weights` takes it, others as
    lycoris-lora's loader does. The settings are those of this expert.

    Scales are multiplied into the tensors; the metadata says which rank and alpha it was trained with. (All weights:
    they have no prefix, and belong in `save_full`.)
    """
    if expert.adapter_type == "full":
        return trainable_state(expert), {"format": "pt"}
    if expert.adapter_type == "lora":
        tensors = lora.export_tensors(trainable_state(expert), expert.layers, prefix)
    else:
        tensors = lycoris.export_tensors(expert.module, expert.layers)
    return tensors, {"format": "pt", "supertuner": json.dumps(_export_metadata(expert, settings))}


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
    """Write a fully trained module into a new folder that diffusers' `from_pretrained` takes, synced to the disk.

    Of weights that are shared out, all processes call it, and the first writes; its host memory holds all of them.
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
    for file in folder.iterdir():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)


def _unsharded_module(module: Any, values: Tensors) -> Any:
    """A module of the same kind that holds these values; None: there are none, another process has them."""
    if not values:
        return None
    model_class: Any = next(one for one in type(module).__mro__ if one.__module__.startswith("diffusers."))
    with torch.device("meta"):
        unsharded = model_class.from_config(module.config)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in unsharded.state_dict()}
    unsharded.load_state_dict({**values, **buffers}, assign=True)
    return unsharded


def _remove_source_path(config: Path) -> None:
    """Diffusers notes the folder that the module was loaded from: somebody's path, in a file that is given away."""
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
    """Parts are windows into memory that others know by its place: they cannot be swapped."""
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
    """8-bit weights cannot learn."""
    parameters = {key: own for layer in layers for key, own in module.get_submodule(layer).named_parameters(layer)}
    quantized = [key for key, parameter in parameters.items() if type(parameter.data) is not torch.Tensor]
    if quantized:
        raise ModelError(
            f'adapter.type is "{adapter_type}", but {len(quantized)} weights of {name} are 8-bit ({quantized[0]} …) and cannot '
            'learn; set model.base_weights: "as_computed", or adapter.type: "lora"'
        )


def _check_tensors_fit(expert: TrainableExpert, tensors: Mapping[str, torch.Tensor]) -> None:
    expected = expert.parameters
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    problems = [f"{len(missing)} are missing ({summarize_names(missing, 3)})"] if missing else []
    problems += [f"{len(unexpected)} do not belong there ({summarize_names(unexpected, 3)})"] if unexpected else []
    for name, parameter in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and (tensor.shape != parameter.shape or tensor.dtype != parameter.dtype):
            problems.append(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(parameter.shape)} {parameter.dtype}"
            )
    if problems:
        raise ModelError(
            f"tensors for {expert.name} do not fit what is trained of it: {'; '.join(problems[:4])}; they come from "
            "another model or other adapter settings (type, rank, targets)"
        )

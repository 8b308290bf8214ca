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
from supertuner.models.adapters import lora as adapters_lora
from supertuner.models.adapters import lycoris as adapters_lycoris
from supertuner.models.adapters.layers import Size, for_expert, layers_of, some, targets_of
from supertuner.models.spec import Tensors

__all__ = [
    "Parts",
    "Place",
    "Trained",
    "applied",
    "attach",
    "exported",
    "for_expert",
    "layers_of",
    "load_state",
    "save_full",
    "state",
    "targets_of",
]


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of a whole tensor is here: some of its rows, all there is of each."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    begin: int
    """The first row that is here; how many there are, the part itself says. It may be none."""


class Parts(Protocol):
    """A module whose weights are shared out over processes: each trained parameter is this process's part of one."""

    @property
    def places(self) -> Mapping[str, Place]:
        """Of each trained parameter, by name."""

    def changed(self) -> None:
        """Somebody wrote into the parts: whatever was put together from them is out of date."""

    def whole(self, name: str, part: torch.Tensor, /) -> torch.Tensor | None:
        """A tensor of a parameter's shape put together in host memory, for the first process; None: this is another
        one. All processes call it, in the same order."""


@dataclass(frozen=True, eq=False, slots=True)
class Trained:
    """An expert's module and those of its parameters that learn."""

    name: str
    """The expert's."""
    kind: Literal["lora", "locon", "loha", "lokr", "diff", "full"]
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """Name in the module (without the adapter's own name) → parameter in fp32, in the module's order."""
    layers: Mapping[str, Size] = field(default_factory=dict)
    """The layers that adapters are put on, in the module's order; all weights: none."""
    remark: str | None = None
    """What the user should know."""
    parts: Parts | None = None
    """All weights, shared out over processes; None: what is trained is here as a whole."""


def attach(module: nn.Module, settings: AdapterSettings, targets: Sequence[str], *, seed: int, name: str) -> Trained:
    """Make of `module` what the settings (of this expert) say. The same seed gives the same bits; the global random
    state stays.

    `targets` are endings of module names, and have a meaning only for an adapter.
    """
    if settings.type == "full":
        return _all_weights(module, name)
    layers = layers_of(module, settings, targets, name)
    if settings.type == "lora":
        return Trained(
            name, "lora", module, adapters_lora.inject(module, settings, layers, seed=seed, name=name), layers
        )
    if settings.type == "diff":
        _require_plain(module, layers, name, settings.type)
    parameters = adapters_lycoris.inject(module, settings, layers, seed=seed, name=name)
    return Trained(name, settings.type, module, parameters, layers, adapters_lycoris.remark(module, layers))


def state(trained: Trained) -> Tensors:
    """Copies of what is trained, on the CPU."""
    return {
        name: parameter.detach().to("cpu", copy=True).contiguous() for name, parameter in trained.parameters.items()
    }


def load_state(trained: Trained, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give every trained parameter its value from `tensors`, in place and to the bit, or change none of them."""
    _check_fit(trained, tensors)
    _write(trained, tensors)


@contextmanager
def applied(trained: Trained, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Compute with `values` inside the block. The trained ones are set aside, and return unchanged."""
    _check_fit(trained, values)
    with _swapped(trained, values) if trained.parts is None else _overwritten(trained, values):
        yield


def exported(trained: Trained, prefix: str, settings: AdapterSettings) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of a .safetensors file: a LoRA as diffusers' `load_lora_weights` takes it, others as
    lycoris-lora's loader does. The settings are those of this expert.

    Scales are multiplied into the tensors; the metadata says which rank and alpha it was trained with. (All weights:
    they have no prefix, and belong in `save_full`.)
    """
    if trained.kind == "full":
        return state(trained), {"format": "pt"}
    if trained.kind == "lora":
        tensors = adapters_lora.exported(state(trained), trained.layers, prefix)
    else:
        tensors = adapters_lycoris.exported(trained.module, trained.layers)
    return tensors, {"format": "pt", "supertuner": json.dumps(_trained_as(trained, settings))}


def _trained_as(trained: Trained, settings: AdapterSettings) -> dict[str, JSON]:
    facts: dict[str, JSON] = {"expert": trained.name, "type": trained.kind}
    if trained.kind == "diff":
        return facts
    alpha = float(settings.rank) if settings.alpha is None else settings.alpha
    facts |= {"rank": settings.rank, "alpha": alpha, "scale": "in the tensors"}
    facts |= {name: True for name in ("dora", "rslora") if getattr(settings, name)}
    if settings.modules:
        facts["ranks"] = {key: size.rank for key, size in trained.layers.items()}
    return facts


def save_full(trained: Trained, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a fully trained module into a new folder that diffusers' `from_pretrained` takes, synced to the disk.

    Of weights that are shared out, all processes call it, and the first writes; its host memory holds all of them.
    """
    from diffusers import ModelMixin

    module = trained.module
    assert trained.kind == "full" and isinstance(module, ModelMixin), trained.kind
    values = {name: parameter.detach().to(dtype or parameter.dtype) for name, parameter in trained.parameters.items()}
    if trained.parts is not None:
        put_together = {name: trained.parts.whole(name, value) for name, value in values.items()}
        module = _plain(module, {name: value for name, value in put_together.items() if value is not None})
        if module is None:
            return
    folder.mkdir(parents=True)
    with _swapped(trained, values) if trained.parts is None else nullcontext():
        module.save_pretrained(folder, safe_serialization=True)
    _forget_source(folder / "config.json")
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    sync_folder(folder)


def _plain(module: Any, values: Tensors) -> Any:
    """A module of the same kind that holds these values; None: there are none, another process has them."""
    if not values:
        return None
    kind: Any = next(one for one in type(module).__mro__ if one.__module__.startswith("diffusers."))
    with torch.device("meta"):
        made = kind.from_config(module.config)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in made.state_dict()}
    made.load_state_dict({**values, **buffers}, assign=True)
    return made


def _forget_source(config: Path) -> None:
    """Diffusers notes the folder that the module was loaded from: somebody's path, in a file that is given away."""
    facts = json.loads(config.read_bytes())
    facts.pop("_name_or_path", None)
    config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


@contextmanager
def _swapped(trained: Trained, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    kept = {name: parameter.data for name, parameter in trained.parameters.items()}
    try:
        for name, parameter in trained.parameters.items():
            parameter.data = values[name].detach().to(parameter.device)
        yield
    finally:
        for name, parameter in trained.parameters.items():
            parameter.data = kept[name]


@contextmanager
def _overwritten(trained: Trained, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Parts are windows into memory that others know by its place: they cannot be swapped."""
    kept = {name: parameter.detach().clone() for name, parameter in trained.parameters.items()}
    try:
        _write(trained, values)
        yield
    finally:
        _write(trained, kept)


@torch.no_grad()
def _write(trained: Trained, values: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in trained.parameters.items():
        parameter.copy_(values[name])
    if trained.parts is not None:
        trained.parts.changed()


def _all_weights(module: nn.Module, name: str) -> Trained:
    _require_plain(module, ("",), name, "full")
    module.float()
    module.requires_grad_(True)
    return Trained(name, "full", module, dict(module.named_parameters()))


def _require_plain(module: nn.Module, layers: Iterable[str], name: str, kind: str) -> None:
    """8-bit weights cannot learn."""
    parameters = {key: own for layer in layers for key, own in module.get_submodule(layer).named_parameters(layer)}
    quantised = [key for key, parameter in parameters.items() if type(parameter.data) is not torch.Tensor]
    if quantised:
        raise ModelError(
            f'adapter.type is "{kind}", but {len(quantised)} weights of {name} are 8-bit ({quantised[0]} …) and cannot '
            'learn; set model.base_weights: "as_computed", or adapter.type: "lora"'
        )


def _check_fit(trained: Trained, tensors: Mapping[str, torch.Tensor]) -> None:
    wanted = trained.parameters
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    problems = [f"{len(missing)} are missing ({some(missing, 3)})"] if missing else []
    problems += [f"{len(unexpected)} do not belong there ({some(unexpected, 3)})"] if unexpected else []
    for name, parameter in wanted.items():
        given = tensors.get(name)
        if given is not None and (given.shape != parameter.shape or given.dtype != parameter.dtype):
            problems.append(
                f"{name} is {tuple(given.shape)} {given.dtype}, not {tuple(parameter.shape)} {parameter.dtype}"
            )
    if problems:
        raise ModelError(
            f"tensors for {trained.name} do not fit what is trained of it: {'; '.join(problems[:4])}; they come from "
            "another model or other adapter settings (type, rank, targets)"
        )

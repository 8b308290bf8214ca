"""What is trained of an expert: a low-rank adapter by peft, or all of its weights; its state, and what others load.

attach ──► Trained ──► state / load_state     copies out, copies in: the optimizer keeps its parameters
              ├──────► applied                other values (an average) for a while, then the same bits as before
              └──────► exported / save_full   files that diffusers loads
"""

from __future__ import annotations

import difflib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import xxhash
from torch import nn

from supertuner.config.model import AdapterSettings
from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.models.spec import Tensors

ADAPTER = "default"
"""peft's name of the adapter inside the module; it is in no file and in no name of ours."""
ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False, slots=True)
class Trained:
    """An expert's module and those of its parameters that learn."""

    name: str
    """The expert's."""
    kind: Literal["lora", "full"]
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """Name in the module (without the adapter's own name) → parameter in fp32, in the module's order."""


def attach(module: nn.Module, settings: AdapterSettings, targets: Sequence[str], *, seed: int, name: str) -> Trained:
    """Make of `module` what the settings say. The same seed gives the same bits; the global random state stays.

    `targets` are endings of module names, and have a meaning only for an adapter.
    """
    if settings.type == "full":
        return _all_weights(module, name)
    check_targets(module, targets, name)
    parameters = _inject(module, settings, targets)
    for key, parameter in parameters.items():
        parameter.data = _initial(key, parameter, seed, name).to(parameter.device)
    return Trained(name, "lora", module, parameters)


def targets_of(settings: AdapterSettings, presets: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The endings of module names that the settings mean: those of a preset of the family, or their own."""
    if not isinstance(settings.targets, str):
        return settings.targets
    if settings.targets not in presets:
        raise ModelError(
            f"adapter.targets is {settings.targets!r}; the family's presets are {', '.join(presets)}; "
            "names of modules are given as a list"
        )
    return tuple(presets[settings.targets])


def state(trained: Trained) -> Tensors:
    """Copies of what is trained, on the CPU."""
    return {
        name: parameter.detach().to("cpu", copy=True).contiguous() for name, parameter in trained.parameters.items()
    }


def load_state(trained: Trained, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give every trained parameter its value from `tensors`, in place and to the bit, or change none of them."""
    _check_fit(trained, tensors)
    with torch.no_grad():
        for name, parameter in trained.parameters.items():
            parameter.copy_(tensors[name])


@contextmanager
def applied(trained: Trained, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Compute with `values` inside the block. The trained ones are set aside, not copied, so they return unchanged."""
    _check_fit(trained, values)
    with _swapped(trained, values):
        yield


def exported(trained: Trained, prefix: str, settings: AdapterSettings) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of a .safetensors file that diffusers' `load_lora_weights` takes.

    A LoRA's scale alpha / rank is multiplied into lora_B, so that the file means the same to programs that read no
    metadata: diffusers takes alpha for the rank where it finds no other, and refuses `.alpha` tensors in some families.
    The metadata says which alpha it was trained with. (All weights: they have no prefix, and belong in `save_full`.)
    """
    tensors = state(trained)
    if trained.kind == "full":
        return tensors, {"format": "pt"}
    alpha = _alpha(settings)
    scaled = {
        f"{prefix}.{name}": tensor * (alpha / settings.rank) if ".lora_B." in name else tensor
        for name, tensor in tensors.items()
    }
    trained_as = {"expert": trained.name, "rank": settings.rank, "alpha": alpha, "scale": "in lora_B"}
    return scaled, {"format": "pt", "supertuner": json.dumps(trained_as)}


def save_full(trained: Trained, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a fully trained module into a new folder that diffusers' `from_pretrained` takes, synced to the disk."""
    from diffusers import ModelMixin

    module = trained.module
    assert trained.kind == "full" and isinstance(module, ModelMixin), trained.kind
    values = {name: parameter.detach().to(dtype or parameter.dtype) for name, parameter in trained.parameters.items()}
    folder.mkdir(parents=True)
    with _swapped(trained, values):
        module.save_pretrained(folder, safe_serialization=True)
    _forget_source(folder / "config.json")
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    sync_folder(folder)


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


# ── putting an adapter on a module ────────────────────────────────────────────────────────────────────────────────────


def _all_weights(module: nn.Module, name: str) -> Trained:
    quantised = [key for key, parameter in module.named_parameters() if type(parameter.data) is not torch.Tensor]
    if quantised:
        raise ModelError(
            f'adapter.type is "full", but {len(quantised)} weights of {name} are 8-bit ({quantised[0]} …) and cannot '
            'learn; set model.base_weights: "as_computed", or adapter.type: "lora"'
        )
    module.float()
    module.requires_grad_(True)
    return Trained(name, "full", module, dict(module.named_parameters()))


def _inject(module: nn.Module, settings: AdapterSettings, targets: Sequence[str]) -> dict[str, nn.Parameter]:
    """peft's injection rather than a model's own add_adapter, which some models of diffusers do not have."""
    from peft import LoraConfig, inject_adapter_in_model

    wanted = LoraConfig(
        r=settings.rank,
        lora_alpha=_alpha(settings),
        lora_dropout=settings.dropout,
        target_modules=list(targets),
    )
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft cannot merge into 8-bit weights, and says so for each layer; we never merge.
        warnings.filterwarnings("ignore", message=".*get_apply_tensor_subclass.*")
        inject_adapter_in_model(wanted, module, adapter_name=ADAPTER)
    return {
        name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _initial(key: str, parameter: nn.Parameter, seed: int, name: str) -> torch.Tensor:
    """As published (Hu et al., arXiv 2106.09685, section 4.1) and as peft does it: A at random, B zero."""
    values = torch.zeros(parameter.shape, dtype=torch.float32)
    if ".lora_A." in key:
        own = torch.Generator().manual_seed(xxhash.xxh32_intdigest(f"{seed}\0{name}\0{key}".encode()))
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=own)
    return values


def _alpha(settings: AdapterSettings) -> float:
    return float(settings.rank) if settings.alpha is None else settings.alpha


def check_targets(module: nn.Module, targets: Sequence[str], name: str) -> None:
    """ModelError, with the nearest that there is, for a target that is no layer of the module."""
    if not targets:
        raise ModelError("adapter.targets is empty; name a preset of the family, or endings of module names")
    for target in targets:
        matching = [(key, found) for key, found in module.named_modules() if _ends(key, target)]
        if not matching:
            raise ModelError(f"adapter.targets: no module of {name} is called {target!r}; {_near(module, target)}")
        for key, found in matching:
            if not isinstance(found, ADAPTABLE):
                inside = _endings(found, f"{target}.")
                raise ModelError(
                    f"adapter.targets: {key} of {name} is a {type(found).__name__}, and an adapter goes on linear and "
                    f"convolution layers; {'inside it are ' + _some(inside) if inside else 'there are none inside it'}"
                )


def _ends(key: str, target: str) -> bool:
    return key == target or key.endswith(f".{target}")


def _near(module: nn.Module, target: str) -> str:
    endings = _endings(module)
    shorter = {".".join(parts[at:]) for parts in (one.split(".") for one in endings) for at in range(len(parts))}
    near = difflib.get_close_matches(target, sorted(shorter), n=4, cutoff=0.6)
    return f"did you mean {_some(near)}?" if near else f"there are {_some(endings)}"


def _endings(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the layers that can be adapted, without the numbered blocks they are in."""
    found: dict[str, None] = {}
    for key, layer in module.named_modules():
        if isinstance(layer, ADAPTABLE) and key:
            parts = key.split(".")
            numbers = [place for place, part in enumerate(parts[:-1]) if part.isdigit() and place < len(parts) - 2]
            found[prefix + ".".join(parts[numbers[0] + 1 :] if numbers else parts)] = None
    return list(found)


def _some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_fit(trained: Trained, tensors: Mapping[str, torch.Tensor]) -> None:
    wanted = trained.parameters
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    problems = [f"{len(missing)} are missing ({_some(missing, 3)})"] if missing else []
    problems += [f"{len(unexpected)} do not belong there ({_some(unexpected, 3)})"] if unexpected else []
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

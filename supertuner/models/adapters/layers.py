"""Selects the layers of an expert that get an adapter, and the adapter's size on each. Changes no module."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from supertuner.config.settings.model import AdapterSettings, ModuleAdapterSettings
from supertuner.core.errors import ModelError

ADAPTABLE_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """The size of an adapter on one layer."""

    rank: int
    alpha: float
    scale: float
    """The factor on the adapter's output: alpha / rank, or alpha / √rank (rsLoRA, arXiv 2312.03732)."""


def settings_for_expert(settings: AdapterSettings, expert: str) -> AdapterSettings:
    """The settings for one expert: `adapter.<expert>` overrides `adapter`."""
    overrides = {name: value for name, value in settings.for_expert(expert) if value is not None}
    return settings.model_copy(update=overrides)


def resolve_targets(settings: AdapterSettings, presets: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The endings of module names in `adapter.targets`: those of the family's preset, or the list itself."""
    if not isinstance(settings.targets, str):
        return settings.targets
    if settings.targets not in presets:
        raise ModelError(
            f"adapter.targets is {settings.targets!r}, which is not a preset of this family ({', '.join(presets)}); to "
            'name modules, use a list, on a command line \'adapter.targets=["to_q", "to_k"]\' including the quotes'
        )
    return tuple(presets[settings.targets])


def select_layers(
    module: nn.Module, settings: AdapterSettings, targets: Sequence[str], name: str
) -> dict[str, AdapterSize]:
    """The selected layers by name, in the module's order, with the size of their adapters.

    `name` is the expert, for messages. Raises ModelError if a target or a pattern matches nothing.
    """
    check_targets(module, targets, name)
    selected = [key for key, _ in module.named_modules() if any(_has_suffix(key, target) for target in targets)]
    check_module_patterns(selected, settings.modules, name)
    return {key: adapter_size(key, settings) for key in selected}


def adapter_size(key: str, settings: AdapterSettings) -> AdapterSize:
    """The size of the adapter on the layer with this name."""
    override = next((entry for entry in settings.modules if _matches_pattern(key, entry.match)), None)
    rank = settings.rank if override is None or override.rank is None else override.rank
    alpha = settings.alpha if override is None or override.alpha is None else override.alpha
    alpha = float(rank) if alpha is None else alpha
    return AdapterSize(rank, alpha, alpha / (math.sqrt(rank) if settings.rslora else rank))


def check_targets(module: nn.Module, targets: Sequence[str], name: str) -> None:
    """Raise ModelError, with similar names, for a target that is not a layer of the module."""
    if not targets:
        raise ModelError("adapter.targets is empty; set it to a preset of the family, or to endings of module names")
    for target in targets:
        matching = [(key, layer) for key, layer in module.named_modules() if _has_suffix(key, target)]
        if not matching:
            suggestion = _suggestion(module, target)
            raise ModelError(f"adapter.targets: no module of {name} has the name {target!r}; {suggestion}")
        for key, layer in matching:
            if not isinstance(layer, ADAPTABLE_LAYERS):
                nested = _layer_suffixes(layer, f"{target}.")
                inside = f"it contains {summarize_names(nested)}" if nested else "it contains none"
                raise ModelError(
                    f"adapter.targets: {key} of {name} is a {type(layer).__name__}; adapters go on linear and "
                    f"convolution layers, and {inside}"
                )


def check_module_patterns(keys: Sequence[str], modules: Sequence[ModuleAdapterSettings], name: str) -> None:
    """Raise ModelError for an entry of `adapter.modules` that matches none of the selected layers."""
    for number, entry in enumerate(modules):
        if not any(_matches_pattern(key, entry.match) for key in keys):
            raise ModelError(
                f"adapter.modules[{number}].match is {entry.match!r}, which matches no adapted layer of {name}; these "
                f"are {summarize_names(keys, 4)}"
            )


def trainable_parameters(module: nn.Module, adapter_name: str) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by their names without the adapter's own name."""
    trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name.replace(f".{adapter_name}.", "."): parameter for name, parameter in trainable.items()}


def summarize_names(names: Sequence[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _has_suffix(key: str, target: str) -> bool:
    return key == target or key.endswith(f".{target}")


def _matches_pattern(key: str, pattern: str) -> bool:
    return fnmatchcase(key, pattern) or fnmatchcase(key, f"*.{pattern}")


def _suggestion(module: nn.Module, target: str) -> str:
    suffixes = _layer_suffixes(module)
    split_suffixes = [suffix.split(".") for suffix in suffixes]
    endings = {".".join(parts[at:]) for parts in split_suffixes for at in range(len(parts))}
    matches = difflib.get_close_matches(target, sorted(endings), n=4, cutoff=0.6)
    return f"did you mean {summarize_names(matches)}?" if matches else f"use one of {summarize_names(suffixes)}"


def _layer_suffixes(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the layers that can have an adapter, without the numbered blocks that contain them."""
    suffixes: dict[str, None] = {}
    for key, layer in module.named_modules():
        if isinstance(layer, ADAPTABLE_LAYERS) and key:
            parts = key.split(".")
            numbers = [place for place, part in enumerate(parts[:-1]) if part.isdigit() and place < len(parts) - 2]
            suffixes[prefix + ".".join(parts[numbers[0] + 1 :] if numbers else parts)] = None
    return list(suffixes)

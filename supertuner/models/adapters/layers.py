"""Which layers of an expert an adapter is put on, and how large it is on each of them. Nothing is changed here."""

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
    """An adapter on one layer."""

    rank: int
    alpha: float
    scale: float
    """What the adapter adds is multiplied by this: alpha / rank, or alpha / √rank (rsLoRA, arXiv 2312.03732)."""


def settings_for_expert(settings: AdapterSettings, expert: str) -> AdapterSettings:
    """The settings as they are for the expert of this name: what is said for it alone counts before the rest."""
    expert_settings = {"high_noise": settings.high_noise, "low_noise": settings.low_noise}.get(expert)
    if expert_settings is None:
        return settings
    overrides: dict[str, object] = {
        "rank": expert_settings.rank,
        "alpha": expert_settings.alpha,
        "targets": expert_settings.targets,
    }
    overrides |= {"start_from": expert_settings.start_from, "frozen": expert_settings.frozen}
    return settings.model_copy(update={name: value for name, value in overrides.items() if value is not None})


def resolve_targets(settings: AdapterSettings, presets: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The endings of module names that the settings mean: those of a preset of the family, or their own."""
    if not isinstance(settings.targets, str):
        return settings.targets
    if settings.targets not in presets:
        raise ModelError(
            f"adapter.targets is {settings.targets!r}; the family's presets are {', '.join(presets)}; "
            'names of modules are given as a list, on a command line as \'adapter.targets=["to_q", "to_k"]\', quotes '
            "and all"
        )
    return tuple(presets[settings.targets])


def select_layers(
    module: nn.Module, settings: AdapterSettings, targets: Sequence[str], name: str
) -> dict[str, AdapterSize]:
    """Names of the layers, in the module's order, each with the size of its adapter."""
    check_targets(module, targets, name)
    selected = [key for key, _ in module.named_modules() if any(_has_suffix(key, target) for target in targets)]
    check_module_patterns(selected, settings.modules, name)
    return {key: adapter_size(key, settings) for key in selected}


def adapter_size(key: str, settings: AdapterSettings) -> AdapterSize:
    """The size on the layer of this name."""
    override = next((one for one in settings.modules if _matches_pattern(key, one.match)), None)
    rank = settings.rank if override is None or override.rank is None else override.rank
    alpha = settings.alpha if override is None or override.alpha is None else override.alpha
    alpha = float(rank) if alpha is None else alpha
    return AdapterSize(rank, alpha, alpha / (math.sqrt(rank) if settings.rslora else rank))


def check_targets(module: nn.Module, targets: Sequence[str], name: str) -> None:
    """ModelError, with the nearest that there is, for a target that is no layer of the module."""
    if not targets:
        raise ModelError("adapter.targets is empty; name a preset of the family, or endings of module names")
    for target in targets:
        matching = [(key, layer) for key, layer in module.named_modules() if _has_suffix(key, target)]
        if not matching:
            raise ModelError(
                f"adapter.targets: no module of {name} is called {target!r}; {_suggestion(module, target)}"
            )
        for key, found in matching:
            if not isinstance(found, ADAPTABLE_LAYERS):
                nested_layers = _layer_suffixes(found, f"{target}.")
                raise ModelError(
                    f"adapter.targets: {key} of {name} is a {type(found).__name__}, and an adapter goes on linear and "
                    f"convolution layers; {'inside it are ' + summarize_names(nested_layers) if nested_layers else 'there are none inside it'}"
                )


def check_module_patterns(keys: Sequence[str], modules: Sequence[ModuleAdapterSettings], name: str) -> None:
    """ModelError for an entry of adapter.modules that speaks of no layer that is adapted."""
    for number, module_settings in enumerate(modules):
        if not any(_matches_pattern(key, module_settings.match) for key in keys):
            raise ModelError(
                f"adapter.modules[{number}].match is {module_settings.match!r}, and no layer of {name} that the adapter is put on "
                f"is called so; there are {summarize_names(keys, 4)}"
            )


def summarize_names(names: Sequence[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _has_suffix(key: str, target: str) -> bool:
    return key == target or key.endswith(f".{target}")


def _matches_pattern(key: str, pattern: str) -> bool:
    return fnmatchcase(key, pattern) or fnmatchcase(key, f"*.{pattern}")


def _suggestion(module: nn.Module, target: str) -> str:
    suffixes = _layer_suffixes(module)
    shorter_suffixes = {
        ".".join(parts[at:]) for parts in (one.split(".") for one in suffixes) for at in range(len(parts))
    }
    close_matches = difflib.get_close_matches(target, sorted(shorter_suffixes), n=4, cutoff=0.6)
    return (
        f"did you mean {summarize_names(close_matches)}?" if close_matches else f"there are {summarize_names(suffixes)}"
    )


def _layer_suffixes(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the layers that can be adapted, without the numbered blocks they are in."""
    suffixes: dict[str, None] = {}
    for key, layer in module.named_modules():
        if isinstance(layer, ADAPTABLE_LAYERS) and key:
            parts = key.split(".")
            numbers = [place for place, part in enumerate(parts[:-1]) if part.isdigit() and place < len(parts) - 2]
            suffixes[prefix + ".".join(parts[numbers[0] + 1 :] if numbers else parts)] = None
    return list(suffixes)

"""Which layers of an expert an adapter is put on, and how large it is on each of them. Nothing is changed here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from supertuner.config.settings.model import AdapterSettings, ModuleAdapter
from supertuner.core.errors import ModelError

ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class Size:
    """An adapter on one layer."""

    rank: int
    alpha: float
    scale: float
    """What the adapter adds is multiplied by this: alpha / rank, or alpha / √rank (rsLoRA, arXiv 2312.03732)."""


def for_expert(settings: AdapterSettings, expert: str) -> AdapterSettings:
    """The settings as they are for the expert of this name: what is said for it alone counts before the rest."""
    own = {"high_noise": settings.high_noise, "low_noise": settings.low_noise}.get(expert)
    if own is None:
        return settings
    said: dict[str, object] = {"rank": own.rank, "alpha": own.alpha, "targets": own.targets}
    said |= {"start_from": own.start_from, "frozen": own.frozen}
    return settings.model_copy(update={name: value for name, value in said.items() if value is not None})


def targets_of(settings: AdapterSettings, presets: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
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


def layers_of(module: nn.Module, settings: AdapterSettings, targets: Sequence[str], name: str) -> dict[str, Size]:
    """Names of the layers, in the module's order, each with the size of its adapter."""
    check_targets(module, targets, name)
    found = [key for key, _ in module.named_modules() if any(_ends(key, target) for target in targets)]
    check_matches(found, settings.modules, name)
    return {key: size_of(key, settings) for key in found}


def size_of(key: str, settings: AdapterSettings) -> Size:
    """The size on the layer of this name."""
    own = next((one for one in settings.modules if _fits(key, one.match)), None)
    rank = settings.rank if own is None or own.rank is None else own.rank
    alpha = settings.alpha if own is None or own.alpha is None else own.alpha
    alpha = float(rank) if alpha is None else alpha
    return Size(rank, alpha, alpha / (math.sqrt(rank) if settings.rslora else rank))


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
                    f"convolution layers; {'inside it are ' + some(inside) if inside else 'there are none inside it'}"
                )


def check_matches(keys: Sequence[str], modules: Sequence[ModuleAdapter], name: str) -> None:
    """ModelError for an entry of adapter.modules that speaks of no layer that is adapted."""
    for number, one in enumerate(modules):
        if not any(_fits(key, one.match) for key in keys):
            raise ModelError(
                f"adapter.modules[{number}].match is {one.match!r}, and no layer of {name} that the adapter is put on "
                f"is called so; there are {some(keys, 4)}"
            )


def some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _ends(key: str, target: str) -> bool:
    return key == target or key.endswith(f".{target}")


def _fits(key: str, match: str) -> bool:
    return fnmatchcase(key, match) or fnmatchcase(key, f"*.{match}")


def _near(module: nn.Module, target: str) -> str:
    endings = _endings(module)
    shorter = {".".join(parts[at:]) for parts in (one.split(".") for one in endings) for at in range(len(parts))}
    near = difflib.get_close_matches(target, sorted(shorter), n=4, cutoff=0.6)
    return f"did you mean {some(near)}?" if near else f"there are {some(endings)}"


def _endings(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the layers that can be adapted, without the numbered blocks they are in."""
    found: dict[str, None] = {}
    for key, layer in module.named_modules():
        if isinstance(layer, ADAPTABLE) and key:
            parts = key.split(".")
            numbers = [place for place, part in enumerate(parts[:-1]) if part.isdigit() and place < len(parts) - 2]
            found[prefix + ".".join(parts[numbers[0] + 1 :] if numbers else parts)] = None
    return list(found)

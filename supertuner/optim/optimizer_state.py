"""What an optimizer remembers, as named tensors and JSON and back, exact to the bit, for a file that is no pickle.

Tensors are named `<parameter>/<entry>`, those of an 8-bit entry `<parameter>/<entry>.codes` and `.scale`. The JSON has

    optimizer    its name in the table
    parameters   the names of all it trains, in its order
    group        numbers that it keeps for all parameters together and has changed since it was made
    scalars      numbers that it keeps for one parameter, by tensor name
    quantised    entries kept in 8 bits, by tensor name: signed or not, and the number format they stand for

Rates and weight decay are settings, not memory: a resumed run takes them from its configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from supertuner.core.errors import CheckpointError
from supertuner.core.types import JSON
from supertuner.optim.optimizer_registry import OPTIMIZERS, ExpertOptimizer

Tensors: TypeAlias = Mapping[str, torch.Tensor]
SETTING_KEYS = ("params", "lr", "weight_decay")
MAX_LISTED = 5
"""How many of many wrong entries an error names."""


def pack_state(
    optimizer: ExpertOptimizer, copy: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    """Everything that the optimizer remembers, its tensors by what `copy` makes of them; None: copies on the CPU."""
    copy = copy or _copy_to_cpu
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, JSON] = {}
    quantised: dict[str, JSON] = {}
    for name, parameter in optimizer.parameters.items():
        for key, value in optimizer.torch_optimizer.state.get(parameter, {}).items():
            entry = f"{name}/{key}"
            if not isinstance(value, torch.Tensor):
                scalars[entry] = _number_to_json(value)
            elif type(value) is torch.Tensor:
                tensors[entry] = copy(value)
            else:
                quantized_value = cast(Any, value)
                tensors[f"{entry}.codes"], tensors[f"{entry}.scale"] = (
                    copy(quantized_value.codes),
                    copy(quantized_value.scale),
                )
                quantised[entry] = {
                    "signed": bool(quantized_value.signed),
                    "dtype": str(value.dtype).removeprefix("torch."),
                }
    meta: dict[str, JSON] = {
        "optimizer": optimizer.name,
        "parameters": list(optimizer.parameters),
        "group": _changed_group_entries(optimizer.torch_optimizer),
        "scalars": scalars,
        "quantised": quantised,
    }
    return tensors, meta


def restore_state(
    optimizer: ExpertOptimizer, tensors: Tensors, meta: Mapping[str, JSON], device: torch.device | None = None
) -> None:
    """Make a fresh optimizer remember what another one packed, on a device; None: each beside its parameter. Nothing is
    changed if anything does not fit."""
    missing_keys = sorted({"optimizer", "parameters", "group", "scalars", "quantised"} - meta.keys())
    if missing_keys:
        raise CheckpointError(
            f"the optimizer's state has no {_join_names(missing_keys)}; the file is not what was saved"
        )
    if meta["optimizer"] != optimizer.name:
        raise CheckpointError(
            f'the checkpoint was made with optimizer.name "{meta["optimizer"]}", and the configuration says '
            f'"{optimizer.name}"; set it back, or start a new run'
        )
    _require_same_names("parameters", cast("list[str]", meta["parameters"]), list(optimizer.parameters))
    scalars, quantised = _meta_section(meta, "scalars"), _meta_section(meta, "quantised")
    entries = _entry_names(tensors, scalars, quantised)
    _check_entries(optimizer, entries, tensors, scalars)
    restored: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name, key = entry.rsplit("/", 1)
        parameter = optimizer.parameters[name]
        if entry in scalars:
            restored.setdefault(name, {})[key] = _number_from_json(scalars[entry])
        elif entry in quantised:
            restored.setdefault(name, {})[key] = _restore_8bit(
                entry, tensors, cast("dict[str, JSON]", quantised[entry]), device or parameter.device
            )
        else:
            restored.setdefault(name, {})[key] = _match_layout(
                tensors[entry], parameter, _entry_device(key, device or parameter.device, optimizer)
            )
    for name, state in restored.items():
        optimizer.torch_optimizer.state[optimizer.parameters[name]] = state
    for group in optimizer.torch_optimizer.param_groups:
        group.update({key: _number_from_json(value) for key, value in _meta_section(meta, "group").items()})


def _changed_group_entries(inner: torch.optim.Optimizer) -> dict[str, JSON]:
    """Entries of the (only) parameter group that are not as they were when the optimizer was made."""
    (group,) = inner.param_groups
    not_a_default = object()
    return {
        key: _number_to_json(value)
        for key, value in group.items()
        if key not in SETTING_KEYS and inner.defaults.get(key, not_a_default) != value
    }


def _entry_names(tensors: Tensors, scalars: Mapping[str, JSON], quantised: Mapping[str, JSON]) -> list[str]:
    """The names of all entries, in a fixed order; the two halves of an 8-bit entry count as one."""
    halves = {f"{entry}.{half}" for entry in quantised for half in ("codes", "scale")}
    missing = sorted(halves - tensors.keys())
    if missing:
        raise CheckpointError(f"the optimizer's state lacks {_join_names(missing)}; the file is not what was saved")
    return sorted({*(tensors.keys() - halves), *scalars, *quantised})


def _check_entries(
    optimizer: ExpertOptimizer, entries: list[str], tensors: Tensors, scalars: Mapping[str, JSON]
) -> None:
    """Every parameter has all entries or, if it never had a gradient, none; and each has a shape that it can have."""
    shapes = OPTIMIZERS[optimizer.name].state_shapes
    with_state = {entry.rpartition("/")[0] for entry in entries}
    _require_same_names("parameters with a state", with_state, with_state & optimizer.parameters.keys())
    expected_shapes = {name: shapes(optimizer.parameters[name]) for name in with_state}
    _require_same_names("entries", entries, [f"{name}/{key}" for name, keys in expected_shapes.items() for key in keys])
    for entry in entries:
        name, key = entry.rsplit("/", 1)
        stored = tensors.get(entry, tensors.get(f"{entry}.codes"))
        if stored is not None and tuple(stored.shape) not in expected_shapes[name][key]:
            expected = " or ".join(str(list(shape)) for shape in expected_shapes[name][key])
            raise CheckpointError(
                f"the optimizer's {entry} has shape {list(stored.shape)}, and the parameter asks for {expected}; "
                "the checkpoint is of another model or adapter"
            )


def _require_same_names(description: str, actual: Iterable[str], expected: Iterable[str]) -> None:
    missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    if missing or extra:
        parts = [f"lacks {_join_names(missing)}"] * bool(missing) + [f"has {_join_names(extra)} too many"] * bool(extra)
        raise CheckpointError(f"the optimizer's state does not fit its {description}: it {' and '.join(parts)}")


def _join_names(names: list[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its own on the CPU: it shares no memory with another entry, and its rows follow each other."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _match_layout(stored: torch.Tensor, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """The stored tensor where the optimizer wants it: aligned, and with the parameter's strides if it has its shape.

    A tensor as it comes out of a file is aligned otherwise, and kernels then differ in the last bits.
    """
    if stored.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.dtype, device=device, requires_grad=False).copy_(stored)
    return stored.clone().to(device)


def _entry_device(key: str, device: torch.device, optimizer: ExpertOptimizer) -> torch.device:
    """Step counts live on the CPU, except those of fused kernels, which count on the device."""
    if key == "step" and not optimizer.torch_optimizer.param_groups[0].get("fused"):
        return torch.device("cpu")
    return device


def _restore_8bit(entry: str, tensors: Tensors, format_entry: Mapping[str, JSON], device: torch.device) -> torch.Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    codes, scale = tensors[f"{entry}.codes"], tensors[f"{entry}.scale"]
    if scale.dim() != 1 or not len(scale) or codes.numel() % len(scale):
        raise CheckpointError(
            f"the optimizer's {entry}.scale has shape {list(scale.shape)}: it does not divide its codes"
        )
    dtype = getattr(torch, str(format_entry["dtype"]))
    block = codes.numel() // len(scale)
    restored = OptimState8bit.zeros(codes.shape, format_entry["signed"], block, device, dtype)
    restored.codes.copy_(codes)
    restored.scale.copy_(scale)
    return cast(torch.Tensor, restored)


def _number_to_json(value: object) -> JSON:
    """A number as JSON can hold it; infinities have no numeral there."""
    assert isinstance(value, bool | int | float), f"{value!r} is no number; the optimizer keeps what we do not save"
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number_from_json(value: JSON) -> bool | int | float:
    return float(value) if isinstance(value, str) else cast("bool | int | float", value)


def _meta_section(meta: Mapping[str, JSON], key: str) -> Mapping[str, JSON]:
    return cast("Mapping[str, JSON]", meta[key])

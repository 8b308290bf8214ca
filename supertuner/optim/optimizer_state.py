"""Converts an optimizer's state to named tensors and JSON and back, exact to the bit and without pickle.

Tensors are named `<parameter>/<entry>`, those of an 8-bit entry `<parameter>/<entry>.codes` and `.scale`. The JSON has

    optimizer    the optimizer's name in the registry
    parameters   the names of all trained parameters, in the optimizer's order
    group        numbers in the parameter group that differ from the optimizer's defaults
    scalars      numbers in the state of one parameter, by entry
    quantised    8-bit entries: whether they are signed, and the number format that they represent

Learning rate and weight decay are settings, not state: a resumed run takes them from its configuration.
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
"""The largest number of names in an error message."""


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU that shares no memory with other entries."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def pack_state(
    optimizer: ExpertOptimizer, copy: Callable[[torch.Tensor], torch.Tensor] = copy_to_cpu
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    """The optimizer's state. `copy` copies each tensor; by default to the CPU."""
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
                state = cast(Any, value)
                tensors[f"{entry}.codes"], tensors[f"{entry}.scale"] = copy(state.codes), copy(state.scale)
                dtype = str(value.dtype).removeprefix("torch.")
                quantised[entry] = {"signed": bool(state.signed), "dtype": dtype}
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
    """Load a packed state into a new optimizer, on `device` or by default on each parameter's device.

    Raises CheckpointError, and changes nothing, if the state does not fit the optimizer.
    """
    missing_keys = sorted({"optimizer", "parameters", "group", "scalars", "quantised"} - meta.keys())
    if missing_keys:
        raise CheckpointError(f"the saved optimizer state lacks {_join_names(missing_keys)}; the checkpoint is damaged")
    if meta["optimizer"] != optimizer.name:
        raise CheckpointError(
            f'the checkpoint was written with optimizer.name "{meta["optimizer"]}", but the configuration has '
            f'"{optimizer.name}"; change it back, or start a new run'
        )
    _require_same_names("parameters", cast("list[str]", meta["parameters"]), list(optimizer.parameters))
    scalars, quantised = _meta_section(meta, "scalars"), _meta_section(meta, "quantised")
    entries = _entry_names(tensors, scalars, quantised)
    _check_entries(optimizer, entries, tensors)
    restored: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name, key = entry.rsplit("/", 1)
        parameter = optimizer.parameters[name]
        target = device or parameter.device
        state = restored.setdefault(name, {})
        if entry in scalars:
            state[key] = _number_from_json(scalars[entry])
        elif entry in quantised:
            state[key] = _restore_8bit(entry, tensors, cast("dict[str, JSON]", quantised[entry]), target)
        else:
            state[key] = _match_layout(tensors[entry], parameter, _entry_device(key, target, optimizer))
    for name, state in restored.items():
        optimizer.torch_optimizer.state[optimizer.parameters[name]] = state
    for group in optimizer.torch_optimizer.param_groups:
        group.update({key: _number_from_json(value) for key, value in _meta_section(meta, "group").items()})


def _changed_group_entries(inner: torch.optim.Optimizer) -> dict[str, JSON]:
    """Entries of the only parameter group that differ from the optimizer's defaults."""
    (group,) = inner.param_groups
    not_a_default = object()
    return {
        key: _number_to_json(value)
        for key, value in group.items()
        if key not in SETTING_KEYS and inner.defaults.get(key, not_a_default) != value
    }


def _entry_names(tensors: Tensors, scalars: Mapping[str, JSON], quantised: Mapping[str, JSON]) -> list[str]:
    """The sorted names of all entries; codes and scale of an 8-bit entry count as one."""
    halves = {f"{entry}.{half}" for entry in quantised for half in ("codes", "scale")}
    missing = sorted(halves - tensors.keys())
    if missing:
        raise CheckpointError(f"the saved optimizer state lacks {_join_names(missing)}; the checkpoint is damaged")
    return sorted({*(tensors.keys() - halves), *scalars, *quantised})


def _check_entries(optimizer: ExpertOptimizer, entries: list[str], tensors: Tensors) -> None:
    """Check that each parameter has all entries, or none if it never had a gradient, and that their shapes fit."""
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
                f"{entry} in the saved optimizer state has shape {list(stored.shape)}, and its parameter needs "
                f"{expected}; the checkpoint belongs to another model or adapter"
            )


def _require_same_names(description: str, actual: Iterable[str], expected: Iterable[str]) -> None:
    missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    if missing or extra:
        parts = [f"lacks {_join_names(missing)}"] * bool(missing) + [f"also has {_join_names(extra)}"] * bool(extra)
        raise CheckpointError(f"the saved optimizer state does not match its {description}: it {' and '.join(parts)}")


def _join_names(names: list[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _match_layout(stored: torch.Tensor, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """The stored tensor on `device`, aligned, and with the parameter's strides if it has the parameter's shape.

    A tensor mapped from a file may be unaligned, and CPU kernels then give results that differ in the last bits.
    """
    if stored.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.dtype, device=device, requires_grad=False).copy_(stored)
    return stored.clone().to(device)


def _entry_device(key: str, device: torch.device, optimizer: ExpertOptimizer) -> torch.device:
    """Step counts are on the CPU, except with fused kernels, which count on the device."""
    if key == "step" and not optimizer.torch_optimizer.param_groups[0].get("fused"):
        return torch.device("cpu")
    return device


def _restore_8bit(entry: str, tensors: Tensors, format_entry: Mapping[str, JSON], device: torch.device) -> torch.Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    codes, scale = tensors[f"{entry}.codes"], tensors[f"{entry}.scale"]
    if scale.dim() != 1 or not len(scale) or codes.numel() % len(scale):
        raise CheckpointError(
            f"{entry}.scale in the saved optimizer state has shape {list(scale.shape)}, which does not divide its "
            f"{codes.numel()} codes; the checkpoint is damaged"
        )
    dtype = getattr(torch, str(format_entry["dtype"]))
    block = codes.numel() // len(scale)
    restored = OptimState8bit.zeros(codes.shape, format_entry["signed"], block, device, dtype)
    restored.codes.copy_(codes)
    restored.scale.copy_(scale)
    return cast(torch.Tensor, restored)


def _number_to_json(value: object) -> JSON:
    """A number as JSON; infinities and NaN become strings, because JSON has no numerals for them."""
    assert isinstance(value, bool | int | float), f"{value!r} in the optimizer's state is not a number"
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number_from_json(value: JSON) -> bool | int | float:
    return float(value) if isinstance(value, str) else cast("bool | int | float", value)


def _meta_section(meta: Mapping[str, JSON], key: str) -> Mapping[str, JSON]:
    return cast("Mapping[str, JSON]", meta[key])

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
from supertuner.optim.table import OPTIMIZERS, Optimizer

Tensors: TypeAlias = Mapping[str, torch.Tensor]
SETTINGS = ("params", "lr", "weight_decay")
NAMED_AT_MOST = 5
"""How many of many wrong entries an error names."""


def pack(
    optimizer: Optimizer, copy: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    """Everything that the optimizer remembers, its tensors by what `copy` makes of them; None: copies on the CPU."""
    copy = copy or _copy
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, JSON] = {}
    quantised: dict[str, JSON] = {}
    for name, parameter in optimizer.parameters.items():
        for key, value in optimizer.inner.state.get(parameter, {}).items():
            entry = f"{name}/{key}"
            if not isinstance(value, torch.Tensor):
                scalars[entry] = _number_out(value)
            elif type(value) is torch.Tensor:
                tensors[entry] = copy(value)
            else:
                halves = cast(Any, value)
                tensors[f"{entry}.codes"], tensors[f"{entry}.scale"] = copy(halves.codes), copy(halves.scale)
                quantised[entry] = {"signed": bool(halves.signed), "dtype": str(value.dtype).removeprefix("torch.")}
    meta: dict[str, JSON] = {
        "optimizer": optimizer.name,
        "parameters": list(optimizer.parameters),
        "group": _changed(optimizer.inner),
        "scalars": scalars,
        "quantised": quantised,
    }
    return tensors, meta


def unpack(
    optimizer: Optimizer, tensors: Tensors, meta: Mapping[str, JSON], device: torch.device | None = None
) -> None:
    """Make a fresh optimizer remember what another one packed, on a device; None: each beside its parameter. Nothing is
    changed if anything does not fit."""
    absent = sorted({"optimizer", "parameters", "group", "scalars", "quantised"} - meta.keys())
    if absent:
        raise CheckpointError(f"the optimizer's state has no {_list(absent)}; the file is not what was saved")
    if meta["optimizer"] != optimizer.name:
        raise CheckpointError(
            f'the checkpoint was made with optimizer.name "{meta["optimizer"]}", and the configuration says '
            f'"{optimizer.name}"; set it back, or start a new run'
        )
    _same("parameters", cast("list[str]", meta["parameters"]), list(optimizer.parameters))
    scalars, quantised = _table(meta, "scalars"), _table(meta, "quantised")
    entries = _entries(tensors, scalars, quantised)
    _check_entries(optimizer, entries, tensors, scalars)
    whole: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name, key = entry.rsplit("/", 1)
        parameter = optimizer.parameters[name]
        if entry in scalars:
            whole.setdefault(name, {})[key] = _number_in(scalars[entry])
        elif entry in quantised:
            whole.setdefault(name, {})[key] = _eight_bits(
                entry, tensors, cast("dict[str, JSON]", quantised[entry]), device or parameter.device
            )
        else:
            whole.setdefault(name, {})[key] = _like(
                tensors[entry], parameter, _home(key, device or parameter.device, optimizer)
            )
    for name, state in whole.items():
        optimizer.inner.state[optimizer.parameters[name]] = state
    for group in optimizer.inner.param_groups:
        group.update({key: _number_in(value) for key, value in _table(meta, "group").items()})


def _changed(inner: torch.optim.Optimizer) -> dict[str, JSON]:
    """Entries of the (only) parameter group that are not as they were when the optimizer was made."""
    (group,) = inner.param_groups
    absent = object()
    return {
        key: _number_out(value)
        for key, value in group.items()
        if key not in SETTINGS and inner.defaults.get(key, absent) != value
    }


def _entries(tensors: Tensors, scalars: Mapping[str, JSON], quantised: Mapping[str, JSON]) -> list[str]:
    """The names of all entries, in a fixed order; the two halves of an 8-bit entry count as one."""
    halves = {f"{entry}.{half}" for entry in quantised for half in ("codes", "scale")}
    missing = sorted(halves - tensors.keys())
    if missing:
        raise CheckpointError(f"the optimizer's state lacks {_list(missing)}; the file is not what was saved")
    return sorted({*(tensors.keys() - halves), *scalars, *quantised})


def _check_entries(optimizer: Optimizer, entries: list[str], tensors: Tensors, scalars: Mapping[str, JSON]) -> None:
    """Every parameter has all entries or, if it never had a gradient, none; and each has a shape that it can have."""
    shapes = OPTIMIZERS[optimizer.name].state_shapes
    begun = {entry.rpartition("/")[0] for entry in entries}
    _same("parameters with a state", begun, begun & optimizer.parameters.keys())
    wanted = {name: shapes(optimizer.parameters[name]) for name in begun}
    _same("entries", entries, [f"{name}/{key}" for name, keys in wanted.items() for key in keys])
    for entry in entries:
        name, key = entry.rsplit("/", 1)
        stored = tensors.get(entry, tensors.get(f"{entry}.codes"))
        if stored is not None and tuple(stored.shape) not in wanted[name][key]:
            expected = " or ".join(str(list(shape)) for shape in wanted[name][key])
            raise CheckpointError(
                f"the optimizer's {entry} has shape {list(stored.shape)}, and the parameter asks for {expected}; "
                "the checkpoint is of another model or adapter"
            )


def _same(what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        parts = [f"lacks {_list(missing)}"] * bool(missing) + [f"has {_list(extra)} too many"] * bool(extra)
        raise CheckpointError(f"the optimizer's state does not fit its {what}: it {' and '.join(parts)}")


def _list(names: list[str]) -> str:
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its own on the CPU: it shares no memory with another entry, and its rows follow each other."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _like(stored: torch.Tensor, parameter: nn.Parameter, home: torch.device) -> torch.Tensor:
    """The stored tensor where the optimizer wants it: aligned, and with the parameter's strides if it has its shape.

    A tensor as it comes out of a file is aligned otherwise, and kernels then differ in the last bits.
    """
    if stored.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=stored.dtype, device=home, requires_grad=False).copy_(stored)
    return stored.clone().to(home)


def _home(key: str, device: torch.device, optimizer: Optimizer) -> torch.device:
    """Step counts live on the CPU, except those of fused kernels, which count on the device."""
    if key == "step" and not optimizer.inner.param_groups[0].get("fused"):
        return torch.device("cpu")
    return device


def _eight_bits(entry: str, tensors: Tensors, how: Mapping[str, JSON], device: torch.device) -> torch.Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    codes, scale = tensors[f"{entry}.codes"], tensors[f"{entry}.scale"]
    if scale.dim() != 1 or not len(scale) or codes.numel() % len(scale):
        raise CheckpointError(
            f"the optimizer's {entry}.scale has shape {list(scale.shape)}: it does not divide its codes"
        )
    dtype = getattr(torch, str(how["dtype"]))
    block = codes.numel() // len(scale)
    made = OptimState8bit.zeros(codes.shape, how["signed"], block, device, dtype)
    made.codes.copy_(codes)
    made.scale.copy_(scale)
    return cast(torch.Tensor, made)


def _number_out(value: object) -> JSON:
    """A number as JSON can hold it; infinities have no numeral there."""
    assert isinstance(value, bool | int | float), f"{value!r} is no number; the optimizer keeps what we do not save"
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number_in(value: JSON) -> bool | int | float:
    return float(value) if isinstance(value, str) else cast("bool | int | float", value)


def _table(meta: Mapping[str, JSON], key: str) -> Mapping[str, JSON]:
    return cast("Mapping[str, JSON]", meta[key])

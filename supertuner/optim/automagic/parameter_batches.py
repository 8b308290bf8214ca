"""Groups parameters of equal shape into batches, whose gradients and states are stacked for few and large kernels.

The state of a parameter is a row of its batch's tensors. `views` presents that row as the parameter's own state, so
that a checkpoint is keyed by parameter and does not depend on the batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from supertuner.optim.automagic.packed_rates import PackedRates
from supertuner.optim.automagic.stochastic_bits import name_keys
from supertuner.optim.automagic.workspace import DeviceWorkspace, ScratchViews, padded_count

State: TypeAlias = dict[str, Any]
Shape: TypeAlias = tuple[int, int]
CPU_ELEMENTS, DEVICE_ELEMENTS = 1 << 17, 1 << 23
"""The largest number of elements in a batch: on a CPU it fits its cache, elsewhere it bounds the scratch memory."""


def matrix_shape(shape: Sequence[int]) -> Shape:
    """A tensor's shape as a matrix: a vector is one row, a kernel has one row per output channel."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def state_shapes(shape: Sequence[int], rates: PackedRates) -> dict[str, tuple[int, torch.dtype]]:
    """The state of a parameter: name of each vector → length and type."""
    rows, columns = matrix_shape(shape)
    count = padded_count(rows * columns)
    moments = {"row": (rows, torch.float32), "column": (columns, torch.float32)}
    return {**moments, **rates.entries(count), "signs": (count // 8, torch.uint8)}


@dataclass(frozen=True, eq=False, slots=True)
class ParameterBatch:
    """Parameters that are updated together."""

    parameters: tuple[nn.Parameter, ...]
    shape: Shape
    """The shape of each parameter as a matrix."""
    state: Mapping[str, torch.Tensor]
    """The state, one row per parameter."""
    views: tuple[State, ...]
    """Each parameter's row of `state`, as its own state."""
    keys: torch.Tensor
    """Hashes of the parameters' names, for random numbers."""
    workspace: DeviceWorkspace

    @property
    def count(self) -> int:
        """The number of elements of each parameter."""
        return self.shape[0] * self.shape[1]

    def scratch(self) -> ScratchViews:
        return self.workspace.scratch(len(self.parameters), *self.shape)

    def gradient(self, scratch: ScratchViews) -> torch.Tensor:
        """All gradients as fp32 matrices. Do not modify: for a single parameter it may be the gradient itself."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        (first, *more) = gradients
        if not more and first.dtype == torch.float32 and first.is_contiguous():
            return first.view(1, *self.shape)
        torch._foreach_copy_(self.split(scratch.gradient), gradients)
        return scratch.gradient

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of one number per weight as tensors of the parameters' shapes, without the padding."""
        parts = flat.view(len(flat), -1)[:, : self.count]
        return [part.view(p.shape) for part, p in zip(parts.unbind(), self.parameters, strict=True)]


def build_batches(
    parameters: Mapping[str, nn.Parameter],
    states: Mapping[torch.Tensor, State],
    rates: PackedRates,
    workspace_for: Callable[[torch.device], DeviceWorkspace],
    batch_elements: int | None = None,
) -> list[ParameterBatch]:
    """Batches of the parameters, with their existing states, or initial ones. `batch_elements`: see `Automagic`."""
    names_by_layout: dict[tuple[Shape, torch.dtype, torch.device, bool], list[str]] = {}
    for name, p in parameters.items():
        names_by_layout.setdefault((matrix_shape(p.shape), p.dtype, p.device, p.is_contiguous()), []).append(name)
    result = []
    for (shape, _, device, _), names in names_by_layout.items():
        max_elements = batch_elements or (CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS)
        per_batch = max(1, max_elements // max(1, shape[0] * shape[1]))
        for first in range(0, len(names), per_batch):
            members = {name: parameters[name] for name in names[first : first + per_batch]}
            state = _stack_states(members, states, rates, state_shapes(shape, rates))
            rows = {key: tensor.unbind() for key, tensor in state.items()}
            views = tuple({key: views_of_key[row] for key, views_of_key in rows.items()} for row in range(len(members)))
            keys, batch = name_keys(list(members), device), tuple(members.values())
            result.append(ParameterBatch(batch, shape, state, views, keys, workspace_for(device)))
    return result


def _stack_states(
    parameters: Mapping[str, nn.Parameter],
    states: Mapping[torch.Tensor, State],
    rates: PackedRates,
    shapes: Mapping[str, tuple[int, torch.dtype]],
) -> dict[str, torch.Tensor]:
    count, device = len(parameters), next(iter(parameters.values())).device
    stacked = {key: torch.zeros(count, n, dtype=dtype, device=device) for key, (n, dtype) in shapes.items()}
    rates.initialize(stacked)
    for row, p in enumerate(parameters.values()):
        for key, saved in states.get(p, {}).items():
            stacked[key][row].copy_(saved)
    return stacked

"""The plain tensors that store a parameter, and how to replace them.

An ordinary parameter has one: its data. An 8-bit weight is a tensor subclass that consists of several. A replacement is
seen by everything that holds the parameter: layers, the optimizer, and autograd graphs before their backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False, slots=True)
class StoredTensor:
    """One plain tensor of a parameter."""

    owner: Any
    """The parameter, or the tensor subclass that it consists of."""
    attribute: str = "data"
    """The attribute of `owner` that holds it."""
    role: str = "weight"
    """Its role in the parameter: `weight`, or e.g. `weight.qdata`."""

    def get(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.attribute)
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Replace it by a tensor with the same shape and values, in any memory."""
        setattr(self.owner, self.attribute, tensor)


def stored_tensors(parameter: torch.Tensor, role: str = "weight") -> list[StoredTensor]:
    if is_plain(parameter):
        return [StoredTensor(parameter)]
    names, _ = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
    stored = []
    for name in names:
        part, inner_role = getattr(parameter, name), f"{role}.{name}"
        stored += [StoredTensor(parameter, name, inner_role)] if is_plain(part) else stored_tensors(part, inner_role)
    return stored


def is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)

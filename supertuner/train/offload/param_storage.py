"""The plain tensors that a parameter is stored in, and how others are put in their place.

A parameter has one, itself; a weight in 8 bits, which is a tensor of a class of its own, has several. Whoever holds the
parameter sees what was put there: a layer, an optimizer, a graph that waits for its backward pass.
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
    attribute: str | None
    """The owner's attribute; None: the owner is the parameter itself."""
    role: str = "weight"
    """What of the parameter it is: `weight`, or `weight.qdata`."""

    def get(self) -> torch.Tensor:
        tensor: torch.Tensor = self.owner.data if self.attribute is None else getattr(self.owner, self.attribute)
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Its shape and values must be those that are there, for others must not notice."""
        if self.attribute is None:
            self.owner.data = tensor
        else:
            setattr(self.owner, self.attribute, tensor)


def stored_tensors(parameter: torch.Tensor) -> list[StoredTensor]:
    if is_plain(parameter):
        return [StoredTensor(parameter, None)]
    return _inner_tensors(parameter, "weight")


def is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)


def _inner_tensors(tensor: torch.Tensor, role: str) -> list[StoredTensor]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    stored = []
    for name in names:
        part = getattr(tensor, name)
        inner_role = f"{role}.{name}"
        stored += [StoredTensor(tensor, name, inner_role)] if is_plain(part) else _inner_tensors(part, inner_role)
    return stored

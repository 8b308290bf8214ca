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
class Leaf:
    """One plain tensor of a parameter."""

    owner: Any
    name: str | None
    """The owner's attribute; None: the owner is the parameter itself."""
    what: str = "weight"
    """What of the parameter it is: `weight`, or `weight.qdata`."""

    def get(self) -> torch.Tensor:
        found: torch.Tensor = self.owner.data if self.name is None else getattr(self.owner, self.name)
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Its shape and values must be those that are there, for others must not notice."""
        if self.name is None:
            self.owner.data = tensor
        else:
            setattr(self.owner, self.name, tensor)


def leaves(parameter: torch.Tensor) -> list[Leaf]:
    if is_plain(parameter):
        return [Leaf(parameter, None)]
    return _inner(parameter, "weight")


def is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)


def _inner(tensor: torch.Tensor, what: str) -> list[Leaf]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    found = []
    for name in names:
        part = getattr(tensor, name)
        own = f"{what}.{name}"
        found += [Leaf(tensor, name, own)] if is_plain(part) else _inner(part, own)
    return found

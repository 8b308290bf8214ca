"""The seam for many processes: who this one is, and how gradients are added up. One process adds nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import nn


class Parallel(Protocol):
    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def ranks(self) -> int:
        """How many processes train together."""

    def add_gradients(self, parameters: Iterable[nn.Parameter], /) -> None:
        """Sum the gradients over all processes, in place; called once in a window, at its end."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One process."""

    rank: int = 0
    ranks: int = 1

    def add_gradients(self, parameters: Iterable[nn.Parameter], /) -> None:
        pass

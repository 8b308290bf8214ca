"""The seam for many processes: who this one is, and what all of them do together. One process adds nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from supertuner.models.adapters.attach import Trained
from supertuner.step.window import Reduction, Trainee


class Sharing(Protocol):
    """Weights shared out over the processes."""

    def share_out(self, trained: Trained, /) -> Trained:
        """An expert whose module is in host memory, in parts on the device of each process."""

    def share(self, module: nn.Module, /) -> None:
        """The same with a module that nothing is trained of."""

    def take_turns(self, trainees: Sequence[Trainee], /) -> None:
        """Have experts that do not compute wait in host memory, where that is another one."""


class Parallel(Protocol):
    """The processes that train together. Every call is made by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def ranks(self) -> int:
        """How many processes train together."""

    @property
    def local_rank(self) -> int:
        """Its number among those of its node."""

    @property
    def local_ranks(self) -> int:
        """How many of them its node has."""

    @property
    def in_step(self) -> bool:
        """Whether every process takes part in every pass through the model: it has a part of the weights."""

    @property
    def sharing(self) -> Sharing | None:
        """Who shares out the weights; None: each process has all of them."""

    @property
    def reduction(self) -> Reduction | None:
        """How the windows' gradients are added up; None: there is nobody to add to."""

    def agree(self, numbers: Sequence[int], /) -> list[int]:
        """The largest of each over all processes."""

    def gather(self, content: bytes, /) -> list[bytes]:
        """What each process says, in the order of ranks."""

    def told(self, content: bytes | None, /) -> bytes:
        """What rank 0 says; the others give None."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One process."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    in_step: bool = False
    sharing: Sharing | None = None
    reduction: Reduction | None = None

    def agree(self, numbers: Sequence[int], /) -> list[int]:
        return list(numbers)

    def gather(self, content: bytes, /) -> list[bytes]:
        return [content]

    def told(self, content: bytes | None, /) -> bytes:
        assert content is not None
        return content


@contextmanager
def in_turn(parallel: Parallel) -> Iterator[None]:
    """The first process does what is inside, and then the others: they find what it made."""
    if parallel.rank != 0:
        parallel.agree([0])
    yield
    if parallel.rank == 0:
        parallel.agree([0])

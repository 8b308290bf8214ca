"""The seam for many processes: who this one is, and what all of them do together. One process adds nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from supertuner.models.adapters.attach import TrainableExpert
from supertuner.step.window import ExpertState, GradientReduction


class WeightSharder(Protocol):
    """Weights shared out over the processes."""

    def shard_expert(self, trainable: TrainableExpert, /) -> TrainableExpert:
        """An expert whose module is in host memory, in parts on the device of each process."""

    def shard_module(self, module: nn.Module, /) -> None:
        """The same with a module that nothing is trained of."""

    def enable_expert_swap(self, expert_states: Sequence[ExpertState], /) -> None:
        """Have experts that do not compute wait in host memory, where that is another one."""


class ProcessGroup(Protocol):
    """The processes that train together. Every call is made by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes train together."""

    @property
    def local_rank(self) -> int:
        """Its number among those of its node."""

    @property
    def local_world_size(self) -> int:
        """How many of them its node has."""

    @property
    def forward_is_collective(self) -> bool:
        """Whether every process takes part in every pass through the model: it has a part of the weights."""

    @property
    def sharder(self) -> WeightSharder | None:
        """Who shares out the weights; None: each process has all of them."""

    @property
    def reduction(self) -> GradientReduction | None:
        """How the windows' gradients are added up; None: there is nobody to add to."""

    def all_reduce_max(self, numbers: Sequence[int], /) -> list[int]:
        """The largest of each over all processes."""

    def all_gather(self, content: bytes, /) -> list[bytes]:
        """What each process says, in the order of ranks."""

    def broadcast(self, content: bytes | None, /) -> bytes:
        """What rank 0 says; the others give None."""


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """One process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    forward_is_collective: bool = False
    sharder: WeightSharder | None = None
    reduction: GradientReduction | None = None

    def all_reduce_max(self, numbers: Sequence[int], /) -> list[int]:
        return list(numbers)

    def all_gather(self, content: bytes, /) -> list[bytes]:
        return [content]

    def broadcast(self, content: bytes | None, /) -> bytes:
        assert content is not None
        return content


@contextmanager
def rank_zero_first(process_group: ProcessGroup) -> Iterator[None]:
    """The first process does what is inside, and then the others: they find what it made."""
    if process_group.rank != 0:
        process_group.all_reduce_max([0])
    yield
    if process_group.rank == 0:
        process_group.all_reduce_max([0])

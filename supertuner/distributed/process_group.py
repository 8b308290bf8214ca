"""The seam to the other ranks: which rank this process is, and the collectives that a run needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from supertuner.models.adapters.attach import TrainableExpert
from supertuner.step.train_step import ExpertState, GradientReduction


class WeightSharder(Protocol):
    """Shards the weights of modules over the ranks."""

    def shard_expert(self, trainable: TrainableExpert, /) -> TrainableExpert:
        """Shard an expert whose module is in host memory; the result's shard is on this rank's device."""

    def shard_module(self, module: nn.Module, /) -> None:
        """Shard a module without trained parameters."""

    def enable_expert_swap(self, expert_states: Sequence[ExpertState], /) -> None:
        """Keep experts that do not compute in host memory, if the device has memory of its own."""


class ProcessGroup(Protocol):
    """The ranks that train together. Every collective is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its node."""

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""

    @property
    def forward_is_collective(self) -> bool:
        """Whether all ranks must run every pass of the model together, because each holds a shard of the weights."""

    @property
    def sharder(self) -> WeightSharder | None:
        """None: each rank holds all weights."""

    @property
    def reduction(self) -> GradientReduction | None:
        """How a window's gradients are summed over ranks; None: there is one rank."""

    def all_reduce_max(self, numbers: Sequence[int], /) -> list[int]:
        """The maximum of each number over all ranks."""

    def all_gather(self, content: bytes, /) -> list[bytes]:
        """The content of each rank, in the order of ranks."""

    def broadcast(self, content: bytes | None, /) -> bytes:
        """The content of rank 0; the other ranks pass None."""


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """The process group of a run with one process."""

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


def barrier(process_group: ProcessGroup) -> None:
    """Wait until all ranks have called it."""
    process_group.all_reduce_max([0])


@contextmanager
def rank_zero_first(process_group: ProcessGroup) -> Iterator[None]:
    """Rank 0 runs the block first, then the other ranks, which find what it made."""
    if process_group.rank != 0:
        barrier(process_group)
    yield
    if process_group.rank == 0:
        barrier(process_group)

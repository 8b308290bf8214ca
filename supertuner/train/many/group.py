"""The processes of a job, joined: sums of gradients at the end of a window, and the few words that all must agree on.

Gradients are added up once in a window, in pieces of a fixed size and order: on the same number of processes the same
bits come out. What processes tell each other is plain bytes; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from supertuner.config.launched import Launched
from supertuner.step.window import Reduction
from supertuner.train.many.meeting import COLLECTIVES_WAIT, meet
from supertuner.train.parallel import Sharing

PIECE_BYTES = 32 << 20
"""Gradients that are sent together: enough to fill any line, and little beside the gradients themselves."""


class Replicated:
    """A reduction for processes that each have all trained parameters."""

    def begin(self, last: bool) -> None:
        pass

    def add(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        trained = list(parameters)
        wanted = _anywhere([parameter.grad is not None for parameter in trained])
        total = loss.detach().clone()
        for piece in pieces([parameter for parameter, one in zip(trained, wanted, strict=True) if one]):
            gradients = [_gradient(parameter) for parameter in piece]
            whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(whole)
            parts = torch.split(whole, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        dist.all_reduce(total)
        return total

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        return norm


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """This process among others. (`Parallel` says what the calls mean.)"""

    place: Launched
    in_step: bool
    reduction: Reduction | None
    sharing: Sharing | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def ranks(self) -> int:
        return self.place.ranks

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    @property
    def local_ranks(self) -> int:
        return self.place.local_ranks

    def agree(self, numbers: Sequence[int], /) -> list[int]:
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        largest: list[int] = found.tolist()
        return largest

    def gather(self, content: bytes, /) -> list[bytes]:
        (longest,) = self.agree([len(content)])
        own = torch.zeros(8 + longest, dtype=torch.uint8)
        framed = len(content).to_bytes(8, "little") + content
        own[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        all_of_them = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(all_of_them, own)
        return [_unframed(one) for one in all_of_them]

    def told(self, content: bytes | None, /) -> bytes:
        assert (content is not None) == (self.rank == 0), "rank 0 tells, the others listen"
        return self.gather(content or b"")[0]


@contextmanager
def joined(
    place: Launched, device: torch.device, *, timeout_s: float, in_step: bool = False, store: Store | None = None
) -> Iterator[Group]:
    """Join the other processes, by the `store` that they have in common; leave them at the end."""
    store = store or meet(place, timeout_s=timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL and FSDP compute on the current one
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=place.rank, world_size=place.ranks, timeout=COLLECTIVES_WAIT
    )
    try:
        yield Group(place, in_step, Replicated())
    finally:
        dist.destroy_process_group()


def pieces(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype and device, in their order, as many together as `PIECE_BYTES` has room for."""
    begun: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        if kind in begun and parameter.nbytes > room[kind]:
            yield begun.pop(kind)
        begun.setdefault(kind, []).append(parameter)
        room[kind] = (room[kind] if len(begun[kind]) > 1 else PIECE_BYTES) - parameter.nbytes
    yield from begun.values()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Of a parameter that this process had no use for in the window, zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _anywhere(here: Sequence[bool]) -> list[bool]:
    """For each, whether it is so in any process."""
    found = torch.tensor(here, dtype=torch.uint8)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(one) for one in found.tolist()]


def _unframed(content: torch.Tensor) -> bytes:
    framed = content.numpy().tobytes()
    return framed[8 : 8 + int.from_bytes(framed[:8], "little")]

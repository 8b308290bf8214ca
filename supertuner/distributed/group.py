"""The processes of a job, joined, and the few words that all must agree on. (`sums.py` adds up what they compute.)

What processes tell each other is plain bytes; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from supertuner.config.sources.launcher import Launched
from supertuner.distributed.gradient_sum import Replicated
from supertuner.distributed.process_group import Sharing
from supertuner.distributed.rendezvous import COLLECTIVES_WAIT, meet
from supertuner.step.window import Reduction


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
    """Join the other processes, by the `store` that they have in common; leave them at the end. With an error nobody
    takes leave: NCCL's would wait for the others, who are to hear of the error first, and the process ends anyway."""
    store = store or meet(place, timeout_s=timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL and FSDP compute on the current one
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=place.rank, world_size=place.ranks, timeout=COLLECTIVES_WAIT
    )
    yield Group(place, in_step, Replicated())
    dist.destroy_process_group()


def _unframed(content: torch.Tensor) -> bytes:
    framed = content.numpy().tobytes()
    return framed[8 : 8 + int.from_bytes(framed[:8], "little")]

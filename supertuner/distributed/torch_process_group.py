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

from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.distributed.gradient_sum import ReplicatedGradientReduction
from supertuner.distributed.process_group import WeightSharder
from supertuner.distributed.rendezvous import COLLECTIVE_TIMEOUT, open_rendezvous_store
from supertuner.step.window import GradientReduction


@dataclass(frozen=True, eq=False, slots=True)
class TorchProcessGroup:
    """This process among others. (`Parallel` says what the calls mean.)"""

    launch_env: LauncherEnvironment
    forward_is_collective: bool
    reduction: GradientReduction | None
    sharder: WeightSharder | None = None

    @property
    def rank(self) -> int:
        return self.launch_env.rank

    @property
    def world_size(self) -> int:
        return self.launch_env.world_size

    @property
    def local_rank(self) -> int:
        return self.launch_env.local_rank

    @property
    def local_world_size(self) -> int:
        return self.launch_env.local_world_size

    def all_reduce_max(self, numbers: Sequence[int], /) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        largest: list[int] = values.tolist()
        return largest

    def all_gather(self, content: bytes, /) -> list[bytes]:
        (longest,) = self.all_reduce_max([len(content)])
        frame = torch.zeros(8 + longest, dtype=torch.uint8)
        framed = len(content).to_bytes(8, "little") + content
        frame[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        frames = [torch.empty_like(frame) for _ in range(self.world_size)]
        dist.all_gather(frames, frame)
        return [_unframe(one) for one in frames]

    def broadcast(self, content: bytes | None, /) -> bytes:
        assert (content is not None) == (self.rank == 0), "rank 0 tells, the others listen"
        return self.all_gather(content or b"")[0]


@contextmanager
def join_process_group(
    launch_env: LauncherEnvironment,
    device: torch.device,
    *,
    timeout_s: float,
    forward_is_collective: bool = False,
    store: Store | None = None,
) -> Iterator[TorchProcessGroup]:
    """Join the other processes, by the `store` that they have in common; leave them at the end. With an error nobody
    takes leave: NCCL's would wait for the others, who are to hear of the error first, and the process ends anyway."""
    store = store or open_rendezvous_store(launch_env, timeout_s=timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL and FSDP compute on the current one
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=launch_env.rank,
        world_size=launch_env.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    yield TorchProcessGroup(launch_env, forward_is_collective, ReplicatedGradientReduction())
    dist.destroy_process_group()


def _unframe(frame: torch.Tensor) -> bytes:
    framed = frame.numpy().tobytes()
    return framed[8 : 8 + int.from_bytes(framed[:8], "little")]

"""The process group of a job on torch.distributed: joins the ranks, watches them, and exchanges small messages.

Messages are plain bytes; nothing is pickled. (`gradient_sum.py` sums gradients.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.sources.environment import leave_nccl_errors_to_watchdog
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.waiting import waiting_for_other_ranks
from supertuner.distributed.gradient_sum import ReplicatedGradientReduction
from supertuner.distributed.process_group import ProcessGroup, SingleProcess, WeightSharder
from supertuner.distributed.rendezvous import COLLECTIVE_TIMEOUT, open_rendezvous_store
from supertuner.distributed.watchdog.heartbeat import Heartbeat, HeartbeatReduction
from supertuner.distributed.watchdog.watch import watch_ranks
from supertuner.step.train_step import GradientReduction


@dataclass(frozen=True, eq=False, slots=True)
class TorchProcessGroup:
    """This rank among the others. (`ProcessGroup` documents the methods.)"""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    forward_is_collective: bool = False
    reduction: GradientReduction = field(default_factory=ReplicatedGradientReduction)
    sharder: WeightSharder | None = None

    def all_reduce_max(self, numbers: Sequence[int], /) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        with waiting_for_other_ranks("all-reduce of control values"):
            dist.all_reduce(values, dist.ReduceOp.MAX)
        largest: list[int] = values.tolist()
        return largest

    def all_gather(self, content: bytes, /) -> list[bytes]:
        (longest,) = self.all_reduce_max([len(content)])
        frame = torch.zeros(8 + longest, dtype=torch.uint8)
        framed = len(content).to_bytes(8, "little") + content
        frame[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        frames = [torch.empty_like(frame) for _ in range(self.world_size)]
        with waiting_for_other_ranks("all-gather of messages"):
            dist.all_gather(frames, frame)
        return [_unframe(received) for received in frames]

    def broadcast(self, content: bytes | None, /) -> bytes:
        assert (content is not None) == (self.rank == 0), "rank 0 passes the content, the other ranks None"
        return self.all_gather(content or b"")[0]


@contextmanager
def join_process_group(
    env: LauncherEnvironment, device: torch.device, *, timeout_s: float, store: Store | None = None
) -> Iterator[TorchProcessGroup]:
    """Join the other ranks through their common `store`; leave the group when the block ends.

    After an error the group is not destroyed: NCCL would wait for the other ranks, which must first receive the error,
    and the process ends anyway.
    """
    store = PrefixStore("group", store or open_rendezvous_store(env, timeout_s=timeout_s))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL and FSDP use the current device
        leave_nccl_errors_to_watchdog()
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, rank=env.rank, world_size=env.world_size, store=store)
    yield TorchProcessGroup(env.rank, env.world_size, env.local_rank, env.local_world_size)
    dist.destroy_process_group()


def _unframe(frame: torch.Tensor) -> bytes:
    framed = frame.numpy().tobytes()
    return framed[8 : 8 + int.from_bytes(framed[:8], "little")]


MIN_RENDEZVOUS_S = 120.0
"""Lower limit of the wait for all ranks at the start: some node may load its libraries from a cold disk."""


@contextmanager
def open_process_group(
    settings: ParallelSettings, launch_env: LauncherEnvironment, device: torch.device, heartbeat: Heartbeat
) -> Iterator[ProcessGroup]:
    """Join the other ranks and watch them; SingleProcess without others. `heartbeat` receives the signs of life."""
    if launch_env.world_size == 1:
        yield SingleProcess()
        return
    timeout_s = settings.timeout_s
    store = open_rendezvous_store(launch_env, timeout_s=max(timeout_s, MIN_RENDEZVOUS_S))
    with (
        watch_ranks(store, launch_env, heartbeat, timeout_s=timeout_s),
        join_process_group(launch_env, device, timeout_s=timeout_s, store=store) as group,
    ):
        if settings.strategy != "fsdp":
            yield replace(group, reduction=HeartbeatReduction(group.reduction, heartbeat))
            return
        from supertuner.distributed.fsdp import FsdpGradientReduction, create_fsdp_sharder

        sharder = create_fsdp_sharder(settings, device)
        reduction = HeartbeatReduction(FsdpGradientReduction(sharder), heartbeat)
        yield replace(group, forward_is_collective=True, sharder=sharder, reduction=reduction)

"""The processes of a job as the run sees them, from the launcher's numbers and the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.distributed.process_group import ProcessGroup, SingleProcess
from supertuner.distributed.rendezvous import open_rendezvous_store
from supertuner.distributed.torch_process_group import join_process_group
from supertuner.distributed.watchdog.heartbeat import Heartbeat, HeartbeatReduction
from supertuner.distributed.watchdog.watch import watch_ranks

MIN_RENDEZVOUS_S = 120.0
"""The least that processes wait for each other at the start: on some node, libraries come from a cold disk."""


@contextmanager
def open_process_group(
    settings: ParallelSettings, launch_env: LauncherEnvironment, device: torch.device, heartbeat: Heartbeat
) -> Iterator[ProcessGroup]:
    """Join the other processes, and watch them; one process joins nobody. `pulse` is for signs of life."""
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
            assert group.reduction is not None
            yield replace(group, reduction=HeartbeatReduction(group.reduction, heartbeat))
            return
        from supertuner.distributed.fsdp import FsdpGradientReduction, create_fsdp_sharder

        sharder = create_fsdp_sharder(settings, device)
        yield replace(
            group,
            forward_is_collective=True,
            sharder=sharder,
            reduction=HeartbeatReduction(FsdpGradientReduction(sharder), heartbeat),
        )

"""The processes of a job as the run sees them, from the launcher's numbers and the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.sources.launcher import Launched
from supertuner.distributed.group import joined
from supertuner.distributed.process_group import Alone, Parallel
from supertuner.distributed.rendezvous import meet
from supertuner.distributed.watchdog.heartbeat import MarkedReduction, Pulse
from supertuner.distributed.watchdog.watch import watching

MEETING_S = 120.0
"""The least that processes wait for each other at the start: on some node, libraries come from a cold disk."""


@contextmanager
def open_parallel(
    settings: ParallelSettings, launched: Launched, device: torch.device, pulse: Pulse
) -> Iterator[Parallel]:
    """Join the other processes, and watch them; one process joins nobody. `pulse` is for signs of life."""
    if launched.ranks == 1:
        yield Alone()
        return
    timeout_s = settings.timeout_s
    store = meet(launched, timeout_s=max(timeout_s, MEETING_S))
    with (
        watching(store, launched, pulse, timeout_s=timeout_s),
        joined(launched, device, timeout_s=timeout_s, store=store) as group,
    ):
        if settings.strategy != "fsdp":
            assert group.reduction is not None
            yield replace(group, reduction=MarkedReduction(group.reduction, pulse))
            return
        from supertuner.distributed.fsdp import Sharded, sharing_over_all

        sharing = sharing_over_all(settings, device)
        yield replace(group, in_step=True, sharing=sharing, reduction=MarkedReduction(Sharded(sharing), pulse))

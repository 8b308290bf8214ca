"""The processes of a job as the run sees them, from the launcher's numbers and the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from supertuner.config.launched import Launched
from supertuner.config.parallel import ParallelSettings
from supertuner.train.many.group import joined
from supertuner.train.many.meeting import meet
from supertuner.train.many.pulse import MarkedReduction, Pulse
from supertuner.train.many.watch import watching
from supertuner.train.parallel import Alone, Parallel

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
        from supertuner.train.many.shards import Sharded, sharing_over_all

        sharing = sharing_over_all(settings, device)
        yield replace(group, in_step=True, sharing=sharing, reduction=MarkedReduction(Sharded(sharing), pulse))

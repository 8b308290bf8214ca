"""The processes of a job as the run sees them, from the launcher's numbers and the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from supertuner.config.launched import Launched
from supertuner.config.parallel import ParallelSettings
from supertuner.train.many.group import joined
from supertuner.train.parallel import Alone, Parallel


@contextmanager
def open_parallel(settings: ParallelSettings, launched: Launched, device: torch.device) -> Iterator[Parallel]:
    """Join the other processes; one process joins nobody."""
    if launched.ranks == 1:
        yield Alone()
        return
    with joined(launched, device, timeout_s=settings.timeout_s) as group:
        if settings.strategy != "fsdp":
            yield group
            return
        from supertuner.train.many.shards import Sharded, sharing_over_all

        sharing = sharing_over_all(settings, device)
        yield replace(group, in_step=True, sharing=sharing, reduction=Sharded(sharing))

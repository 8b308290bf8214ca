"""The room there is for an arena, read from this machine at the moment of asking."""

from __future__ import annotations

import os
from pathlib import Path

from supertuner.core.host import HostFacts
from supertuner.data.staging.budget import StagingCapacity, file_system_type, memory_limit_bytes

_MEMORY_FILE_SYSTEMS = frozenset(("tmpfs", "ramfs"))


def measure_capacity(home: Path, host: HostFacts, memory_limit_gb: float | None) -> StagingCapacity:
    mounts = (host.root / "proc/self/mountinfo").read_text()
    return StagingCapacity(
        in_memory=file_system_type(mounts, os.path.realpath(home)) in _MEMORY_FILE_SYSTEMS,
        free_bytes=host.free_bytes(home),
        memory_total=host.memory_total(),
        memory_available=host.memory_available(),
        limit_bytes=memory_limit_bytes(memory_limit_gb),
    )

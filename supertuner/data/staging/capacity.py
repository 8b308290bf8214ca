"""The room there is for an arena, read from this machine at the moment of asking."""

from __future__ import annotations

import os
from pathlib import Path

from supertuner.core.host import Host
from supertuner.data.staging.budget import Room, file_system, limit_bytes

_MEMORY = frozenset(("tmpfs", "ramfs"))


def room_of(home: Path, host: Host, memory_limit_gb: float | None) -> Room:
    mounts = (host.root / "proc/self/mountinfo").read_text()
    return Room(
        in_memory=file_system(mounts, os.path.realpath(home)) in _MEMORY,
        free_bytes=host.free_bytes(home),
        memory_total=host.memory_total(),
        memory_available=host.memory_available(),
        limit_bytes=limit_bytes(memory_limit_gb),
    )

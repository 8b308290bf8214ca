"""The CPUs and memory that this process may use, within its container. None means that a fact is unknown.

All files are read below `root`, so that tests can describe another machine by a folder of files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from supertuner.core.types import KIB


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Reads facts about the host from /proc and /sys below `root`."""

    root: Path = Path("/")

    def cpus(self) -> int:
        """Number of CPUs that this process may use: its affinity mask, limited by a cgroup quota."""
        return max(1, min_known(len(os.sched_getaffinity(0)), self._cpu_quota()) or 1)

    def memory_total(self) -> int | None:
        """Bytes of RAM of the machine, or of the container if it has less."""
        return min_known(self._meminfo_bytes("MemTotal"), self._cgroup_memory()[0])

    def memory_available(self) -> int | None:
        """Bytes that can be allocated without swapping: MemAvailable, or what the cgroup has left if that is less."""
        limit, used = self._cgroup_memory()
        remaining = None if limit is None or used is None else max(0, limit - used)
        return min_known(self._meminfo_bytes("MemAvailable"), remaining)

    def memory_cgroup(self) -> tuple[Path, int] | None:
        """The cgroup with the lowest memory limit for this process, as (folder, limit); None without a limit."""
        limits = []
        for folder in self._cgroup_folders("memory"):
            limit = min_known(_read_number(folder / "memory.max"), _read_number(folder / "memory.limit_in_bytes"))
            if limit is not None and limit < 1 << 60:  # version 1 writes "no limit" as a huge number
                limits.append((folder, limit))
        return min(limits, key=lambda pair: pair[1], default=None)

    def free_bytes(self, folder: Path) -> int:
        """Free bytes of the file system below `folder`, for this user."""
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize

    def _meminfo_bytes(self, field: str) -> int | None:
        for line in read_lines(self.root / "proc/meminfo"):
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * KIB
        return None

    def _cgroup_folders(self, controller: str) -> list[Path]:
        """The folders of this process's cgroup and its ancestors, for cgroup versions 1 and 2."""
        folders: list[Path] = []
        for line in read_lines(self.root / "proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base = self.root / "sys/fs/cgroup"
            elif controller in controllers.split(","):
                base = self.root / "sys/fs/cgroup" / controller
            else:
                continue
            own_folder = base / path.lstrip("/")
            folders += [p for p in (own_folder, *own_folder.parents) if p.is_relative_to(base)]
        return folders

    def _cgroup_memory(self) -> tuple[int | None, int | None]:
        """(limit, bytes in use) of the cgroup with the lowest limit; reclaimable file cache does not count as used."""
        tightest = self.memory_cgroup()
        if tightest is None:
            return None, None
        folder, limit = tightest
        used = min_known(_read_number(folder / "memory.current"), _read_number(folder / "memory.usage_in_bytes"))
        return limit, None if used is None else max(0, used - _reclaimable_bytes(folder / "memory.stat"))

    def _cpu_quota(self) -> int | None:
        quotas = []
        for folder in self._cgroup_folders("cpu"):
            text = read_lines(folder / "cpu.max")
            pair = text[0].split() if text else []
            if len(pair) == 2 and pair[0] != "max":
                quotas.append(-(-int(pair[0]) // int(pair[1])))
            quota, period = _read_number(folder / "cpu.cfs_quota_us"), _read_number(folder / "cpu.cfs_period_us")
            if quota is not None and period and quota > 0:
                quotas.append(-(-quota // period))
        return min(quotas, default=None)


def read_lines(path: Path) -> list[str]:
    """The lines of a kernel file; none if this kernel or container does not have the file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_number(path: Path) -> int | None:
    lines = read_lines(path)
    return int(lines[0]) if lines and lines[0].lstrip("-").isdigit() else None


def _reclaimable_bytes(stat: Path) -> int:
    """Bytes of file cache that the kernel frees under memory pressure; without shared memory (tmpfs, our arenas)."""
    fields = dict(line.split()[:2] for line in read_lines(stat) if len(line.split()) >= 2)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", "0")))


def min_known(*values: int | None) -> int | None:
    return min((v for v in values if v is not None), default=None)

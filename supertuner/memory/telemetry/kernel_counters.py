"""Reads the kernel's memory counters often and cheaply: files stay open and are read in place, a few microseconds each.

A source returns figures when called; a counter that this kernel does not have is absent. Monotonic counters are
returned as the change since the last call.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from supertuner.core.host import HostFacts, min_known
from supertuner.core.types import KIB
from supertuner.memory.probe import NumaNodeFacts

READ_BYTES: Final = 1 << 16
"""Larger than any of these files; the kernel returns what there is."""

VMSTAT_NAMES: Final = {
    "pgmigrate_success": "system.migrated_pages",
    "pgmigrate_fail": "system.unmigrated_pages",
    "numa_pages_migrated": "system.balanced_pages",
    "numa_hint_faults": "system.balancing_faults",
    "numa_miss": "system.misplaced_pages",
    "pswpin": "system.swapped_in_pages",
    "pswpout": "system.swapped_out_pages",
}
"""Machine-wide counters of /proc/vmstat, and the names of our figures for them."""
NODE_FIELDS: Final = {"MemFree": "free_bytes", "AnonPages": "anonymous_bytes", "FilePages": "file_bytes"}


class KernelFile:
    """A file of /proc or /sys that stays open. Its content is empty if the file is missing or disappears."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._handle = None  # this kernel or container does not have the file

    def content(self) -> bytes:
        if self._handle is None:
            return b""
        try:
            return os.pread(self._handle, READ_BYTES, 0)
        except OSError:
            return b""  # the node or cgroup was removed in the meantime

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class HostMemorySource:
    """Host memory that can still be allocated within the container's limit, and the resident memory of this process."""

    def __init__(self, host: HostFacts) -> None:
        self._meminfo = KernelFile(host.root / "proc/meminfo")
        self._statm = KernelFile(host.root / "proc/self/statm")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        cgroup = host.memory_cgroup()
        self._cgroup_limit = cgroup[1] if cgroup else None
        names = ("memory.current", "memory.usage_in_bytes", "memory.stat")
        self._cgroup_files = {name: KernelFile(cgroup[0] / name) for name in names} if cgroup else {}

    def __call__(self) -> dict[str, int]:
        meminfo, figures = self._meminfo.content(), {}
        available = min_known(_meminfo_field(meminfo, "MemAvailable:"), self._cgroup_left())
        if available is not None:
            figures["host.available_bytes"] = available
        swap, free = _meminfo_field(meminfo, "SwapTotal:"), _meminfo_field(meminfo, "SwapFree:")
        if swap is not None and free is not None:
            figures["host.swap_used_bytes"] = swap - free
        pages = self._statm.content().split()
        if len(pages) > 1:
            figures["process.resident_bytes"] = int(pages[1]) * self._page_bytes
        return figures

    def close(self) -> None:
        for file in (self._meminfo, self._statm, *self._cgroup_files.values()):
            file.close()

    def _cgroup_left(self) -> int | None:
        """Memory that the cgroup has left. Cache that it would free counts as available, as in `HostFacts`."""
        if self._cgroup_limit is None:
            return None
        texts = {name: file.content() for name, file in self._cgroup_files.items()}
        used = texts["memory.current"] or texts["memory.usage_in_bytes"]
        if not used:
            return None
        stat = texts["memory.stat"]
        cache = _count(stat, "inactive_file") or _count(stat, "total_inactive_file") or 0
        return max(0, self._cgroup_limit - max(0, int(used) - cache))


class CounterSource:
    """Monotonic counters: page faults of this process, and pages that the kernel migrated or swapped on the machine."""

    def __init__(self, host: HostFacts) -> None:
        self._vmstat = KernelFile(host.root / "proc/vmstat")
        self._last = self._read_counts()

    def __call__(self) -> dict[str, int]:
        last, self._last = self._last, self._read_counts()
        return {name: count - last[name] for name, count in self._last.items() if name in last}

    def close(self) -> None:
        self._vmstat.close()

    def _read_counts(self) -> dict[str, int]:
        usage, vmstat = resource.getrusage(resource.RUSAGE_SELF), self._vmstat.content()
        # Of all threads; a minor fault found its page in memory, a major one waited for it.
        faults = {"process.minor_faults": usage.ru_minflt, "process.major_faults": usage.ru_majflt}
        counts = {name: _count(vmstat, field) for field, name in VMSTAT_NAMES.items()}
        return faults | {name: count for name, count in counts.items() if count is not None}


class NumaNodeSource:
    """Memory use of each NUMA node. On a Grace superchip GPU memory is a node, so page cache that landed there is
    visible.
    """

    def __init__(self, host: HostFacts, nodes: Iterable[NumaNodeFacts]) -> None:
        folder = host.root / "sys/devices/system/node"
        self._files = {node.number: KernelFile(folder / f"node{node.number}/meminfo") for node in nodes}

    def __call__(self) -> dict[str, int]:
        figures = {}
        for number, file in self._files.items():
            text = file.content()
            for field, name in NODE_FIELDS.items():
                value = _meminfo_field(text, f"{field}:")
                if value is not None:
                    figures[f"node{number}.{name}"] = value
        return figures

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _meminfo_field(text: bytes, field: str) -> int | None:
    """A field of a meminfo file in bytes. Searches the raw text: splitting all of it takes longer than reading it."""
    position = text.find(b" " + field.encode()) if text.startswith(b"Node") else _line_start(text, field.encode())
    if position < 0:
        return None
    words = text[position : position + 80].split(None, 2)
    return int(words[1]) * KIB if len(words) > 1 else None


def _count(text: bytes, field: str) -> int | None:
    """A counter of a file with lines of the form `name number`."""
    position = _line_start(text, field.encode() + b" ")
    return None if position < 0 else int(text[position : position + 80].split(None, 2)[1])


def _line_start(text: bytes, word: bytes) -> int:
    if text.startswith(word):
        return 0
    at = text.find(b"\n" + word)
    return at if at < 0 else at + 1

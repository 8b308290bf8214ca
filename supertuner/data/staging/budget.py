"""Decides whether a dataset fits into the memory or disk it is staged to, and how much is missing if not. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.core.errors import DoesNotFitError
from supertuner.core.types import GIB, KIB, bytes_text

PAGE_BYTES = 4 * KIB
"""Memory and disks are allocated in pages: the last page of each file counts fully."""
_FIXED_BYTES = 60 * KIB
_THREAD_BYTES = 8 * KIB
_UNIT_BYTES = 176
"""Bytes of an arena besides the files while it is being sealed: journal, index and columns; measured, rounded up."""
_RESERVE_SHARE = 0.05
_RESERVE_AT_MOST = 2 * GIB


@dataclass(frozen=True, slots=True)
class StagingCapacity:
    """Free memory and disk space, and the configured limit. None means unknown, and is not used as a bound."""

    in_memory: bool
    """Whether the arena's files are in memory (tmpfs) or on a disk."""
    free_bytes: int
    """Free on the file system of the arena."""
    memory_total: int | None
    memory_available: int | None
    limit_bytes: int | None
    """`in_memory.memory_limit_gb`."""


@dataclass(frozen=True, slots=True)
class StagingBudget:
    """Bytes that may be stored, and what limits them."""

    nbytes: int
    bound_by: str
    """Continues a sentence after the number of bytes: `are free on …`."""
    remedy: str


def memory_limit_bytes(memory_limit_gb: float | None) -> int | None:
    """`memory_limit_gb` in bytes. Its unit is 2^30 bytes, as in all printed sizes."""
    return None if memory_limit_gb is None else int(memory_limit_gb * GIB)


def reserved_memory_bytes(memory_total: int | None) -> int:
    """Memory that staging leaves to other programs: 5 % of the machine's memory, at most 2 GiB."""
    return 0 if memory_total is None else min(_RESERVE_AT_MOST, int(memory_total * _RESERVE_SHARE))


def lowered_memory_limit(capacity: StagingCapacity) -> int | None:
    """What `memory_limit_gb` is lowered to because the machine has less memory; None if it is not lowered."""
    if not capacity.in_memory or capacity.limit_bytes is None or capacity.memory_total is None:
        return None
    max_limit = capacity.memory_total - reserved_memory_bytes(capacity.memory_total)
    return None if capacity.limit_bytes <= max_limit else max_limit


def compute_budget(capacity: StagingCapacity) -> StagingBudget:
    """The tightest of all bounds."""
    kind, remedy = "disk", "set arena.disk_home"
    if capacity.in_memory:
        kind, remedy = "shared memory", "free some with `supertuner arena rm`, or set arena.home"
    bounds = [StagingBudget(capacity.free_bytes, f"are free on the {kind} below the arena's home", remedy)]
    if capacity.in_memory and capacity.memory_available is not None:
        reserved = reserved_memory_bytes(capacity.memory_total)
        text = f"of memory are available (MemAvailable or cgroup, {bytes_text(reserved)} kept for other programs)"
        nbytes, remedy = max(0, capacity.memory_available - reserved), 'free memory, or set type: "disk"'
        bounds.append(StagingBudget(nbytes, text, remedy))
    if capacity.in_memory and capacity.limit_bytes is not None:
        bounds.append(StagingBudget(capacity.limit_bytes, "are allowed by in_memory.memory_limit_gb", "raise it"))
    return min(bounds, key=lambda b: b.nbytes)


def stored_bytes(nbytes: int) -> int:
    """Bytes that a file of `nbytes` occupies, in whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def overhead_bytes(files: int, key_bytes: int, caption_bytes: int, threads: int) -> int:
    """Bytes of the arena besides the files. Keys count twice: they are in the journal and in the index."""
    return _FIXED_BYTES + threads * _THREAD_BYTES + files * _UNIT_BYTES + 2 * key_bytes + caption_bytes


def require_fits(dataset: str, needed_bytes: int, files: int, budget: StagingBudget, about: str = "") -> None:
    """Raise DoesNotFitError, with the missing bytes, if `needed_bytes` exceeds the budget.

    `about` precedes the numbers in the message: "about " for an estimate.
    """
    if needed_bytes > budget.nbytes:
        missing = bytes_text(needed_bytes - budget.nbytes)
        raise DoesNotFitError(
            f"datasets[{dataset}] does not fit: its {files} files need {about}{bytes_text(needed_bytes)}, and only "
            f"{bytes_text(budget.nbytes)} {budget.bound_by}; {about}{missing} are missing; {budget.remedy}, set "
            'in_memory.compression: "auto" if the files are not compressed yet, or use fewer (limit)'
        )


def file_system_type(mountinfo: str, path: str) -> str:
    """Type of the file system of the absolute `path`, from the text of /proc/self/mountinfo; "" if unknown."""
    best, fs_type = -1, ""
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if not dash or len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ").rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= best:
            best, fs_type = len(point), after.split()[0]
    return fs_type

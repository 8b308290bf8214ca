"""Checks of the host: page size, memory, limits and disk. Pure: a snapshot in, checks out.

Some settings are harmful only on Grace: NUMA balancing unmaps pages to find out which CPU uses them, and a GPU that
uses the host's page tables faults on each of them; 4 KiB pages need sixteen times the translations of 64 KiB pages.
"""

from __future__ import annotations

from typing import Final

from supertuner.core.types import GIB, KIB, bytes_text
from supertuner.tools.doctor.check_result import CheckResult, absent, bad, good, warning
from supertuner.tools.doctor.system_snapshot import SystemSnapshot

GROUP: Final = "host"
LITTLE_SHARE, TOO_LITTLE_SHARE = 0.25, 0.05
"""Available memory as a share of the total: below the first there is little for staging and caches; below the second
hardly anything can start."""
MIN_SHM_SHARE: Final = 0.4
"""Share of memory. Linux gives /dev/shm half of the memory; containers give it 64 MiB by default."""
MIN_OPEN_FILES: Final = 4096
MIN_FREE_DISK_BYTES: Final = 20 * GIB
PAGE_64K_BYTES: Final = 64 * KIB


def shares_page_tables(snapshot: SystemSnapshot) -> bool:
    """Whether this is a Grace superchip with two memories, where the kernel's page settings also affect the GPU."""
    facts = snapshot.facts
    by_row = facts.machine is not None and facts.machine.ats and not facts.machine.one_pool
    return by_row or (facts.ats is True and facts.one_pool is not True)


def check_page_size(snapshot: SystemSnapshot) -> CheckResult:
    page_bytes = snapshot.facts.page_bytes
    if page_bytes is None:
        return absent(GROUP, "page size", "unknown")
    if shares_page_tables(snapshot) and page_bytes < PAGE_64K_BYTES:
        finding = f"{bytes_text(page_bytes)} on a Grace superchip: many address translations; 64 KiB is recommended"
        install = "`sudo apt install linux-nvidia-64k-hwe-24.04` (its name on Ubuntu 24.04)"
        return warning(GROUP, "page size", finding, f"boot a 64k kernel: {install}, then reboot")
    return good(GROUP, "page size", bytes_text(page_bytes))


def check_numa_balancing(snapshot: SystemSnapshot) -> CheckResult:
    on = snapshot.facts.numa_balancing
    if on is None:
        return absent(GROUP, "NUMA balancing", "not in this kernel")
    if on and shares_page_tables(snapshot):
        finding = "on: the kernel unmaps pages to track their use, and the GPU faults on each of them"
        remedy = "`sudo sysctl -w kernel.numa_balancing=0`; to keep it, write kernel.numa_balancing=0 to /etc/sysctl.d"
        return warning(GROUP, "NUMA balancing", finding, remedy)
    return good(GROUP, "NUMA balancing", "on, which is harmless on this machine" if on else "off")


def check_huge_pages(snapshot: SystemSnapshot) -> CheckResult:
    mode, page = snapshot.facts.transparent_hugepages, snapshot.facts.page_bytes
    if mode is None:
        return absent(GROUP, "huge pages", "this kernel has no transparent huge pages")
    remedy = "`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`"
    if mode == "always" and page == PAGE_64K_BYTES:
        finding = "always: with 64 KiB pages a huge page is 512 MiB, so small processes use much memory"
        return warning(GROUP, "huge pages", finding, remedy)
    if mode == "never" and page is not None and page < PAGE_64K_BYTES:
        finding = f"never: with {bytes_text(page)} pages, access to large tensors is slower"
        return warning(GROUP, "huge pages", finding, remedy)
    return good(GROUP, "huge pages", mode)


def check_memory(snapshot: SystemSnapshot) -> CheckResult:
    total, available = snapshot.facts.memory_total, snapshot.resources.host_available
    if total is None or available is None:
        return absent(GROUP, "memory", "unknown")
    text = f"{bytes_text(available)} of {bytes_text(total)} available"
    if any(node.gpu is not None for node in snapshot.facts.nodes):
        text += " (the total includes GPU memory, the available part does not)"
    remedy = "find large processes: `ps aux --sort=-rss | head`, and arenas of earlier runs: `supertuner arena ls`"
    if available < TOO_LITTLE_SHARE * total:
        return bad(GROUP, "memory", f"{text}: too little to train", remedy)
    if available < LITTLE_SHARE * total:
        return warning(GROUP, "memory", f"{text}: little", remedy)
    return good(GROUP, "memory", text)


def check_memory_limit(snapshot: SystemSnapshot) -> CheckResult:
    granted, machine = snapshot.facts.memory_total, snapshot.resources.machine_memory
    if granted is None or machine is None:
        return absent(GROUP, "memory limit", "unknown")
    if granted < machine:
        finding = f"a container or job limit grants {bytes_text(granted)} of the machine's {bytes_text(machine)}"
        if granted < machine / 2:
            remedy = "if this is not intended, raise it: `docker run --memory=…`, or `sbatch --mem=…` for a Slurm job"
            return warning(GROUP, "memory limit", finding, remedy)
        return good(GROUP, "memory limit", finding)
    return good(GROUP, "memory limit", "none")


def check_swap(snapshot: SystemSnapshot) -> CheckResult:
    used = snapshot.facts.swap_used
    if used is None:
        return absent(GROUP, "swap", "unknown")
    if used:
        remedy = "when memory is free: `sudo swapoff -a && sudo swapon -a`; watch `vmstat 1` during training"
        return warning(GROUP, "swap", f"{bytes_text(used)} in use: memory was short, and swapped data are slow", remedy)
    return good(GROUP, "swap", "not in use")


def check_shared_memory(snapshot: SystemSnapshot) -> CheckResult:
    size, free, total = snapshot.resources.shm_bytes, snapshot.resources.shm_free, snapshot.facts.memory_total
    if size is None or free is None:
        remedy = "mount it: `sudo mount -t tmpfs -o size=80% tmpfs /dev/shm`; or set arena.home to another folder"
        return bad(GROUP, "/dev/shm", "missing: staged data and caches are stored in it", remedy)
    text = f"{bytes_text(free)} of {bytes_text(size)} free"
    if total is not None and size < MIN_SHM_SHARE * total:
        finding = f"{text}, {size / total:.0%} of memory: staged data and caches are stored in it"
        remedy = "`sudo mount -o remount,size=80% /dev/shm`; in a container `docker run --shm-size=…` or --ipc=host"
        return warning(GROUP, "/dev/shm", finding, remedy)
    return good(GROUP, "/dev/shm", text)


def check_open_files(snapshot: SystemSnapshot) -> CheckResult:
    limit = snapshot.resources.open_files
    if limit is not None and limit < MIN_OPEN_FILES:
        finding = f"at most {limit:,}: staging with many threads may run out"
        return warning(GROUP, "open files", finding, "`ulimit -n 65536`")
    return good(GROUP, "open files", "no limit" if limit is None else f"at most {limit:,}")


def check_disk(snapshot: SystemSnapshot) -> CheckResult:
    free, folder = snapshot.resources.folder_free, snapshot.resources.folder
    if free is None:
        return absent(GROUP, "disk", f"{folder} is not a folder")
    if free < MIN_FREE_DISK_BYTES:
        finding = f"{bytes_text(free)} free in {folder}: checkpoints may not fit"
        return warning(GROUP, "disk", finding, "find a larger disk with `df -h`, and set run.output_dir to it")
    return good(GROUP, "disk", f"{bytes_text(free)} free in {folder}")


HOST_CHECKS: Final = (
    check_page_size, check_numa_balancing, check_huge_pages, check_memory, check_memory_limit, check_swap,
    check_shared_memory, check_open_files, check_disk,
)  # fmt: skip
"""In display order."""

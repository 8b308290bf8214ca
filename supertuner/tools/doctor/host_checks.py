"""The host, judged: pages, memory, and what else a run leans on. Pure: a situation in, checks out.

What is a trap on Grace need not be one elsewhere: NUMA balancing unmaps pages to see who uses them, and a GPU that
walks the host's page tables faults on each of them; 4 KiB pages cost it sixteen times the translations of 64 KiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from supertuner.core.types import GIB, KIB, bytes_text
from supertuner.tools.doctor.check_result import CheckResult, absent, bad, good, warning
from supertuner.tools.doctor.system_snapshot import SystemSnapshot

GROUP: Final = "host"
LITTLE_SHARE, TOO_LITTLE_SHARE = 0.25, 0.05
"""MemAvailable as a share of all memory: below the one staging and caches get tight, below the other nothing starts."""
MIN_SHM_SHARE: Final = 0.4
"""Of memory. Linux gives /dev/shm half of it; containers give 64 MiB unless told otherwise."""
MIN_OPEN_FILES: Final = 4096
MIN_FREE_DISK_BYTES: Final = 20 * GIB
PAGE_64K_BYTES: Final = 64 * KIB


def host_checks(snapshot: SystemSnapshot) -> Iterator[CheckResult]:
    yield check_page_size(snapshot)
    yield check_numa_balancing(snapshot)
    yield check_huge_pages(snapshot)
    yield check_memory(snapshot)
    yield check_memory_limit(snapshot)
    yield check_swap(snapshot)
    yield check_shared_memory(snapshot)
    yield check_open_files(snapshot)
    yield check_disk(snapshot)


def shares_page_tables(snapshot: SystemSnapshot) -> bool:
    """A Grace superchip with memory on both sides: there the kernel's settings are the GPU's too."""
    facts = snapshot.facts
    by_row = facts.machine is not None and facts.machine.ats and not facts.machine.one_pool
    return by_row or (facts.ats is True and facts.one_pool is not True)


def check_page_size(snapshot: SystemSnapshot) -> CheckResult:
    page_bytes = snapshot.facts.page_bytes
    if page_bytes is None:
        return absent(GROUP, "page size", "not known")
    if shares_page_tables(snapshot) and page_bytes < PAGE_64K_BYTES:
        finding = f"{bytes_text(page_bytes)} on a Grace superchip: hints get small, and translations many; 64 KiB is recommended"
        remedy = (
            "boot a 64k kernel: `sudo apt install linux-nvidia-64k-hwe-24.04` (its name on Ubuntu 24.04), then reboot"
        )
        return warning(GROUP, "page size", finding, remedy)
    return good(GROUP, "page size", bytes_text(page_bytes))


def check_numa_balancing(snapshot: SystemSnapshot) -> CheckResult:
    on = snapshot.facts.numa_balancing
    if on is None:
        return absent(GROUP, "NUMA balancing", "this kernel has none")
    if on and shares_page_tables(snapshot):
        finding = "on: the kernel unmaps pages to see who uses them, and the GPU faults on each"
        remedy = "`sudo sysctl -w kernel.numa_balancing=0`, and kernel.numa_balancing=0 in /etc/sysctl.d to keep it"
        return warning(GROUP, "NUMA balancing", finding, remedy)
    return good(GROUP, "NUMA balancing", "on, which is no trap on this machine" if on else "off")


def check_huge_pages(snapshot: SystemSnapshot) -> CheckResult:
    mode, page = snapshot.facts.transparent_hugepages, snapshot.facts.page_bytes
    if mode is None:
        return absent(GROUP, "huge pages", "this kernel has no transparent ones")
    remedy = "`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`"
    if mode == "always" and page == PAGE_64K_BYTES:
        return warning(
            GROUP, "huge pages", "always: with 64 KiB pages a huge one is 512 MiB, and small tasks grow", remedy
        )
    if mode == "never" and page is not None and page < PAGE_64K_BYTES:
        return warning(
            GROUP, "huge pages", f"never: with {bytes_text(page)} pages, large tensors cost more to touch", remedy
        )
    return good(GROUP, "huge pages", mode)


def check_memory(snapshot: SystemSnapshot) -> CheckResult:
    total, available = snapshot.facts.memory_total, snapshot.resources.host_available
    if total is None or available is None:
        return absent(GROUP, "memory", "not known")
    text = f"{bytes_text(available)} of {bytes_text(total)} available"
    if any(node.gpu is not None for node in snapshot.facts.nodes):
        text += " (GPU memory is in the total, not in what is available)"
    remedy = "see who has it: `ps aux --sort=-rss | head`; arenas of earlier runs: `supertuner arena ls`"
    if available < TOO_LITTLE_SHARE * total:
        return bad(GROUP, "memory", f"{text}: next to nothing", remedy)
    if available < LITTLE_SHARE * total:
        return warning(GROUP, "memory", f"{text}: little", remedy)
    return good(GROUP, "memory", text)


def check_memory_limit(snapshot: SystemSnapshot) -> CheckResult:
    granted, machine = snapshot.facts.memory_total, snapshot.resources.machine_memory
    if granted is None or machine is None:
        return absent(GROUP, "memory limit", "not known")
    if granted < machine:
        finding = f"a container or job limit grants {bytes_text(granted)} of the machine's {bytes_text(machine)}"
        if granted < machine / 2:
            remedy = "if that is not meant: `docker run --memory=…`, or `sbatch --mem=…` for a Slurm job"
            return warning(GROUP, "memory limit", finding, remedy)
        return good(GROUP, "memory limit", finding)
    return good(GROUP, "memory limit", "none")


def check_swap(snapshot: SystemSnapshot) -> CheckResult:
    used = snapshot.facts.swap_used
    if used is None:
        return absent(GROUP, "swap", "not known")
    if used:
        remedy = "once there is room in memory: `sudo swapoff -a && sudo swapon -a`; and watch `vmstat 1` in training"
        return warning(GROUP, "swap", f"{bytes_text(used)} in use: memory was short, and what is there is slow", remedy)
    return good(GROUP, "swap", "not in use")


def check_shared_memory(snapshot: SystemSnapshot) -> CheckResult:
    size, free, total = snapshot.resources.shm_bytes, snapshot.resources.shm_free, snapshot.facts.memory_total
    if size is None or free is None:
        remedy = "mount it: `sudo mount -t tmpfs -o size=80% tmpfs /dev/shm`; or set arena.home to a folder"
        return bad(GROUP, "/dev/shm", "not there: staged data and caches live in it", remedy)
    text = f"{bytes_text(free)} of {bytes_text(size)} free"
    if total is not None and size < MIN_SHM_SHARE * total:
        finding = f"{text}, {size / total:.0%} of memory: staged data and caches live in it"
        remedy = "`sudo mount -o remount,size=80% /dev/shm`; in a container `docker run --shm-size=…` or --ipc=host"
        return warning(GROUP, "/dev/shm", finding, remedy)
    return good(GROUP, "/dev/shm", text)


def check_open_files(snapshot: SystemSnapshot) -> CheckResult:
    limit = snapshot.resources.open_files
    if limit is not None and limit < MIN_OPEN_FILES:
        return warning(
            GROUP, "open files", f"at most {limit:,}: staging with many threads may run out", "`ulimit -n 65536`"
        )
    return good(GROUP, "open files", "no limit" if limit is None else f"at most {limit:,}")


def check_disk(snapshot: SystemSnapshot) -> CheckResult:
    free, folder = snapshot.resources.folder_free, snapshot.resources.folder
    if free is None:
        return absent(GROUP, "disk", f"{folder} is no folder")
    if free < MIN_FREE_DISK_BYTES:
        finding = f"{bytes_text(free)} free in {folder}: checkpoints may not fit"
        return warning(GROUP, "disk", finding, "`df -h`, and run.output_dir on a larger disk")
    return good(GROUP, "disk", f"{bytes_text(free)} free in {folder}")

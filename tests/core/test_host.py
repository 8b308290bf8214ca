"""Host facts from kernel files: cgroups of both versions, nested limits, and unknown facts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supertuner.core.host import HostFacts
from supertuner.core.types import GIB, KIB, MIB


def machine(root: Path, files: dict[str, str]) -> HostFacts:
    """A machine described by its kernel files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return HostFacts(root)


def meminfo(total: int, available: int) -> str:
    return f"MemTotal:       {total // KIB} kB\nMemFree:  1 kB\nMemAvailable:   {available // KIB} kB\n"


def test_without_a_container_the_memory_is_that_of_meminfo(tmp_path: Path) -> None:
    host = machine(tmp_path, {"proc/meminfo": meminfo(480 * GIB, 400 * GIB), "proc/self/cgroup": "0::/\n"})
    assert host.memory_total() == 480 * GIB
    assert host.memory_available() == 400 * GIB
    assert host.cpus() == len(os.sched_getaffinity(0))


def test_a_version_2_cgroup_limits_total_and_available_memory(tmp_path: Path) -> None:
    host = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(480 * GIB, 400 * GIB),
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": f"{64 * GIB}\n",
            "sys/fs/cgroup/job/step/memory.current": f"{20 * GIB}\n",
            "sys/fs/cgroup/job/step/memory.stat": f"anon 1\ninactive_file {4 * GIB}\nactive_file 7\n",
        },
    )
    assert host.memory_total() == 64 * GIB
    assert host.memory_available() == 48 * GIB, "reclaimable file cache does not count as used"


def test_the_lowest_limit_among_the_ancestors_counts(tmp_path: Path) -> None:
    host = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(480 * GIB, 400 * GIB),
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": f"{32 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{GIB}\n",
        },
    )
    assert host.memory_total() == 32 * GIB
    assert host.memory_available() == 31 * GIB


def test_a_version_1_cgroup_limits_total_and_available_memory(tmp_path: Path) -> None:
    host = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(480 * GIB, 400 * GIB),
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/ignored\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{16 * GIB}\n",
            "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{6 * GIB}\n",
            "sys/fs/cgroup/memory/docker/x/memory.stat": f"total_inactive_file {2 * GIB}\n",
        },
    )
    assert host.memory_total() == 16 * GIB
    assert host.memory_available() == 12 * GIB


def test_the_huge_number_for_no_limit_in_version_1_means_no_limit(tmp_path: Path) -> None:
    host = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(8 * GIB, 5 * GIB),
            "proc/self/cgroup": "4:memory:/x\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{6 * GIB}\n",
        },
    )
    assert host.memory_total() == 8 * GIB
    assert host.memory_available() == 5 * GIB


def test_a_full_container_has_zero_available_memory(tmp_path: Path) -> None:
    host = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(8 * GIB, 5 * GIB),
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{101 * MIB}\n",
        },
    )
    assert host.memory_available() == 0


def test_facts_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    host = HostFacts(tmp_path)
    assert host.memory_total() is None
    assert host.memory_available() is None
    assert host.cpus() >= 1


def test_with_a_limit_but_unknown_usage_the_available_memory_is_that_of_meminfo(tmp_path: Path) -> None:
    host = machine(
        tmp_path,
        {
            "proc/meminfo": meminfo(8 * GIB, 5 * GIB),
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        },
    )
    assert host.memory_total() == 2 * GIB
    assert host.memory_available() == 5 * GIB


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/job\n", {"sys/fs/cgroup/job/cpu.max": "100000 100000\n"}),
        ("0::/job\n", {"sys/fs/cgroup/job/cpu.max": "50000 100000\n"}),
        ("0::/job/a\n", {"sys/fs/cgroup/job/a/cpu.max": "max 100000\n", "sys/fs/cgroup/job/cpu.max": "1000 100000\n"}),
        (
            "3:cpu,cpuacct:/job\n",
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
        ),
    ],
)
def test_a_quota_of_one_cpu_or_less_is_one_cpu(tmp_path: Path, cgroup: str, files: dict[str, str]) -> None:
    assert machine(tmp_path, {"proc/self/cgroup": cgroup, **files}).cpus() == 1


def test_without_a_quota_all_cpus_of_the_affinity_mask_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu:/job\n0::/job\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/job/cpu.max": "max 100000\n",
    }
    assert machine(tmp_path, files).cpus() == len(os.sched_getaffinity(0))


def test_the_facts_of_this_machine_are_plausible(tmp_path: Path) -> None:
    host = HostFacts()
    total, available = host.memory_total(), host.memory_available()
    assert total is not None and available is not None
    assert 0 < available <= total
    assert host.free_bytes(tmp_path) > 0

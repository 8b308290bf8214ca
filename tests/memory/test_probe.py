"""Other machines as folders of files: what the probe reports for them, what stays unknown, and how much
memory is free.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from supertuner.core.host import HostFacts
from supertuner.core.types import GIB, KIB
from supertuner.memory.driver import NotAvailable
from supertuner.memory.nvml import NvmlGpuFacts
from supertuner.memory.probe import free_gpu_bytes, host_available_bytes, probe_machine
from tests.fakes.fake_libraries import environment, fake_nvml, run_python
from tests.memory.machine_files import (
    GB10,
    GH200,
    H100,
    FakeProbeDriver,
    folder_host,
    gb10_files,
    gh200_files,
    in_gib,
    meminfo,
    node_meminfo,
    x86_files,
)

PROBE_PROGRAM = """
import json
from supertuner.core.host import HostFacts
from supertuner.memory.cuda import open_cuda
from supertuner.memory.nvml import open_nvml
from supertuner.memory.probe import probe_machine

facts = probe_machine(HostFacts(), open_cuda(), open_nvml())
indices = [gpu.nvml and gpu.nvml.index for gpu in facts.gpus]
print(json.dumps([facts.machine and facts.machine.key, facts.one_pool, facts.ats, facts.driver_version, indices]))
"""

NO_GPU = NotAvailable("the driver found no GPU")
NO_NVML = NotAvailable("no NVML here")


class FakeProbeNvml:
    """The part of NVML that the probe uses."""

    def __init__(self, *gpus: NvmlGpuFacts, version: str | None = None) -> None:
        self._gpus, self._version = gpus, version

    def gpus(self) -> tuple[NvmlGpuFacts, ...]:
        return self._gpus

    def driver_version(self) -> str | None:
        return self._version


def nvml_gpu(index: int, name: str, uuid: str) -> NvmlGpuFacts:
    return NvmlGpuFacts(index, name, uuid, None, None, None)


def test_a_gh200_is_recognised_with_its_gpu_memory_as_a_numa_node(tmp_path: Path) -> None:
    facts = probe_machine(folder_host(tmp_path, gh200_files()), FakeProbeDriver(GH200), NO_NVML)
    assert facts.machine is not None and facts.machine.key == "gh200-96"
    assert (facts.arch, facts.kernel, facts.page_bytes) == ("aarch64", "6.8.0-1021-nvidia-64k", 64 * KIB)
    assert facts.ats is True and facts.one_pool is False and facts.no_gpu_reason is None
    assert facts.numa_balancing is True and facts.transparent_hugepages == "madvise"
    assert facts.nvidia_driver == "580.95.05" and facts.driver_version == 13000
    assert facts.uvm_parameters == {"uvm_ats_mode": "1", "uvm_perf_access_counter_threshold": "256"}
    assert facts.swap_used == 0 and facts.cpu_name is None
    assert [(n.number, n.cpus, n.gpu) for n in facts.nodes] == [(0, True, None), (1, False, 0)]
    assert [n.available_bytes for n in facts.nodes] == [455 * GIB, 90 * GIB]


def test_on_a_gh200_the_page_cache_in_gpu_memory_counts_as_free(tmp_path: Path) -> None:
    host, driver = folder_host(tmp_path, gh200_files()), FakeProbeDriver(GH200, free=70 * GIB)
    assert free_gpu_bytes(probe_machine(host, driver, NO_NVML), driver, host) == 90 * GIB


def test_on_a_gh200_free_memory_never_exceeds_the_gpus(tmp_path: Path) -> None:
    files = gh200_files() | {"sys/devices/system/node/node1/meminfo": node_meminfo(1, MemTotal=500, MemFree=500)}
    host, driver = folder_host(tmp_path, files), FakeProbeDriver(GH200, free=70 * GIB)
    assert free_gpu_bytes(probe_machine(host, driver, NO_NVML), driver, host) == GH200.total_bytes


def test_on_a_gh200_host_memory_does_not_include_the_gpus(tmp_path: Path) -> None:
    host = folder_host(tmp_path, gh200_files())
    facts = probe_machine(host, FakeProbeDriver(GH200), NO_NVML)
    assert facts.memory_available == 540 * GIB
    assert host_available_bytes(facts, host) == 455 * GIB


def test_without_the_nodes_file_the_drivers_value_is_used(tmp_path: Path) -> None:
    files = {name: text for name, text in gh200_files().items() if "/node1/" not in name}
    host, driver = folder_host(tmp_path, files), FakeProbeDriver(GH200, free=70 * GIB)
    assert free_gpu_bytes(probe_machine(host, driver, NO_NVML), driver, host) == 70 * GIB


def test_on_a_one_pool_machine_free_memory_is_memavailable(tmp_path: Path) -> None:
    host, driver = folder_host(tmp_path, gb10_files()), FakeProbeDriver(GB10, free=8 * GIB)
    facts = probe_machine(host, driver, NO_NVML)
    assert facts.machine is not None and facts.machine.key == "gb10"
    assert facts.one_pool is True and facts.swap_used == GIB and facts.numa_balancing is None
    assert free_gpu_bytes(facts, driver, host) == 70 * GIB
    assert host_available_bytes(facts, host) == 70 * GIB


def test_an_unknown_integrated_gpu_is_a_one_pool_machine(tmp_path: Path) -> None:
    facts = probe_machine(
        folder_host(tmp_path, gb10_files()), FakeProbeDriver(replace(GB10, name="NVIDIA Thor")), NO_NVML
    )
    assert facts.machine is None and facts.one_pool is True


def test_an_unknown_gpu_without_that_attribute_leaves_one_pool_unknown(tmp_path: Path) -> None:
    unreported = replace(H100, name="NVIDIA X1", integrated=None, host_page_tables=None)
    facts = probe_machine(folder_host(tmp_path, x86_files()), FakeProbeDriver(unreported), NO_NVML)
    assert (facts.machine, facts.one_pool, facts.ats) == (None, None, None)


def test_on_a_card_the_drivers_free_memory_is_used(tmp_path: Path) -> None:
    host, driver = folder_host(tmp_path, x86_files()), FakeProbeDriver(H100, free=33 * GIB)
    facts = probe_machine(host, driver, NO_NVML)
    assert facts.machine is not None and facts.machine.key == "h100-80-sxm"
    assert facts.one_pool is False and facts.ats is False
    assert free_gpu_bytes(facts, driver, host) == 33 * GIB
    assert host_available_bytes(facts, host) == 200 * GIB
    assert facts.uvm_parameters == {} and facts.nvidia_driver is None
    assert free_gpu_bytes(facts, driver, host, device=1) is None


def test_a_machine_without_a_gpu_is_a_plain_cpu_with_the_reason(tmp_path: Path) -> None:
    host = folder_host(tmp_path, x86_files())
    facts = probe_machine(host, NO_GPU, NO_NVML)
    assert facts.machine is not None and facts.machine.key == "cpu"
    assert facts.no_gpu_reason == "the driver found no GPU" and facts.gpus == ()
    assert (facts.one_pool, facts.ats, facts.driver_version) == (None, None, None)
    assert free_gpu_bytes(facts, NO_GPU, host) is None


def test_an_mi300a_is_one_pool_without_nvidias_driver(tmp_path: Path) -> None:
    files = x86_files() | {"proc/cpuinfo": "model name\t: AMD Instinct MI300A Accelerator\n"}
    facts = probe_machine(folder_host(tmp_path, files), NO_GPU, NO_NVML)
    assert facts.machine is not None and facts.machine.key == "mi300a"
    assert facts.one_pool is True


def test_a_container_without_sys_reports_its_limit_and_leaves_the_rest_unknown(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": meminfo(MemTotal=in_gib(256), MemAvailable=in_gib(200)),
        "proc/self/cgroup": "5:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{64 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{24 * GIB}\n",
    }
    facts = probe_machine(folder_host(tmp_path, files), NO_GPU, NO_NVML)
    assert (facts.memory_total, facts.memory_available) == (64 * GIB, 40 * GIB)
    assert facts.nodes == () and facts.uvm_parameters == {}
    unknown = ("arch", "kernel", "cpu_name", "page_bytes", "swap_used", "numa_balancing", "transparent_hugepages")
    assert {name: getattr(facts, name) for name in unknown} == dict.fromkeys(unknown)


def test_an_empty_folder_is_all_unknown_and_no_value_is_zero(tmp_path: Path) -> None:
    facts = probe_machine(HostFacts(tmp_path), NO_GPU, NO_NVML)
    zeros = [name for name, value in dataclasses.asdict(facts).items() if value == 0 and value is not False]
    assert zeros == []
    assert facts.memory_total is None and facts.memory_available is None


def test_nvmls_gpu_is_matched_by_uuid_when_the_numbering_differs(tmp_path: Path) -> None:
    first, second = replace(H100, uuid="GPU-b"), replace(H100, number=1, uuid="GPU-a")
    nvml = FakeProbeNvml(nvml_gpu(0, H100.name, "GPU-a"), nvml_gpu(1, H100.name, "GPU-b"), version="580.95.05")
    facts = probe_machine(folder_host(tmp_path, x86_files()), FakeProbeDriver(first, second), nvml)
    assert [gpu.nvml and gpu.nvml.index for gpu in facts.gpus] == [1, 0]
    assert facts.nvidia_driver == "580.95.05"


def test_without_a_uuid_only_a_single_gpu_of_the_same_name_is_matched(tmp_path: Path) -> None:
    host = folder_host(tmp_path, x86_files())
    one = FakeProbeNvml(nvml_gpu(0, H100.name, "GPU-a"))
    two = FakeProbeNvml(nvml_gpu(0, H100.name, "GPU-a"), nvml_gpu(1, H100.name, "GPU-b"))
    other = FakeProbeNvml(nvml_gpu(0, "NVIDIA T400", "GPU-c"))
    found = [probe_machine(host, FakeProbeDriver(H100), nvml).gpus[0].nvml for nvml in (one, two, other)]
    assert [gpu and gpu.uuid for gpu in found] == ["GPU-a", None, None]


@pytest.mark.parametrize(
    ("profile", "gib", "devices", "nvml", "found"),
    [
        ("gh200", 96, 1, "gh200", ["gh200-96", False, True, 13000, [0]]),
        ("gb10", 119, 1, "no_driver", ["gb10", True, True, 13000, [None]]),
        ("pcie", 80, 2, "two", ["h100-80-pcie", False, False, 13000, [1, 0]]),
    ],
)
def test_the_probe_reads_a_machine_through_the_real_bindings(
    profile: str, gib: int, devices: int, nvml: str, found: list[object]
) -> None:
    env = environment(profile, hbm_bytes=gib * GIB, devices=devices) | {"FAKENVML_PROFILE": nvml}
    env["LD_LIBRARY_PATH"] += f":{fake_nvml()}"
    assert json.loads(run_python(PROBE_PROGRAM, env)) == found


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc")
def test_this_machine_has_plausible_values() -> None:
    facts = probe_machine(HostFacts(), NO_GPU, NO_NVML)
    assert facts.arch == os.uname().machine and facts.kernel == os.uname().release
    assert facts.page_bytes == os.sysconf("SC_PAGE_SIZE")
    assert facts.memory_total and facts.memory_available and facts.cpus >= 1

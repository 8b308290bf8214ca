"""Machines described by folders of kernel files, and a driver with fixed properties, for tests of the probe."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from supertuner.core.host import HostFacts
from supertuner.core.types import GIB, KIB
from supertuner.memory.driver import DeviceProperties

GH200 = DeviceProperties(
    0, "NVIDIA GH200 480GB", 97_871 << 20, (9, 0), True, True, True, True, True, False, numa_node=1, host_node=0
)
GB10 = DeviceProperties(0, "NVIDIA GB10", 128_501_256_192, (12, 1), True, True, True, True, True, True)
H100 = DeviceProperties(0, "NVIDIA H100 80GB HBM3", 81_559 << 20, (9, 0), True, True, False, False, False, False)


class FakeProbeDriver:
    """The part of a driver that the probe uses."""

    def __init__(
        self, *devices: DeviceProperties, free: int = 0, version: int = 13000, page_bytes: int = 4 * KIB
    ) -> None:
        self._devices, self._free, self._version, self.page_bytes = devices, free, version, page_bytes

    def version(self) -> int:
        return self._version

    def devices(self) -> tuple[DeviceProperties, ...]:
        return self._devices

    def free_bytes(self, device: int) -> int:
        return self._free


def folder_host(root: Path, files: Mapping[str, str | bytes]) -> HostFacts:
    """A host with exactly these kernel files."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return HostFacts(root)


def auxv(page_bytes: int) -> bytes:
    return struct.pack("@LLLLLL", 33, 0x7FFF0000, 6, page_bytes, 0, 0)


def meminfo(**kib: int) -> str:
    return "".join(f"{name}:{value:>15} kB\n" for name, value in kib.items())


def node_meminfo(node: int, **gib: float) -> str:
    names = {"Active_file": "Active(file)", "Inactive_file": "Inactive(file)"}
    lines = (f"Node {node} {names.get(name, name)}:{int(value * GIB / KIB):>15} kB\n" for name, value in gib.items())
    return "".join(lines) + f"Node {node} HugePages_Total:     0\n"


def in_gib(gib: float) -> int:
    """GiB as /proc/meminfo counts: in KiB."""
    return int(gib * GIB / KIB)


def gh200_files() -> dict[str, str | bytes]:
    """Grace with 64 KiB pages: node 0 is the CPU's memory, node 1 the GPU's, 2 and 3 wait for MIG."""
    node = "sys/devices/system/node/node"
    return {
        "proc/meminfo": meminfo(
            MemTotal=in_gib(574), MemFree=in_gib(500), MemAvailable=in_gib(540), SwapTotal=0, SwapFree=0
        ),
        "proc/self/auxv": auxv(64 * KIB),
        "proc/sys/kernel/arch": "aarch64\n",
        "proc/sys/kernel/osrelease": "6.8.0-1021-nvidia-64k\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 2000.00\nCPU part\t: 0xd4f\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05  Release Build\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/module/nvidia_uvm/parameters/uvm_perf_access_counter_threshold": "256\n",
        "sys/module/nvidia_uvm/parameters/uvm_ats_mode": "1\n",
        f"{node}0/meminfo": node_meminfo(0, MemTotal=478, MemFree=430, Active_file=15, Inactive_file=10),
        f"{node}0/cpulist": "0-71\n",
        f"{node}1/meminfo": node_meminfo(1, MemTotal=95, MemFree=70, Active_file=5, Inactive_file=15),
        f"{node}1/cpulist": "\n",
        f"{node}2/meminfo": node_meminfo(2, MemTotal=0, MemFree=0),
        f"{node}2/cpulist": "\n",
        f"{node}3/meminfo": node_meminfo(3, MemTotal=0, MemFree=0),
        f"{node}3/cpulist": "\n",
    }


def gb10_files() -> dict[str, str | bytes]:
    """One pool, 4 KiB pages, one node, half of memory in the page cache, some swap in use."""
    return {
        "proc/meminfo": meminfo(
            MemTotal=in_gib(119),
            MemFree=in_gib(8),
            MemAvailable=in_gib(70),
            SwapTotal=in_gib(16),
            SwapFree=in_gib(15),
        ),
        "proc/self/auxv": auxv(4 * KIB),
        "proc/sys/kernel/arch": "aarch64\n",
        "proc/sys/kernel/osrelease": "6.17.0-1008-nvidia\n",
        "sys/devices/system/node/node0/meminfo": node_meminfo(0, MemTotal=119, MemFree=8, Active_file=60),
        "sys/devices/system/node/node0/cpulist": "0-19\n",
    }


def x86_files() -> dict[str, str | bytes]:
    """Two sockets, no NVIDIA module."""
    node = "sys/devices/system/node/node"
    return {
        "proc/meminfo": meminfo(MemTotal=in_gib(256), MemFree=in_gib(10), MemAvailable=in_gib(200)),
        "proc/self/auxv": auxv(4 * KIB),
        "proc/sys/kernel/arch": "x86_64\n",
        "proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
        "proc/sys/kernel/numa_balancing": "0\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\n",
        f"{node}0/meminfo": node_meminfo(0, MemTotal=128, MemFree=5),
        f"{node}0/cpulist": "0-95\n",
        f"{node}1/meminfo": node_meminfo(1, MemTotal=128, MemFree=5),
        f"{node}1/cpulist": "96-191\n",
    }

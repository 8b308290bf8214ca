"""Describes this machine: its GPUs from the driver and NVML, its memory from the kernel. An unknown value is None,
never zero.

Everything about the host is read below `host.root`, so that a test can describe another machine with a folder of files.
This file decides nothing and changes nothing.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supertuner.core.host import HostFacts, read_lines
from supertuner.core.types import KIB
from supertuner.memory.driver import DeviceProperties, Driver, NotAvailable
from supertuner.memory.machines import MACHINES, MachineSpec, find_machine, find_machine_by_cpu
from supertuner.memory.nvml import NvmlGpuFacts, NvmlLibrary

AT_PAGESZ: Final = 6
"""Key of the page size in the auxiliary vector that the kernel passes to every process."""
RECLAIMABLE_FIELDS: Final = ("Active(file)", "Inactive(file)", "SReclaimable")
"""Page cache that the kernel frees under memory pressure."""


@dataclass(frozen=True, slots=True)
class NumaNodeFacts:
    """One NUMA node that has CPUs or memory."""

    number: int
    total_bytes: int | None
    available_bytes: int | None
    """Free memory plus cache that the kernel would free: an upper estimate, because the kernel keeps a
    small reserve.
    """
    cpus: bool | None
    gpu: int | None = None
    """The GPU whose memory this node represents (Grace superchips)."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, as the driver, NVML and the table of machines describe it."""

    device: DeviceProperties
    """Properties from the CUDA driver."""
    nvml: NvmlGpuFacts | None = None
    """Facts from NVML; None if NVML is not available or its matching GPU cannot be determined."""
    machine: MachineSpec | None = None
    """Its row of the table `MACHINES`."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """This machine at the time of probing."""

    arch: str | None
    """`aarch64` or `x86_64`."""
    kernel: str | None
    cpu_name: str | None
    """None on most Arm machines, whose kernel does not name the CPU."""
    cpus: int
    """CPUs that this process may use."""
    page_bytes: int | None
    memory_total: int | None
    """Memory available to this process, within its container's limit. On a Grace superchip the kernel includes GPU
    memory.
    """
    memory_available: int | None
    swap_used: int | None
    numa_balancing: bool | None
    """The kernel samples accesses by unmapping pages, which is harmful for GPUs that share page tables."""
    transparent_hugepages: str | None
    """`always`, `madvise` or `never`."""
    nodes: tuple[NumaNodeFacts, ...]
    uvm_parameters: Mapping[str, str]
    """Parameters of the kernel module nvidia_uvm; empty if it is not loaded."""
    nvidia_driver: str | None
    """Version of NVIDIA's kernel driver, such as 580.95.05."""
    driver_version: int | None
    """Version of the driver API, such as 13000 for CUDA 13.0."""
    gpus: tuple[GpuFacts, ...]
    machine: MachineSpec | None
    """The table row of the first GPU; `cpu` if there is no GPU; None if the table does not list the machine."""
    one_pool: bool | None
    """CPU and GPU share one memory, so that spilling gains nothing."""
    ats: bool | None
    """The GPU reads ordinary memory through the host's page tables."""
    no_gpu_reason: str | None


def probe_machine(host: HostFacts, driver: Driver | NotAvailable, nvml: NvmlLibrary | NotAvailable) -> MachineFacts:
    """Query the kernel, the driver and NVML once."""
    gpus = _probe_gpus(driver, nvml)
    proc, meminfo = host.root / "proc", read_meminfo(host.root / "proc/meminfo")
    cpu_name, numa_balancing = _cpu_name(proc / "cpuinfo"), _first_line(proc / "sys/kernel/numa_balancing")
    machine = gpus[0].machine if gpus else find_machine_by_cpu(cpu_name or "") or MACHINES["cpu"]
    return MachineFacts(
        arch=_first_line(proc / "sys/kernel/arch") or (os.uname().machine if host.root == Path("/") else None),
        kernel=_first_line(proc / "sys/kernel/osrelease"),
        cpu_name=cpu_name,
        cpus=host.cpus(),
        page_bytes=_page_bytes(proc / "self/auxv") or (None if isinstance(driver, NotAvailable) else driver.page_bytes),
        memory_total=host.memory_total(),
        memory_available=host.memory_available(),
        swap_used=meminfo["SwapTotal"] - meminfo["SwapFree"] if {"SwapTotal", "SwapFree"} <= meminfo.keys() else None,
        numa_balancing=None if numa_balancing is None else numa_balancing != "0",
        transparent_hugepages=_bracketed_word(_first_line(host.root / "sys/kernel/mm/transparent_hugepage/enabled")),
        nodes=_numa_nodes(host, [gpu.device for gpu in gpus]),
        uvm_parameters=read_uvm_parameters(host),
        nvidia_driver=_nvidia_driver_version(proc / "driver/nvidia/version", nvml),
        driver_version=None if isinstance(driver, NotAvailable) else driver.version(),
        gpus=gpus,
        machine=machine,
        one_pool=_has_one_pool(gpus, machine),
        ats=gpus[0].device.host_page_tables if gpus else None,
        no_gpu_reason=driver.reason if isinstance(driver, NotAvailable) else None,
    )


def free_gpu_bytes(facts: MachineFacts, driver: Driver | NotAvailable, host: HostFacts, device: int = 0) -> int | None:
    """Bytes that can still be allocated on a GPU; None if there is no GPU or the value is unknown.

    The driver counts page cache, which the kernel would free, as used. So on a one-pool machine this is MemAvailable,
    and where GPU memory is a NUMA node (GH200), the node's free pages plus its cache.
    """
    gpu = next((gpu for gpu in facts.gpus if gpu.device.number == device), None)
    if isinstance(driver, NotAvailable) or gpu is None:
        return None
    free, total = driver.free_bytes(device), gpu.device.total_bytes
    if facts.one_pool:
        available = host.memory_available()
        return free if available is None else min(available, total)
    if gpu.device.numa_node is None:
        return free
    available = _node_available(read_meminfo(_node_folder(host, gpu.device.numa_node) / "meminfo"))
    return free if available is None else min(max(free, available), total)


def host_available_bytes(facts: MachineFacts, host: HostFacts) -> int | None:
    """Bytes of host memory that can still be allocated.

    This is MemAvailable, except where GPU memory is a NUMA node: the kernel includes that node, this function does not.
    """
    available = host.memory_available()
    if not any(node.gpu is not None for node in facts.nodes):
        return available
    folders = (_node_folder(host, node.number) for node in facts.nodes if node.gpu is None)
    parts = [_node_available(read_meminfo(folder / "meminfo")) for folder in folders]
    known = [part for part in parts if part is not None]
    return available if available is None or len(known) != len(parts) else min(available, sum(known))


def read_meminfo(path: Path) -> dict[str, int]:
    """The fields of a `meminfo` file (of the machine or of a node) in bytes; empty if the file does not exist."""
    fields = {}
    for line in read_lines(path):
        match = re.match(r"(?:Node\s+\d+\s+)?(\S+):\s+(\d+)(?:\s+kB)?$", line)
        if match:
            fields[match[1]] = int(match[2]) * (KIB if line.endswith("kB") else 1)
    return fields


def read_uvm_parameters(host: HostFacts) -> dict[str, str]:
    """The parameters of nvidia_uvm that this user can read."""
    folder = host.root / "sys/module/nvidia_uvm/parameters"
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {file.name: value for file in files if (value := _first_line(file)) is not None}


def _probe_gpus(driver: Driver | NotAvailable, nvml: NvmlLibrary | NotAvailable) -> tuple[GpuFacts, ...]:
    if isinstance(driver, NotAvailable):
        return ()
    devices, nvml_gpus = driver.devices(), () if isinstance(nvml, NotAvailable) else nvml.gpus()
    return tuple(GpuFacts(gpu, _matching_nvml_gpu(gpu, devices, nvml_gpus), find_machine(gpu)) for gpu in devices)


def _matching_nvml_gpu(
    device: DeviceProperties, devices: Sequence[DeviceProperties], nvml_gpus: Sequence[NvmlGpuFacts]
) -> NvmlGpuFacts | None:
    """The matching NVML GPU, or None if unclear.

    Driver and NVML number GPUs differently (CUDA_VISIBLE_DEVICES), so a position proves nothing.
    """
    if device.uuid is not None:
        return next((gpu for gpu in nvml_gpus if gpu.uuid == device.uuid), None)
    only_one = len(nvml_gpus) == 1 and len(devices) == 1
    return nvml_gpus[0] if only_one and nvml_gpus[0].name == device.name else None


def _has_one_pool(gpus: tuple[GpuFacts, ...], machine: MachineSpec | None) -> bool | None:
    """True if the table or the driver reports shared memory; None if neither has the information."""
    answers = [gpu.device.integrated for gpu in gpus[:1]]
    answers += [machine.one_pool] if machine is not None and machine.key != "cpu" else []
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _numa_nodes(host: HostFacts, devices: list[DeviceProperties]) -> tuple[NumaNodeFacts, ...]:
    """Nodes with CPUs or memory. Grace superchips also list empty ones, for GPU partitions (MIG) that may be created
    later.
    """
    folder = host.root / "sys/devices/system/node"
    numbers = sorted(int(entry.name[4:]) for entry in folder.glob("node[0-9]*")) if folder.is_dir() else []
    gpu_by_node = {device.numa_node: device.number for device in devices if device.numa_node is not None}
    nodes = []
    for number in numbers:
        node_folder = _node_folder(host, number)
        fields, cpus = read_meminfo(node_folder / "meminfo"), _first_line(node_folder / "cpulist")
        node = NumaNodeFacts(
            number=number,
            total_bytes=fields.get("MemTotal"),
            available_bytes=_node_available(fields),
            cpus=None if cpus is None else cpus != "",
            gpu=gpu_by_node.get(number),
        )
        if node.total_bytes != 0 or node.cpus:
            nodes.append(node)
    return tuple(nodes)


def _node_folder(host: HostFacts, number: int) -> Path:
    return host.root / f"sys/devices/system/node/node{number}"


def _node_available(fields: Mapping[str, int]) -> int | None:
    free = fields.get("MemFree")
    return None if free is None else free + sum(fields.get(name, 0) for name in RECLAIMABLE_FIELDS)


def _page_bytes(auxv: Path) -> int | None:
    try:
        content = auxv.read_bytes()
    except OSError:
        return None  # a container without /proc does not report it
    pairs = struct.iter_unpack("@LL", content[: len(content) // 16 * 16])
    return next((value for key, value in pairs if key == AT_PAGESZ), None)


def _nvidia_driver_version(version_file: Path, nvml: NvmlLibrary | NotAvailable) -> str | None:
    nvml_version = None if isinstance(nvml, NotAvailable) else nvml.driver_version()
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _first_line(version_file) or "")
    return nvml_version or (match[1] if match else None)


def _cpu_name(cpuinfo: Path) -> str | None:
    names = (line.partition(":")[2].strip() for line in read_lines(cpuinfo) if line.startswith("model name"))
    return next(names, None)


def _bracketed_word(text: str | None) -> str | None:
    """The word in brackets of a line such as `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def _first_line(path: Path) -> str | None:
    """The first line; None if the file is missing or not readable, "" if it is empty."""
    try:
        return path.read_text().split("\n", 1)[0].strip()
    except OSError:
        return None

"""The machines that SuperTuner knows, as a literal table: each figure with where it comes from, or why it is not known.

Nothing here was measured by us on a GPU. `spec` is what the maker prints; `measured by others` is a published
measurement; `unknown` carries None and the reason. Memory is in bytes (GPU memory is sold in binary gigabytes),
bandwidth in bytes a second (sold in decimal ones), FLOPS are dense, without sparsity, accumulating in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from supertuner.core.types import GIB, KIB, MIB
from supertuner.memory.driver import Device

How: TypeAlias = Literal["spec", "measured by others", "unknown"]

GB_S: Final = 1e9
TFLOPS: Final = 1e12


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a machine."""

    value: float | None
    source: str
    """Where it comes from; for an unknown figure, why it is not known."""
    how: How = "spec"


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of machine: one GPU and the host memory next to it."""

    key: str
    title: str
    names: str
    """A regular expression for the whole name that the driver gives its GPU (or `/proc/cpuinfo` its CPU)."""
    gpu_bytes: Figure
    host_bytes: Figure
    """Of the CPU next to the GPU. On a one-pool machine, the same memory again."""
    gpu_read_bytes_s: Figure
    gpu_write_bytes_s: Figure
    host_bytes_s: Figure
    to_device_bytes_s: Figure
    """The link, from host memory to the GPU's."""
    to_host_bytes_s: Figure
    bf16_flops: Figure
    fp8_flops: Figure
    fp32_flops: Figure
    system_page_bytes: Figure
    """What the maker recommends, or ships."""
    driver_block_bytes: Figure
    """The largest piece in which the driver moves managed memory."""
    one_pool: bool
    """CPU and GPU share one memory: there is nothing to spill into."""
    ats: bool
    """The GPU reads ordinary memory through the host's page tables."""
    link: str

    def figures(self) -> dict[str, Figure]:
        """Every figure by its name."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in found.items() if isinstance(value, Figure)}


def _seen(value: float, source: str) -> Figure:
    return Figure(value, source, "measured by others")


def _unknown(reason: str) -> Figure:
    return Figure(None, reason, "unknown")


_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet"
_GB200 = "NVIDIA GB200 NVL72 datasheet, its total divided by 72 GPUs"
_GB10 = "NVIDIA DGX Spark datasheet"
_MI300A = "AMD Instinct MI300A datasheet"
_H100 = "NVIDIA H100 datasheet"
_A100 = "NVIDIA A100 80GB datasheet"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_RTX50 = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_NVBANDWIDTH = "nvbandwidth figures published for GH200 (450 GB/s each way by the datasheet)"
_BLOCK = Figure(2 * MIB, "NVIDIA's open kernel modules: UVM_VA_BLOCK_SIZE")
_PAGE_64K = Figure(64 * KIB, "NVIDIA Grace tuning guide recommends a kernel with 64 KiB pages")
_PAGE_4K = Figure(4 * KIB, "x86-64 has no other base page")
_PCIE4 = Figure(31.5 * GB_S, "PCI Express 4.0, 16 lanes, 128b/130b, one direction")
_PCIE5 = Figure(63.0 * GB_S, "PCI Express 5.0, 16 lanes, 128b/130b, one direction")
_ANY_HOST = _unknown("a card: the host is whatever it is put into")
_ONE_POOL = _unknown("one pool of memory: there is no link to cross")
_ANY_CPU = _unknown("differs from CPU to CPU; probe it")
_NO_GPU = _unknown("no GPU")

MACHINES: Final[Mapping[str, Machine]] = {
    "gh200-96": Machine(
        key="gh200-96",
        title="GH200 96 GB",
        names=r"(NVIDIA )?GH200( (120|480)GB)?",
        gpu_bytes=Figure(96 * GIB, _GH200 + ": 96 GB HBM3"),
        host_bytes=Figure(480 * GIB, _GH200 + ": up to 480 GB LPDDR5X; there is a part with 120 GB"),
        gpu_read_bytes_s=_seen(3615 * GB_S, "published STREAM-like reads on GH200 96 (4 TB/s by the datasheet)"),
        gpu_write_bytes_s=_seen(3705 * GB_S, "published STREAM-like writes on GH200 96 (4 TB/s by the datasheet)"),
        host_bytes_s=Figure(384 * GB_S, _GH200 + ", 480 GB part; published STREAM figures go from 384 to 486"),
        to_device_bytes_s=_seen(375 * GB_S, _NVBANDWIDTH + ": 375 to 380"),
        to_host_bytes_s=_seen(296 * GB_S, _NVBANDWIDTH),
        bf16_flops=Figure(990 * TFLOPS, _GH200),
        fp8_flops=Figure(1979 * TFLOPS, _GH200),
        fp32_flops=Figure(67 * TFLOPS, _GH200),
        system_page_bytes=_PAGE_64K,
        driver_block_bytes=_BLOCK,
        one_pool=False,
        ats=True,
        link="NVLink-C2C",
    ),
    "gh200-144": Machine(
        key="gh200-144",
        title="GH200 144 GB",
        names=r"(NVIDIA )?GH200( (144GB?( HBM3e)?|480GB))?",
        gpu_bytes=Figure(144 * GIB, _GH200 + ": 144 GB HBM3e"),
        host_bytes=Figure(480 * GIB, _GH200 + ": up to 480 GB LPDDR5X"),
        gpu_read_bytes_s=Figure(4900 * GB_S, _GH200),
        gpu_write_bytes_s=Figure(4900 * GB_S, _GH200 + "; it does not tell reads from writes"),
        host_bytes_s=Figure(384 * GB_S, _GH200 + ", 480 GB part; published STREAM figures go from 384 to 486"),
        to_device_bytes_s=_seen(375 * GB_S, _NVBANDWIDTH + ": 375 to 380, on the 96 GB part"),
        to_host_bytes_s=_seen(296 * GB_S, _NVBANDWIDTH + ", on the 96 GB part"),
        bf16_flops=Figure(990 * TFLOPS, _GH200),
        fp8_flops=Figure(1979 * TFLOPS, _GH200),
        fp32_flops=Figure(67 * TFLOPS, _GH200),
        system_page_bytes=_PAGE_64K,
        driver_block_bytes=_BLOCK,
        one_pool=False,
        ats=True,
        link="NVLink-C2C",
    ),
    "gb200": Machine(
        key="gb200",
        title="GB200, one of its two GPUs",
        names=r"(NVIDIA )?GB200",
        gpu_bytes=Figure(186 * GIB, _GB200 + ": 186 GB HBM3e"),
        host_bytes=Figure(480 * GIB, "NVIDIA GB200 datasheet: 480 GB LPDDR5X for one Grace and two GPUs"),
        gpu_read_bytes_s=Figure(8000 * GB_S, _GB200),
        gpu_write_bytes_s=Figure(8000 * GB_S, _GB200 + "; it does not tell reads from writes"),
        host_bytes_s=Figure(512 * GB_S, "NVIDIA GB200 datasheet: Grace memory, up to 512 GB/s, for two GPUs"),
        to_device_bytes_s=_unknown("no published measurement of this direction was found"),
        to_host_bytes_s=_seen(330 * GB_S, "published, to the GPU's own NUMA node; 115 GB/s across"),
        bf16_flops=Figure(2500 * TFLOPS, _GB200),
        fp8_flops=Figure(5000 * TFLOPS, _GB200),
        fp32_flops=Figure(80 * TFLOPS, _GB200),
        system_page_bytes=_PAGE_64K,
        driver_block_bytes=_BLOCK,
        one_pool=False,
        ats=True,
        link="NVLink-C2C",
    ),
    "gb10": Machine(
        key="gb10",
        title="GB10 (DGX Spark)",
        names=r"(NVIDIA )?GB10",
        gpu_bytes=Figure(128 * GIB, _GB10 + ": one pool of 128 GB LPDDR5X; the kernel sees less"),
        host_bytes=Figure(128 * GIB, _GB10 + ": the same pool"),
        gpu_read_bytes_s=Figure(273 * GB_S, _GB10),
        gpu_write_bytes_s=Figure(273 * GB_S, _GB10 + "; it does not tell reads from writes"),
        host_bytes_s=Figure(273 * GB_S, _GB10 + ": the same memory; what the CPU alone reaches is not published"),
        to_device_bytes_s=_ONE_POOL,
        to_host_bytes_s=_ONE_POOL,
        bf16_flops=Figure(125 * TFLOPS, _GB10 + ": an eighth of the 1 PFLOP of sparse FP4"),
        fp8_flops=Figure(250 * TFLOPS, _GB10 + ": a quarter of the 1 PFLOP of sparse FP4"),
        fp32_flops=_unknown("the datasheet gives FP4 only"),
        system_page_bytes=Figure(4 * KIB, "DGX OS ships the nvidia kernel, not its 64k flavour"),
        driver_block_bytes=_BLOCK,
        one_pool=True,
        ats=True,
        link="none",
    ),
    "mi300a": Machine(
        key="mi300a",
        title="MI300A",
        names=r"AMD Instinct MI300A.*",
        gpu_bytes=Figure(128 * GIB, _MI300A + ": one pool of 128 GB HBM3"),
        host_bytes=Figure(128 * GIB, _MI300A + ": the same pool"),
        gpu_read_bytes_s=Figure(5300 * GB_S, _MI300A),
        gpu_write_bytes_s=Figure(5300 * GB_S, _MI300A + "; it does not tell reads from writes"),
        host_bytes_s=_unknown("the same memory, but what its CPU cores reach is not in the datasheet"),
        to_device_bytes_s=_ONE_POOL,
        to_host_bytes_s=_ONE_POOL,
        bf16_flops=Figure(980.6 * TFLOPS, _MI300A),
        fp8_flops=Figure(1961.2 * TFLOPS, _MI300A),
        fp32_flops=Figure(122.6 * TFLOPS, _MI300A),
        system_page_bytes=_PAGE_4K,
        driver_block_bytes=_unknown("another driver, which has no such block"),
        one_pool=True,
        ats=False,
        link="none",
    ),
    "h100-80-pcie": Machine(
        key="h100-80-pcie",
        title="H100 80 GB PCIe",
        names=r"(NVIDIA )?H100 PCIe",
        gpu_bytes=Figure(80 * GIB, _H100 + ": 80 GB HBM2e"),
        host_bytes=_ANY_HOST,
        gpu_read_bytes_s=Figure(2000 * GB_S, _H100),
        gpu_write_bytes_s=Figure(2000 * GB_S, _H100 + "; it does not tell reads from writes"),
        host_bytes_s=_ANY_HOST,
        to_device_bytes_s=_PCIE5,
        to_host_bytes_s=_PCIE5,
        bf16_flops=Figure(756 * TFLOPS, _H100),
        fp8_flops=Figure(1513 * TFLOPS, _H100),
        fp32_flops=Figure(51 * TFLOPS, _H100),
        system_page_bytes=_PAGE_4K,
        driver_block_bytes=_BLOCK,
        one_pool=False,
        ats=False,
        link="PCIe 5.0 x16",
    ),
    "h100-80-sxm": Machine(
        key="h100-80-sxm",
        title="H100 80 GB SXM",
        names=r"(NVIDIA )?H100 80GB HBM3",
        gpu_bytes=Figure(80 * GIB, _H100 + ": 80 GB HBM3"),
        host_bytes=_ANY_HOST,
        gpu_read_bytes_s=Figure(3350 * GB_S, _H100),
        gpu_write_bytes_s=Figure(3350 * GB_S, _H100 + "; it does not tell reads from writes"),
        host_bytes_s=_ANY_HOST,
        to_device_bytes_s=_PCIE5,
        to_host_bytes_s=_PCIE5,
        bf16_flops=Figure(989.4 * TFLOPS, _H100),
        fp8_flops=Figure(1979 * TFLOPS, _H100),
        fp32_flops=Figure(67 * TFLOPS, _H100),
        system_page_bytes=_PAGE_4K,
        driver_block_bytes=_BLOCK,
        one_pool=False,
        ats=False,
        link="PCIe 5.0 x16",
    ),
    "a100-80": Machine(
        key="a100-80",
        title="A100 80 GB",
        names=r"(NVIDIA )?A100(-SXM4-80GB|-SXM-80GB| 80GB PCIe|-PCIE-80GB)",
        gpu_bytes=Figure(80 * GIB, _A100 + ": 80 GB HBM2e"),
        host_bytes=_ANY_HOST,
        gpu_read_bytes_s=Figure(1935 * GB_S, _A100 + ": the PCIe card, the slower; 2039 for SXM"),
        gpu_write_bytes_s=Figure(1935 * GB_S, _A100 + "; it does not tell reads from writes"),
        host_bytes_s=_ANY_HOST,
        to_device_bytes_s=_PCIE4,
        to_host_bytes_s=_PCIE4,
        bf16_flops=Figure(312 * TFLOPS, _A100),
        fp8_flops=_unknown("the chip has no FP8 units"),
        fp32_flops=Figure(19.5 * TFLOPS, _A100),
        system_page_bytes=_PAGE_4K,
        driver_block_bytes=_BLOCK,
        one_pool=False,
        ats=False,
        link="PCIe 4.0 x16",
    ),
    "rtx-4090": Machine(
        key="rtx-4090",
        title="RTX 4090",
        names=r"(NVIDIA )?GeForce RTX 4090",
        gpu_bytes=Figure(24 * GIB, _ADA + ": 24 GB GDDR6X"),
        host_bytes=_ANY_HOST,
        gpu_read_bytes_s=Figure(1008 * GB_S, _ADA),
        gpu_write_bytes_s=Figure(1008 * GB_S, _ADA + "; it does not tell reads from writes"),
        host_bytes_s=_ANY_HOST,
        to_device_bytes_s=_PCIE4,
        to_host_bytes_s=_PCIE4,
        bf16_flops=Figure(165.2 * TFLOPS, _ADA),
        fp8_flops=Figure(330.3 * TFLOPS, _ADA),
        fp32_flops=Figure(82.6 * TFLOPS, _ADA),
        system_page_bytes=_PAGE_4K,
        driver_block_bytes=_BLOCK,
        one_pool=False,
        ats=False,
        link="PCIe 4.0 x16",
    ),
    "rtx-5090": Machine(
        key="rtx-5090",
        title="RTX 5090",
        names=r"(NVIDIA )?GeForce RTX 5090",
        gpu_bytes=Figure(32 * GIB, _RTX50 + ": 32 GB GDDR7"),
        host_bytes=_ANY_HOST,
        gpu_read_bytes_s=Figure(1792 * GB_S, _RTX50),
        gpu_write_bytes_s=Figure(1792 * GB_S, _RTX50 + "; it does not tell reads from writes"),
        host_bytes_s=_ANY_HOST,
        to_device_bytes_s=_PCIE5,
        to_host_bytes_s=_PCIE5,
        bf16_flops=Figure(209.5 * TFLOPS, _RTX50),
        fp8_flops=Figure(419 * TFLOPS, _RTX50),
        fp32_flops=Figure(104.8 * TFLOPS, _RTX50),
        system_page_bytes=_PAGE_4K,
        driver_block_bytes=_BLOCK,
        one_pool=False,
        ats=False,
        link="PCIe 5.0 x16",
    ),
    "cpu": Machine(
        key="cpu",
        title="a CPU without a GPU",
        names=r"(?!)",  # never matched by a name: it is what is left where there is no GPU
        gpu_bytes=_NO_GPU,
        host_bytes=_ANY_CPU,
        gpu_read_bytes_s=_NO_GPU,
        gpu_write_bytes_s=_NO_GPU,
        host_bytes_s=_ANY_CPU,
        to_device_bytes_s=_NO_GPU,
        to_host_bytes_s=_NO_GPU,
        bf16_flops=_ANY_CPU,
        fp8_flops=_ANY_CPU,
        fp32_flops=_ANY_CPU,
        system_page_bytes=_ANY_CPU,
        driver_block_bytes=_NO_GPU,
        one_pool=False,
        ats=False,
        link="none",
    ),
}

LEAST_SHARE, MOST_SHARE = 0.85, 1.05
"""GPU memory that the driver reports, as a share of the table's: it keeps some for itself (ECC, page tables)."""


def machine_of(device: Device) -> Machine | None:
    """The row of the table that this GPU is: by its name, its memory, and whether it shares the host's pool.

    None for a GPU that is in no row, for a part of one (a MIG slice), and for a relative of another size.
    """
    fits = [row for row in MACHINES.values() if re.fullmatch(row.names, device.name.strip()) and _agrees(row, device)]
    return fits[0] if fits else None


def machine_of_cpu(name: str) -> Machine | None:
    """The row of a machine that is known by its CPU's name, because its GPU speaks another driver's language."""
    fits = [row for row in MACHINES.values() if re.fullmatch(row.names, name.strip())]
    return fits[0] if fits else None


def _agrees(row: Machine, device: Device) -> bool:
    if device.integrated is True and not row.one_pool:
        return False
    if row.one_pool:  # its GPU reports what the kernel has, which differs with firmware and carve-outs
        return True
    return row.gpu_bytes.value is not None and LEAST_SHARE <= device.total_bytes / row.gpu_bytes.value <= MOST_SHARE

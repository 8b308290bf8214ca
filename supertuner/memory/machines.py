"""The machines that SuperTuner knows, as a literal table: each figure with its source, or with the reason why it is
unknown.

This project measured none of these figures. `spec` is a figure that the manufacturer publishes, or a peak computed from
one; `measured by others` is a published measurement; `unknown` has the value None and a reason. A disputed figure says
so in its source. Memory is in bytes (GPU memory is sold in binary gigabytes), bandwidth in bytes per second (sold in
decimal ones). FLOPS are dense: where the manufacturer publishes them with sparsity, half of that.

The sources were read in November 2026 in stored copies of public pages. Few of them are the manufacturers' own
documents; a source that is a copy names the copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias

from supertuner.core.types import GIB, KIB, MIB
from supertuner.memory.driver import DeviceProperties

FigureOrigin: TypeAlias = Literal["spec", "measured by others", "unknown"]

ONE_POOL_SHARE: Final = 0.9
"""Share of a pool's usable memory that a run may take. A full pool stops the whole machine instead of ending one
process (NVIDIA/open-gpu-kernel-modules issue 1358, NVIDIA/dgx-spark-playbooks issue 97; at about 109.5 GiB in
MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks issue 118). The kernel, the page cache, Python and its libraries are in the
same memory, and no forecast includes them."""
GB_S: Final = 1e9
TFLOPS: Final = 1e12


@dataclass(frozen=True, slots=True)
class MachineFigure:
    """One figure of a machine."""

    value: float | None
    source: str
    """The source of the figure; for an unknown figure, why it is unknown."""
    origin: FigureOrigin = "spec"


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A type of machine: one GPU and the host memory next to it."""

    key: str
    title: str
    name_pattern: str
    """A regular expression that matches the complete name that the driver reports for its GPU (or `/proc/cpuinfo` for
    its CPU).

    A comment at each row lists the names that were found in public driver output or in NVIDIA's lists. The others are
    guesses: names without "NVIDIA ", and variants of the names that were found.
    """
    gpu_bytes: MachineFigure
    host_bytes: MachineFigure
    """Memory of the CPU next to the GPU. On a one-pool machine this is the same memory."""
    gpu_read_bytes_s: MachineFigure
    gpu_write_bytes_s: MachineFigure
    host_bytes_s: MachineFigure
    to_device_bytes_s: MachineFigure
    """Bandwidth of the link from host memory to GPU memory."""
    to_host_bytes_s: MachineFigure
    bf16_flops: MachineFigure
    fp8_flops: MachineFigure
    fp32_flops: MachineFigure
    system_page_bytes: MachineFigure
    """The page size that the manufacturer recommends or ships."""
    driver_block_bytes: MachineFigure
    """The largest unit in which the driver migrates managed memory."""
    one_pool: bool
    """CPU and GPU share one memory, so there is no second memory to spill to."""
    ats: bool
    """The GPU reads ordinary memory through the host's page tables."""
    link: str

    def figures(self) -> dict[str, MachineFigure]:
        """All figures by name."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if isinstance(value, MachineFigure)}


def _spec(value: float, source: str) -> MachineFigure:
    return MachineFigure(value, source)


def _measured(value: float, source: str) -> MachineFigure:
    return MachineFigure(value, source, "measured by others")


def _unknown(reason: str) -> MachineFigure:
    return MachineFigure(None, reason, "unknown")


_NOTES = "a published figure in this project's notes, which do not name the document"
_KTH = "Schieffer and others, arXiv:2407.07850, as reported by 4nownews.com (2024-07-27)"
_DNHKNG = "dnhkng.github.io, What 2x GH200 delivers (2026-04-25)"
_TO_DEVICE = _KTH + f": 375; 377 and 380 in {_DNHKNG}, 346 in NVIDIA/nvbandwidth issue 23; 450 by specification"
_TO_HOST = _NOTES + f": 296; 297 in {_KTH}, 297 and 298 in {_DNHKNG}; 450 by specification"
_GRACE_480 = (
    _NOTES + ": about 384 for the 480 GB part, as a peak. STREAM TRIAD gives 288 to 342 of it by NVIDIA's Grace CPU "
    f"Benchmarking Guide (410 to 486 on the 120 GB part), 348 in {_DNHKNG}; 486 in {_KTH}"
)
_GRACE_BYTES = "NVIDIA Grace CPU Benchmarking Guide, STREAM: Grace Hopper comes with 120 or 480 GB"
_HOPPER_BF16 = _NOTES + ": 990, which must be dense, because the H100 SXM has 989.4 dense and 1978.9 with sparsity"
_GH200_144 = _NOTES + ": 4.9 TB/s by specification"
_HOPPER_FP32 = "pc2/GPUInspector.jl pull request 27: theoretical peak that it computes for a GH200"
_GB200 = "NVIDIA's specifications of a GB200 NVL72, per GPU, as copied by zdszero.github.io (Hardware)"
_NVL72 = "NVIDIA's page on GB200 NVL72, as copied by Regatta's node profiles"
_GB10 = "NVIDIA's page on DGX Spark, as copied by ai-infrastructure.net/dgx-spark"
_GB10_USABLE = (
    "NVIDIA/open-gpu-kernel-modules issue 1358: MemTotal 121.7 GiB, of which about 119 GiB are usable; one pool, sold "
    "as 128 GB. Others found 102 GiB free at the start (MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks issue 47)"
)
_GB10_BF16 = ": about 125, dense by its ratio to NVIDIA's 1 PFLOP of sparse FP4; 62.5 by the ratios of the RTX 5090"
_ROCM = "ROCm documentation, Instinct architecture information"
_MI300A = "AMD's data on MI300A, as copied by vengineer.hatenablog.com (2023-12-11)"
_H100 = "NVIDIA's specifications of H100, as copied by archive-lib.hpctech.co.jp"
_H100_DENSE = "NVIDIA's peaks of H100 SXM5, dense, as copied by glennklockwood.com (H100)"
_A100 = "NVIDIA A100 datasheet 1758950 r4, as copied by glennklockwood.com (A100)"
_A100_PCIE = "thundercompute.com, NVIDIA A100 specs: PCIe, the slower"
_RTX4090 = "waredb.com, NVIDIA GeForce RTX 4090"
_RTX5090 = "github.com/lamonoai/gpumap, nvidia/GPU.md"
_READS_AND_WRITES = "; the source does not separate reads and writes"
_DRIVER_BLOCK = _spec(
    2 * MIB,
    "NVIDIA/open-gpu-kernel-modules, uvm_va_block_types.h: UVM_VA_BLOCK_BITS is 21, the maximum block size is 2MB",
)
_PAGE_64K = _spec(
    64 * KIB, "NVIDIA Grace Performance Tuning Guide, Page Size: the recommended default value for the page size is 64K"
)
_PAGE_4K = _spec(4 * KIB, "the only base page size of x86-64; an Arm host may differ")
_LANES = "16 lanes, 128b/130b, one direction; packet headers not subtracted"
_PCIE4 = _spec(31.5 * GB_S, f"arithmetic: 16 GT/s, {_LANES}")
_PCIE5 = _spec(63.0 * GB_S, f"arithmetic: 32 GT/s, {_LANES}")
_UNKNOWN_HOST = _unknown("a card: the host depends on the machine")
_NO_LINK = _unknown("one pool of memory: there is no link")
_UNKNOWN_CPU = _unknown("depends on the CPU; probe it")
_NO_GPU = _unknown("no GPU")

# What machines of one kind have in common; a row adds the rest.
_SUPERCHIP = partial(
    MachineSpec,
    host_bytes_s=_spec(384 * GB_S, _GRACE_480),
    system_page_bytes=_PAGE_64K,
    driver_block_bytes=_DRIVER_BLOCK,
    one_pool=False,
    ats=True,
    link="NVLink-C2C",
)
_ONE_POOL = partial(MachineSpec, to_device_bytes_s=_NO_LINK, to_host_bytes_s=_NO_LINK, one_pool=True, link="none")
_CARD = partial(
    MachineSpec,
    host_bytes=_UNKNOWN_HOST,
    host_bytes_s=_UNKNOWN_HOST,
    system_page_bytes=_PAGE_4K,
    driver_block_bytes=_DRIVER_BLOCK,
    one_pool=False,
    ats=False,
)
_PCIE4_CARD = partial(_CARD, to_device_bytes_s=_PCIE4, to_host_bytes_s=_PCIE4, link="PCIe 4.0 x16")
_PCIE5_CARD = partial(_CARD, to_device_bytes_s=_PCIE5, to_host_bytes_s=_PCIE5, link="PCIe 5.0 x16")

_GH200_96 = _SUPERCHIP(
    key="gh200-96",
    title="GH200 96 GB",
    # "NVIDIA GH200 480GB" and "NVIDIA GH200 120GB": found (both have 96 GB).
    name_pattern=r"(NVIDIA )?GH200( (120|480)GB)?",
    gpu_bytes=_spec(96 * GIB, "in the product's name: 96 GB (HBM3)"),
    host_bytes=_spec(480 * GIB, _GRACE_BYTES + "; the table uses the larger"),
    gpu_read_bytes_s=_measured(3615 * GB_S, _NOTES + f"; 3728 (BabelStream Triad) in {_DNHKNG}, 3400 in {_KTH}"),
    gpu_write_bytes_s=_measured(3705 * GB_S, _NOTES + f"; 3728 (BabelStream Triad) in {_DNHKNG}, 3400 in {_KTH}"),
    to_device_bytes_s=_measured(375 * GB_S, _TO_DEVICE),
    to_host_bytes_s=_measured(296 * GB_S, _TO_HOST),
    bf16_flops=_spec(990 * TFLOPS, _HOPPER_BF16),
    fp8_flops=_unknown("no source found for a GH200; 1978.9 dense is the H100 SXM's"),
    fp32_flops=_spec(66.9 * TFLOPS, _HOPPER_FP32),
)
_ROWS: Final = (
    _GH200_96,
    replace(
        _GH200_96,
        key="gh200-144",
        title="GH200 144 GB",
        # "NVIDIA GH200 144G HBM3e": found.
        name_pattern=r"(NVIDIA )?GH200( (144GB?( HBM3e)?|480GB))?",
        gpu_bytes=_spec(144 * GIB, "in the product's name: 144 GB (HBM3e)"),
        host_bytes=_spec(480 * GIB, _NOTES + ": 480 GB LPDDR5X, as the 96 GB part"),
        gpu_read_bytes_s=_spec(4900 * GB_S, _GH200_144 + "; no published measurement was found"),
        gpu_write_bytes_s=_spec(4900 * GB_S, _GH200_144 + _READS_AND_WRITES),
        to_device_bytes_s=_measured(375 * GB_S, "on the 96 GB part: " + _TO_DEVICE),
        to_host_bytes_s=_measured(296 * GB_S, "on the 96 GB part: " + _TO_HOST),
    ),
    _SUPERCHIP(
        key="gb200",
        title="GB200, one of its two GPUs",
        # "NVIDIA GB200": found.
        name_pattern=r"(NVIDIA )?GB200",
        gpu_bytes=_spec(186 * GIB, _GB200 + ": 186 GB HBM3E"),
        host_bytes=_spec(480 * GIB, _NVL72 + ": up to 480 GB LPDDR5X for one Grace and two GPUs"),
        gpu_read_bytes_s=_spec(8000 * GB_S, _GB200 + ": 8 TB/s"),
        gpu_write_bytes_s=_spec(8000 * GB_S, _GB200 + ": 8 TB/s" + _READS_AND_WRITES),
        host_bytes_s=_spec(
            14_000 / 36 * GB_S,
            _NVL72 + ": 14 TB/s over 36 Grace, each for two GPUs; the same source gives up to 512 GB/s for one",
        ),
        to_device_bytes_s=_unknown("no published measurement of this direction was found"),
        to_host_bytes_s=_measured(330 * GB_S, _NOTES + ": 330 to the NUMA node next to the GPU, 115 to the other one"),
        bf16_flops=_spec(2500 * TFLOPS, _GB200 + ": 5 PFLOPS with sparsity, half of it dense; 2250 by verda.com"),
        fp8_flops=_spec(5000 * TFLOPS, _GB200 + ": 10 PFLOPS with sparsity, half of it dense; 4500 by verda.com"),
        fp32_flops=_spec(80 * TFLOPS, _GB200 + "; 75 by verda.com, 90 by glennklockwood.com"),
    ),
    _ONE_POOL(
        key="gb10",
        title="GB10 (DGX Spark)",
        # "NVIDIA GB10": found.
        name_pattern=r"(NVIDIA )?GB10",
        gpu_bytes=_measured(119 * GIB, _GB10_USABLE),
        host_bytes=_measured(119 * GIB, _GB10_USABLE),
        gpu_read_bytes_s=_spec(273 * GB_S, _GB10 + ": 273 GB/s"),
        gpu_write_bytes_s=_spec(273 * GB_S, _GB10 + ": 273 GB/s" + _READS_AND_WRITES),
        host_bytes_s=_spec(273 * GB_S, _GB10 + ": the same memory; no source found for the CPU alone"),
        bf16_flops=_spec(125 * TFLOPS, _NOTES + _GB10_BF16),
        fp8_flops=_unknown("no source found: NVIDIA publishes only 1 PFLOP of FP4 with sparsity"),
        fp32_flops=_unknown("no source found: NVIDIA publishes only 1 PFLOP of FP4 with sparsity"),
        system_page_bytes=_spec(
            4 * KIB, "NVIDIA/NV-Kernels pull request 590: the 4 KiB arm64 `nvidia` kernel flavour used by DGX Spark"
        ),
        driver_block_bytes=_DRIVER_BLOCK,
        ats=True,  # NVIDIA's UVM driver reports it for GB10: Start9Labs/start-technologies pull request 3693
    ),
    _ONE_POOL(
        key="mi300a",
        title="MI300A",
        # "AMD Instinct MI300A Accelerator": found, as the name of the CPU.
        name_pattern=r"AMD Instinct MI300A.*",
        gpu_bytes=_spec(
            128 * GIB, _ROCM + ": MI300A, VRAM 128 GiB; one pool. No source found for what is usable of it"
        ),
        host_bytes=_spec(128 * GIB, _ROCM + ": the same pool"),
        gpu_read_bytes_s=_spec(
            5300 * GB_S, _NOTES + ": 5.3 TB/s; a peak according to ROCm/rocm_bandwidth_test issue 121"
        ),
        gpu_write_bytes_s=_spec(5300 * GB_S, _NOTES + ": 5.3 TB/s, a peak" + _READS_AND_WRITES),
        host_bytes_s=_unknown("the same memory, but no source found for the bandwidth of its CPU cores"),
        bf16_flops=_spec(980.6 * TFLOPS, _MI300A + ": peak bfloat16, no sparsity mentioned"),
        fp8_flops=_unknown("no source found: the data found only lists INT8 (1.96 POPs)"),
        fp32_flops=_spec(122.6 * TFLOPS, _MI300A + "; 113.2 measured by chipsandcheese.com (Sizing up MI300A's GPU)"),
        system_page_bytes=_PAGE_4K,
        driver_block_bytes=_unknown("AMD's driver; no source found for its migration unit"),
        ats=False,
    ),
    _PCIE5_CARD(
        key="h100-80-pcie",
        title="H100 80 GB PCIe",
        # "NVIDIA H100 PCIe": found.
        name_pattern=r"(NVIDIA )?H100 PCIe",
        gpu_bytes=_spec(80 * GIB, "in the product's name: 80 GB (HBM2e)"),
        gpu_read_bytes_s=_spec(2000 * GB_S, _H100 + ": 2000 GB/s"),
        gpu_write_bytes_s=_spec(2000 * GB_S, _H100 + ": 2000 GB/s" + _READS_AND_WRITES),
        bf16_flops=_spec(756.5 * TFLOPS, _H100 + ": 1,513 with sparsity, half of it dense"),
        fp8_flops=_spec(1513 * TFLOPS, _H100 + ": 3,026 with sparsity, half of it dense"),
        fp32_flops=_spec(51 * TFLOPS, _H100),
    ),
    _PCIE5_CARD(
        key="h100-80-sxm",
        title="H100 80 GB SXM",
        # "NVIDIA H100 80GB HBM3": found.
        name_pattern=r"(NVIDIA )?H100 80GB HBM3",
        gpu_bytes=_spec(80 * GIB, "in the product's name: 80 GB (HBM3)"),
        gpu_read_bytes_s=_spec(3350 * GB_S, _H100 + ": 3,350 GB/s"),
        gpu_write_bytes_s=_spec(3350 * GB_S, _H100 + ": 3,350 GB/s" + _READS_AND_WRITES),
        bf16_flops=_spec(989.4 * TFLOPS, _H100_DENSE),
        fp8_flops=_spec(1978.9 * TFLOPS, _H100_DENSE),
        fp32_flops=_spec(66.9 * TFLOPS, _H100_DENSE),
    ),
    _PCIE4_CARD(
        key="a100-80",
        title="A100 80 GB",
        # "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe" and "NVIDIA A100-PCIE-80GB": found.
        name_pattern=r"(NVIDIA )?A100(-SXM4-80GB|-SXM-80GB| 80GB PCIe|-PCIE-80GB)",
        gpu_bytes=_spec(80 * GIB, "in the product's name: 80 GB (HBM2e)"),
        gpu_read_bytes_s=_spec(1935 * GB_S, _A100_PCIE + "; 2,039 for SXM"),
        gpu_write_bytes_s=_spec(1935 * GB_S, _A100_PCIE + _READS_AND_WRITES),
        bf16_flops=_spec(312 * TFLOPS, _A100 + ": 312 dense, 624 with sparsity"),
        fp8_flops=_unknown("the chip has no FP8 units"),
        fp32_flops=_spec(19.5 * TFLOPS, _A100),
    ),
    _PCIE4_CARD(
        key="rtx-4090",
        title="RTX 4090",
        # "NVIDIA GeForce RTX 4090": found.
        name_pattern=r"(NVIDIA )?GeForce RTX 4090",
        gpu_bytes=_spec(24 * GIB, "in the product's name: 24 GB (GDDR6X)"),
        gpu_read_bytes_s=_spec(1008 * GB_S, _RTX4090 + ": 1008 GB/s"),
        gpu_write_bytes_s=_spec(1008 * GB_S, _RTX4090 + ": 1008 GB/s" + _READS_AND_WRITES),
        bf16_flops=_spec(165.15 * TFLOPS, _RTX4090 + ": 165.15, with sparsity 330.30"),
        fp8_flops=_unknown("sources disagree: 330 dense by waredb.com, 661 dense by github.com/lamonoai/gpumap"),
        fp32_flops=_spec(82.58 * TFLOPS, _RTX4090),
    ),
    _PCIE5_CARD(
        key="rtx-5090",
        title="RTX 5090",
        # "NVIDIA GeForce RTX 5090": found.
        name_pattern=r"(NVIDIA )?GeForce RTX 5090",
        gpu_bytes=_spec(32 * GIB, "in the product's name: 32 GB (GDDR7)"),
        gpu_read_bytes_s=_spec(1792 * GB_S, _RTX5090 + ": 1,792 GB/s"),
        gpu_write_bytes_s=_spec(1792 * GB_S, _RTX5090 + ": 1,792 GB/s" + _READS_AND_WRITES),
        bf16_flops=_spec(210 * TFLOPS, _RTX5090 + ": 210 accumulating in fp32, with sparsity 419"),
        fp8_flops=_unknown(
            "sources disagree: 419 by github.com/lamonoai/gpumap, 774 measured by xzwgit/gpu-flops-bench"
        ),
        fp32_flops=_spec(105 * TFLOPS, _RTX5090),
    ),
    MachineSpec(
        key="cpu",
        title="a CPU without a GPU",
        name_pattern=r"(?!)",  # matches no name: used where there is no GPU
        gpu_bytes=_NO_GPU,
        host_bytes=_UNKNOWN_CPU,
        gpu_read_bytes_s=_NO_GPU,
        gpu_write_bytes_s=_NO_GPU,
        host_bytes_s=_UNKNOWN_CPU,
        to_device_bytes_s=_NO_GPU,
        to_host_bytes_s=_NO_GPU,
        bf16_flops=_UNKNOWN_CPU,
        fp8_flops=_UNKNOWN_CPU,
        fp32_flops=_UNKNOWN_CPU,
        system_page_bytes=_UNKNOWN_CPU,
        driver_block_bytes=_NO_GPU,
        one_pool=False,
        ats=False,
        link="none",
    ),
)
MACHINES: Final[Mapping[str, MachineSpec]] = {row.key: row for row in _ROWS}

MIN_MEMORY_SHARE, MAX_MEMORY_SHARE = 0.85, 1.05
"""GPU memory that the driver reports, as a share of the table's value: the driver reserves some (ECC, page tables)."""


def find_machine(device: DeviceProperties) -> MachineSpec | None:
    """The table row of this GPU, matched by name, memory size, and whether it shares the host's memory.

    None for a GPU without a row, for a part of one (a MIG slice), and for a variant with a different memory size.
    """
    return next((row for row in _rows_named(device.name) if _memory_matches(row, device)), None)


def find_machine_by_cpu(cpu_name: str) -> MachineSpec | None:
    """The table row of a machine that is identified by its CPU name, because its GPU needs another vendor's driver."""
    return next(_rows_named(cpu_name), None)


def _rows_named(name: str) -> Iterator[MachineSpec]:
    return (row for row in MACHINES.values() if re.fullmatch(row.name_pattern, name.strip()))


def _memory_matches(row: MachineSpec, device: DeviceProperties) -> bool:
    if device.integrated is True and not row.one_pool:
        return False
    if row.one_pool:  # its GPU reports the kernel's memory, which depends on firmware and carve-outs
        return True
    expected = row.gpu_bytes.value
    return expected is not None and MIN_MEMORY_SHARE <= device.total_bytes / expected <= MAX_MEMORY_SHARE

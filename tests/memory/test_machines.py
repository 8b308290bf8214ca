"""The table of machines names the source of each figure, and a GPU is matched by the properties that its driver
reports.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from supertuner.core.types import GIB
from supertuner.memory.driver import DeviceProperties
from supertuner.memory.machines import MACHINES, find_machine, find_machine_by_cpu

ROWS = list(MACHINES.items())


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA GH200 480GB", 94.5, "gh200-96"),  # 101468602368 bytes, from a public dump of one
        ("GH200 480GB", 94.5, "gh200-96"),
        ("NVIDIA GH200 120GB", 95.0, "gh200-96"),
        ("NVIDIA GH200 144G HBM3e", 142.5, "gh200-144"),  # 153008209920 bytes, from a public dump
        ("NVIDIA GB200", 183.0, "gb200"),
        ("NVIDIA GB10", 121.69, "gb10"),  # 119.7 according to other owners
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-80-sxm"),
        ("NVIDIA H100 PCIe", 79.6, "h100-80-pcie"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-80"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", 31.4, "rtx-5090"),
    ],
)
def test_a_gpu_is_recognised_by_its_name_and_its_memory(name: str, gib: float, key: str) -> None:
    row = find_machine(DeviceProperties(0, name, int(gib * GIB)))
    assert row is not None and row.key == key


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA GB300", 276.0),
        ("NVIDIA A100-SXM4-40GB", 39.4),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.9),
        ("NVIDIA GeForce RTX 4090 D", 23.6),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8),
        ("NVIDIA H100 80GB HBM3", 9.8),
        ("NVIDIA GH200 480GB", 20.0),
        ("NVIDIA H200", 140.4),
        ("", 80.0),
    ],
)
def test_a_variant_of_another_size_or_name_has_no_row(name: str, gib: float) -> None:
    assert find_machine(DeviceProperties(0, name, int(gib * GIB))) is None


def test_a_name_that_contradicts_the_attributes_has_no_row() -> None:
    device = DeviceProperties(0, "NVIDIA H100 80GB HBM3", 80 * GIB, integrated=False)
    assert find_machine(device) is not None
    assert find_machine(replace(device, integrated=True)) is None


def test_an_accelerator_with_integrated_cpu_is_recognised_by_the_cpus_name() -> None:
    row = find_machine_by_cpu("AMD Instinct MI300A Accelerator")
    assert row is not None and row.key == "mi300a" and row.one_pool
    assert find_machine_by_cpu("AMD EPYC 9654 96-Core Processor") is None


@pytest.mark.parametrize(("key", "row"), ROWS)
def test_every_figure_has_a_source_and_an_unknown_one_a_reason(key: str, row: object) -> None:
    machine = MACHINES[key]
    assert machine.key == key
    for name, figure in machine.figures().items():
        assert figure.source, name
        assert (figure.value is None) == (figure.origin == "unknown"), name
        assert figure.value is None or figure.value > 0, name


@pytest.mark.parametrize(("key", "row"), ROWS)
def test_the_source_of_a_tensor_core_peak_mentions_sparsity(key: str, row: object) -> None:
    machine = MACHINES[key]
    for figure in (machine.bf16_flops, machine.fp8_flops):
        assert figure.value is None or "dense" in figure.source or "sparsity" in figure.source


@pytest.mark.parametrize(("key", "bf16"), [("gb200", 2500), ("h100-80-sxm", 989.4), ("h100-80-pcie", 756.5)])
def test_a_peak_that_is_published_with_sparsity_is_halved(key: str, bf16: float) -> None:
    assert MACHINES[key].bf16_flops.value == bf16 * 1e12


def test_a_figure_without_a_source_is_none() -> None:
    without = {
        (key, name)
        for key, row in ROWS
        for name, figure in row.figures().items()
        if figure.source.startswith(("no source found", "sources disagree"))
    }
    assert without == {
        ("gh200-96", "fp8_flops"),
        ("gh200-144", "fp8_flops"),
        ("gb10", "fp8_flops"),
        ("gb10", "fp32_flops"),
        ("mi300a", "fp8_flops"),
        ("rtx-4090", "fp8_flops"),
        ("rtx-5090", "fp8_flops"),
    }
    assert all(MACHINES[key].figures()[name].value is None for key, name in without)


def test_the_table_lists_every_planned_machine() -> None:
    wanted = "gh200-96 gh200-144 gb200 gb10 mi300a h100-80-pcie h100-80-sxm a100-80 rtx-4090 rtx-5090 cpu"
    assert set(wanted.split()) == set(MACHINES)
    assert {key for key, row in MACHINES.items() if row.one_pool} == {"gb10", "mi300a"}


@pytest.mark.parametrize("key", [key for key, row in MACHINES.items() if row.one_pool])
def test_a_one_pool_machine_has_no_link(key: str) -> None:
    row = MACHINES[key]
    assert row.to_device_bytes_s.value is None and row.to_host_bytes_s.value is None
    assert row.gpu_bytes.value == row.host_bytes.value

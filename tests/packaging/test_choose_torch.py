"""The build of torch that `make setup` installs, decided for faked machines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.choose_torch import CPU_INDEX, WHEELS, ChoiceRefused, Machine, choose, find_machine

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads(WHEELS.read_text())
VERSION = FOUND["torch"]
GH200 = Machine("Linux", "aarch64", "NVIDIA GH200 480GB", "580.65.06")


def nvidia_files(root: Path, driver: str, model: str) -> Path:
    gpu = root / "proc/driver/nvidia/gpus/0009:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 0\n")
    kernel = f"NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {driver}  Release Build  (dvs-builder@U16)\n"
    (root / "proc/driver/nvidia/version").write_text(kernel + "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0)\n")
    return root


def test_the_facts_about_the_wheels_are_those_of_the_pinned_version() -> None:
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned.group(1) == VERSION, "run scripts/choose_torch.py --refresh"
    proof = json.loads((ROOT / "scripts/aarch64_wheels.json").read_text())["wheels"]["3.12"]
    assert proof["torch"] == FOUND["wheels"]["aarch64"]["file"]
    assert proof["cuda-toolkit"].startswith(f"cuda_toolkit-{FOUND['wheels']['aarch64']['cuda']}."), "it needs CUDA"


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
@pytest.mark.parametrize("asked", ["", "auto", "cuda"])
def test_a_gpu_gets_the_cuda_build_of_its_platform(architecture: str, asked: str) -> None:
    choice = choose(GH200._replace(architecture=architecture), asked, FOUND)
    assert choice.arguments == f"torch==={VERSION}" and choice.needs_cuda
    assert "NVIDIA GH200 480GB, driver 580.65.06" in choice.reason and f"for {architecture}" in choice.reason
    assert f"CUDA {FOUND['wheels'][architecture]['cuda']}" in choice.reason


def test_three_equal_signs_exclude_a_cpu_build_that_pip_would_prefer() -> None:
    from packaging.specifiers import SpecifierSet

    assert f"{VERSION}+cpu" in SpecifierSet(f"=={VERSION}")
    assert f"{VERSION}+cpu" not in SpecifierSet(f"==={VERSION}") and VERSION in SpecifierSet(f"==={VERSION}")


def test_without_a_gpu_pip_decides_and_the_reason_is_given() -> None:
    choice = choose(Machine("Linux", "x86_64"), "", FOUND)
    assert choice[:2] == (f"torch=={VERSION}", False) and "no NVIDIA GPU was found" in choice.reason
    assert "gigabytes" not in choose(Machine("Darwin", "arm64"), "", FOUND).reason


def test_the_user_may_override() -> None:
    assert choose(GH200, "cpu", FOUND)[:2] == (f"torch=={VERSION}+cpu --extra-index-url {CPU_INDEX}", False)
    assert choose(Machine("Linux", "x86_64"), "cuda", FOUND).needs_cuda
    assert choose(GH200, "torch==2.12.0+cu126 --index-url https://x.org", FOUND).arguments.startswith(
        "torch==2.12.0+cu"
    )


@pytest.mark.parametrize(
    ("machine", "part"),
    [
        (GH200._replace(driver="570.86.15"), "needs driver 580 or newer"),
        (GH200._replace(architecture="ppc64le"), "no CUDA wheel for Linux on ppc64le"),
    ],
)
def test_a_machine_that_no_build_can_serve_is_refused_with_the_remedy(machine: Machine, part: str) -> None:
    with pytest.raises(ChoiceRefused, match=part) as refused:
        choose(machine, "", FOUND)
    assert "TORCH=cpu" in str(refused.value)


def test_the_machine_is_read_from_the_drivers_files(tmp_path: Path) -> None:
    found = find_machine(nvidia_files(tmp_path, "580.65.06", "NVIDIA GH200 480GB"))
    assert (found.gpu, found.driver) == ("NVIDIA GH200 480GB", "580.65.06")
    assert find_machine(tmp_path / "nothing").gpu is None


def test_a_gpu_without_a_driver_is_found_on_the_pci_bus(tmp_path: Path) -> None:
    for name, vendor, kind in (("0000:00:01.0", "0x8086", "0x030000"), ("0000:00:02.0", "0x10de", "0x040300")):
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert find_machine(tmp_path).gpu is None, "another maker's GPU, and NVIDIA's sound"
    (tmp_path / "sys/bus/pci/devices/0000:00:02.0/class").write_text("0x030200\n")
    found = find_machine(tmp_path)
    assert found.gpu == "an NVIDIA GPU without a loaded driver" and found.driver is None


def test_a_gpu_through_wsl_is_found(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    (tmp_path / "usr/lib/wsl/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").touch()
    assert find_machine(tmp_path).gpu == "an NVIDIA GPU through WSL"

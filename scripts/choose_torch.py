"""Chooses the build of torch for this machine, before anything is installed; needs Python's standard library only.

    choose_torch.py                prints pip's arguments, what the build must support (`cuda` or `any`), and the reason
    choose_torch.py --refresh      asks the package index what its plain wheels contain: scripts/torch_wheels.json

The environment variable TORCH overrides the choice: `cpu`, `cuda`, or arguments for pip; empty or `auto`: no override.

The plain wheels (`torch===2.13.0`; three equal signs exclude 2.13.0+cpu, which pip would prefer) are CUDA builds on
x86-64 and on aarch64. A driver supports the CUDA releases up to its own, so an old driver is refused here, before
gigabytes are downloaded.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).resolve().parent
WHEELS = SCRIPTS / "torch_wheels.json"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FIRST_DRIVER = {12: 525, 13: 580}
"""CUDA major release → the oldest driver branch that runs it (NVIDIA's table of minor-version compatibility)."""


class Machine(NamedTuple):
    """What the choice depends on."""

    system: str
    architecture: str
    gpu: str | None = None
    """What was found; None: no NVIDIA GPU."""
    driver: str | None = None
    """The kernel driver's version; None: none is loaded, or it is not told."""


class Choice(NamedTuple):
    arguments: str
    needs_cuda: bool
    reason: str


class ChoiceRefused(Exception):
    """No build can work; the message says what to do."""


def find_machine(root: Path = Path("/")) -> Machine:
    """This machine, from files that NVIDIA's kernel driver and the PCI bus show; no program is started."""
    machine = Machine(platform.system(), platform.machine().lower())
    models = [_after(text, "Model:") for text in _texts(root, "proc/driver/nvidia/gpus/*/information")]
    if version := _texts(root, "proc/driver/nvidia/version"):
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", version[0])
        return machine._replace(gpu=models[0] if models else "an NVIDIA GPU", driver=found.group() if found else None)
    if (root / "dev/dxg").exists() and list(root.glob("usr/lib/wsl/lib/libcuda.so*")):
        return machine._replace(gpu="an NVIDIA GPU through WSL")
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        if _texts(device, "vendor") == ["0x10de"] and _texts(device, "class")[0].startswith("0x03"):
            return machine._replace(gpu="an NVIDIA GPU without a loaded driver")
    return machine


def _texts(folder: Path, pattern: str) -> list[str]:
    return [file.read_text(errors="replace").strip() for file in sorted(folder.glob(pattern))]


def _after(text: str, label: str) -> str:
    return next((line.removeprefix(label).strip() for line in text.splitlines() if line.startswith(label)), "NVIDIA")


def choose(machine: Machine, asked: str, wheels: Mapping[str, Any]) -> Choice:
    """The build for a machine. `asked`: the variable TORCH; `wheels`: the content of torch_wheels.json."""
    version = wheels["torch"]
    asked = asked.removeprefix("auto")
    if asked not in ("", "cpu", "cuda"):
        return Choice(asked, False, "as TORCH says")
    if asked == "cpu":
        return Choice(f"torch=={version}+cpu --extra-index-url {CPU_INDEX}", False, "the CPU build, as TORCH says")
    if not asked and machine.gpu is None:
        note = f"; on {machine.system} pip's default brings CUDA, some gigabytes: TORCH=cpu avoids them"
        reason = "no NVIDIA GPU was found: the build that pip prefers here"
        return Choice(f"torch=={version}", False, reason + (note if machine.system == "Linux" else ""))
    wheel = wheels["wheels"].get(machine.architecture) if machine.system == "Linux" else None
    found = machine.gpu or "no NVIDIA GPU was found, but TORCH=cuda"
    if wheel is None:
        raise ChoiceRefused(
            f"{found}: torch has no CUDA wheel for {machine.system} on {machine.architecture}; use TORCH=cpu"
        )
    branch, needed = int((machine.driver or "0").split(".")[0]), FIRST_DRIVER[int(wheel["cuda"].split(".")[0])]
    if machine.driver and branch < needed:
        older = f"torch=={version}+cu126 --index-url https://download.pytorch.org/whl/cu126"
        raise ChoiceRefused(
            f"{found}, driver {machine.driver}: torch {version} is built for CUDA {wheel['cuda']}, which needs"
            f" driver {needed} or newer. Update the driver (sudo apt install nvidia-driver-{needed}-open, then reboot),"
            f" or name another build: make setup TORCH='{older}' (if pytorch.org has it for this version), or TORCH=cpu"
        )
    driver = f", driver {machine.driver}" if machine.driver else ""
    size = f"{wheel['bytes'] / 1e6:.0f} MB, and NVIDIA's libraries"
    reason = f"{found}{driver}: the index's wheel for {machine.architecture} is built for CUDA {wheel['cuda']} ({size})"
    return Choice(f"torch==={version}", True, reason)


def ask_index(version: str) -> dict[str, Any]:
    """What the package index's plain wheels of this version contain, by their metadata."""
    wheels = {}
    for architecture in ("x86_64", "aarch64"):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--target", folder]
            options += ["--platform", f"manylinux_2_28_{architecture}", "--python-version", "3.12"]
            command = [sys.executable, "-m", "pip", "install", "-qq", *options, "--report", str(report)]
            subprocess.run([*command, f"torch==={version}"], check=True)
            (found,) = json.loads(report.read_text())["install"]
        url = found["download_info"]["url"]
        toolkit = next((one for one in found["metadata"]["requires_dist"] if one.startswith("cuda-toolkit")), None)
        if toolkit is None:
            raise SystemExit(
                f"choose_torch: the wheel for {architecture} requires no cuda-toolkit: {url.rsplit('/')[-1]}"
            )
        cuda = re.search(r"==(\d+\.\d+)", toolkit)
        wheels[architecture] = {"file": url.rsplit("/")[-1], "cuda": cuda and cuda.group(1), "bytes": _size(url)}
    return {"torch": version, "wheels": wheels}


def _size(url: str) -> int:
    head = subprocess.run(["curl", "-sIL", url], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"(?i)^content-length: (\d+)", head, re.MULTILINE)[-1])


def main() -> int:
    if sys.argv[1:] == ["--refresh"]:
        pinned = re.search(r"^torch==(\S+)", (SCRIPTS.parent / "constraints.txt").read_text(), re.MULTILINE)
        assert pinned is not None, "constraints.txt does not pin torch"
        WHEELS.write_text(json.dumps(ask_index(pinned.group(1)), indent=1) + "\n")
        return 0
    try:
        choice = choose(find_machine(), os.environ.get("TORCH", ""), json.loads(WHEELS.read_text()))
    except ChoiceRefused as refused:
        print(f"setup: {refused}", file=sys.stderr)
        return 1
    print(choice.arguments, "cuda" if choice.needs_cuda else "any", choice.reason, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Machines for the doctor's tests, as folders of kernel files and a driver that says what it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from supertuner.core.types import GIB
from supertuner.memory.driver import DeviceProperties, NotAvailable
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus
from supertuner.tools.doctor.requirements import all_checks
from supertuner.tools.doctor.system_snapshot import SystemSnapshot, take_snapshot
from supertuner.tools.doctor.torch_probe import TorchProbeResult
from tests.memory.machine_files import GH200, FakeProbeDriver, folder_host, gh200_files

STOCK = TorchProbeResult(version="2.13.0+cu130", cuda="13.0", sees=1, patched=False)
CPU_TORCH = TorchProbeResult(version="2.13.0+cpu")
NO_DRIVER = NotAvailable("no NVIDIA driver (libcuda.so.1) here")
NO_NVML = NotAvailable("no NVML here")
WELL: Mapping[str, str | bytes] = {"proc/sys/kernel/numa_balancing": "0\n", "dev/shm/here": ""}
"""What a GH200 should have, where the folder of files has a trap."""


def situation(
    root: Path,
    *devices: DeviceProperties,
    files: Mapping[str, str | bytes] | None = None,
    environ: Mapping[str, str] | None = None,
    torch: TorchProbeResult = STOCK,
    version: int = 13000,
) -> SystemSnapshot:
    """A GH200 in good order; `files` are laid over its kernel files, `devices` stand in for its GPU."""
    host = folder_host(root, {**gh200_files(), **WELL, **(files or {})})
    driver = FakeProbeDriver(*(devices or (GH200,)), version=version)
    found = take_snapshot(
        host,
        driver,  # type: ignore[arg-type]
        NO_NVML,
        {"PATH": "/usr/bin:/bin", **(environ or {})},
        folder=root,
        torch=lambda environ: torch,
    )
    # The size of a test's file system and this process's limits are not the machine's that is described.
    sizes = replace(found.resources, shm_bytes=287 * GIB, shm_free=280 * GIB, folder_free=900 * GIB, open_files=65536)
    return replace(found, resources=sizes)


def without_gpu(root: Path, torch: TorchProbeResult = CPU_TORCH, **environ: str) -> SystemSnapshot:
    host = folder_host(root, {**gh200_files(), **WELL})
    return take_snapshot(host, NO_DRIVER, NO_NVML, environ, folder=root, torch=lambda environ: torch)


def check(found: SystemSnapshot, name: str) -> CheckResult:
    named = [one for one in all_checks(found) if one.name == name]
    assert len(named) == 1, f"{name}: {len(named)} checks"
    return named[0]


def troubles(found: SystemSnapshot) -> dict[str, CheckResult]:
    """Checks that are a warning or worse, by name."""
    return {one.name: one for one in all_checks(found) if one.status in (CheckStatus.WARNING, CheckStatus.BAD)}

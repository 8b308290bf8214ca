"""Snapshots for the doctor's tests, of machines described by a folder of kernel files and a fake driver."""

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
"""Files of a well configured GH200, which replace the misconfigured ones of `gh200_files`."""


def gh200_snapshot(
    root: Path,
    *devices: DeviceProperties,
    files: Mapping[str, str | bytes] | None = None,
    environ: Mapping[str, str] | None = None,
    torch: TorchProbeResult = STOCK,
    version: int = 13000,
) -> SystemSnapshot:
    """A well configured GH200; `files` replace its kernel files, `devices` replace its GPU."""
    host = folder_host(root, {**gh200_files(), **WELL, **(files or {})})
    driver = FakeProbeDriver(*(devices or (GH200,)), version=version)
    snapshot = take_snapshot(
        host,
        driver,  # type: ignore[arg-type]
        NO_NVML,
        {"PATH": "/usr/bin:/bin", **(environ or {})},
        folder=root,
        torch=lambda environ: torch,
    )
    # File systems and limits are those of the machine that runs the test: replace them too.
    resources = replace(
        snapshot.resources, shm_bytes=287 * GIB, shm_free=280 * GIB, folder_free=900 * GIB, open_files=65536
    )
    return replace(snapshot, resources=resources)


def snapshot_without_gpu(root: Path, torch: TorchProbeResult = CPU_TORCH, **environ: str) -> SystemSnapshot:
    host = folder_host(root, {**gh200_files(), **WELL})
    return take_snapshot(host, NO_DRIVER, NO_NVML, environ, folder=root, torch=lambda environ: torch)


def check(snapshot: SystemSnapshot, name: str) -> CheckResult:
    (result,) = [result for result in all_checks(snapshot) if result.name == name]
    return result


def complaints(snapshot: SystemSnapshot) -> dict[str, CheckResult]:
    """Checks with a warning or worse, by name."""
    bad = (CheckStatus.WARNING, CheckStatus.BAD)
    return {result.name: result for result in all_checks(snapshot) if result.status in bad}

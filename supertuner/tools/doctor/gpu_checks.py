"""Checks of the GPU and its driver: which kinds of memory access they support. Pure: a snapshot in, checks out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from supertuner.core.types import bytes_text
from supertuner.memory.driver import DeviceProperties
from supertuner.tools.doctor.check_result import CheckResult, absent, bad, good, warning
from supertuner.tools.doctor.system_snapshot import SystemSnapshot

GROUP: Final = "GPU"
BATCH_CALLS_VERSION: Final = 13000
"""The first driver API version that prefetches or discards many ranges in one call."""


def gpu_checks(snapshot: SystemSnapshot) -> Iterator[CheckResult]:
    """Checks in display order. Without a GPU, one check reports that, and those that need one are ABSENT."""
    yield check_machine(snapshot)
    gpus = snapshot.facts.gpus
    if not gpus:
        reason = snapshot.facts.no_gpu_reason or "the driver lists no GPU"
        if snapshot.visible_devices is not None:
            reason += f"; CUDA_VISIBLE_DEVICES is {snapshot.visible_devices!r}, which may hide it"
        yield check_missing_gpu(snapshot, reason)
        for name in ("driver", *(name for name, _ in ABILITY_CHECKS)):
            yield replace(absent(GROUP, name, "no GPU"), needs_gpu=True)
        return
    yield check_gpus(snapshot)
    yield check_driver(snapshot)
    for name, check_ability in ABILITY_CHECKS:
        yield replace(check_ability(gpus[0].device, snapshot), name=name, needs_gpu=True)


def check_missing_gpu(snapshot: SystemSnapshot, reason: str) -> CheckResult:
    """The finding for a machine on which SuperTuner sees no GPU. If torch sees one, an installation is broken."""
    if snapshot.torch.sees:
        finding = f"torch sees {snapshot.torch.sees}, but SuperTuner sees none: {reason}"
        remedy = "install the requirements: `pip install -e .` in SuperTuner's folder; test the driver: `nvidia-smi`"
        return bad(GROUP, "GPU", finding, remedy)
    return absent(GROUP, "GPU", f"none: {reason}", "if there is one, check whether the system sees it: `nvidia-smi`")


def check_machine(snapshot: SystemSnapshot) -> CheckResult:
    facts = snapshot.facts
    host = f"{facts.arch or 'unknown architecture'}, {facts.cpus} CPUs, Linux {facts.kernel or 'of unknown version'}"
    if facts.machine is None:
        name = facts.gpus[0].device.name if facts.gpus else facts.cpu_name or "this machine"
        finding = f"{name} is not in the table of machines: there are no bandwidths to compare with"
        return absent(GROUP, "machine", finding)
    link = f", {facts.machine.link}" if facts.machine.link != "none" else ""
    return good(GROUP, "machine", f"{facts.machine.title} ({facts.machine.key}){link}; {host}")


def check_gpus(snapshot: SystemSnapshot) -> CheckResult:
    gpus = [gpu.device for gpu in snapshot.facts.gpus]
    kinds = {(gpu.name, gpu.total_bytes): sum(g.name == gpu.name for g in gpus) for gpu in gpus}
    text = ", ".join(f"{count} × {name}, {bytes_text(size)}" for (name, size), count in kinds.items())
    shown = f" (CUDA_VISIBLE_DEVICES={snapshot.visible_devices})" if snapshot.visible_devices is not None else ""
    return good(GROUP, "GPU", text + shown)


def check_driver(snapshot: SystemSnapshot) -> CheckResult:
    facts = snapshot.facts
    kernel = f", kernel driver {facts.nvidia_driver}" if facts.nvidia_driver else ""
    if facts.driver_version is None:
        return replace(absent(GROUP, "driver", f"unknown version{kernel}"), needs_gpu=True)
    text = f"CUDA {format_cuda_version(facts.driver_version)}{kernel}"
    standing_in = ""
    if snapshot.driver.figure_origin == "stand-in":
        library = snapshot.driver.library or "its library"
        standing_in = f"; a stand-in for a GPU: there is no NVIDIA kernel driver behind {library}"
    if facts.driver_version < BATCH_CALLS_VERSION:
        old = "too old for batch calls: each range is prefetched by a separate call, and none is discarded"
        remedy = "install a driver of branch 580 or newer: `sudo apt install nvidia-driver-580-open`, then reboot"
        return warning(GROUP, "driver", f"{text}, {old}{standing_in}", remedy)
    return good(GROUP, "driver", f"{text}; batch calls{standing_in}")


def check_managed_memory(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    if device.managed:
        return good(GROUP, "", "yes")
    if device.managed is None:
        return absent(GROUP, "", "not reported by the driver")
    remedy = "check that the kernel module is loaded: `lsmod | grep nvidia_uvm`; load it: `sudo modprobe nvidia_uvm`"
    return bad(GROUP, "", "none: residency hints and overflow do not work", remedy)


def check_concurrent_access(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    if device.concurrent_managed:
        return good(GROUP, "", "CPU and GPU may use managed memory at once: prefetch and oversubscription work")
    if device.concurrent_managed is None:
        return absent(GROUP, "", "not reported by the driver")
    remedy = "expected under WSL and on GPUs before Pascal; elsewhere look for errors: `sudo dmesg | grep -i nvrm`"
    return warning(GROUP, "", "no: prefetch does not work, and managed memory cannot exceed GPU memory", remedy)


def check_ats(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    row = snapshot.facts.machine
    if device.host_page_tables:
        return good(GROUP, "", "the GPU uses the host's page tables: it can access ordinary host memory")
    if row is not None and row.ats and not row.one_pool:
        parameters = "`cat /proc/driver/nvidia/params | grep -i -E 'ats|coherent'`"
        remedy = f"see {parameters} and `nvidia-smi -q | grep -i addressing`"
        return bad(GROUP, "", f"off, although {row.title} supports it: ordinary memory is copied page by page", remedy)
    if device.host_page_tables is None:
        return absent(GROUP, "", "not reported by the driver")
    if device.pageable:
        return absent(GROUP, "", "no; the GPU reads ordinary memory by page faults (HMM), which is slower than ATS")
    return absent(GROUP, "", "no; the GPU cannot read ordinary memory")


def check_direct_access(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    if device.direct_host_access:
        return good(GROUP, "", "the CPU reads managed memory on the GPU without moving it")
    if device.direct_host_access is None:
        return absent(GROUP, "", "not reported by the driver")
    return absent(GROUP, "", "no: managed memory moves to the host when the CPU accesses it")


def check_memory_pool(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    if snapshot.facts.one_pool is None:
        return absent(GROUP, "", "the driver does not report whether CPU and GPU share one pool")
    if snapshot.facts.one_pool:
        return good(GROUP, "", "one, shared by CPU and GPU: there is nothing to overflow into, so overflow is refused")
    return good(GROUP, "", "two: GPU memory and host memory")


ABILITY_CHECKS: Final[tuple[tuple[str, Callable[[DeviceProperties, SystemSnapshot], CheckResult]], ...]] = (
    ("managed memory", check_managed_memory),
    ("concurrent access", check_concurrent_access),
    ("ATS", check_ats),
    ("direct access", check_direct_access),
    ("pool", check_memory_pool),
)


def format_cuda_version(version: int) -> str:
    """13000 → `13.0`."""
    return f"{version // 1000}.{version % 1000 // 10}"

"""The GPU and its driver, judged: what kind of memory it has, and what that allows. Pure: situation in, checks out."""

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
"""The driver API from which on many ranges are prefetched or discarded in one call."""


def gpu_checks(snapshot: SystemSnapshot) -> Iterator[CheckResult]:
    """One check on whether there is a GPU; the others are of no meaning without one, and say so."""
    yield check_machine(snapshot)
    gpus = snapshot.facts.gpus
    if not gpus:
        reason = snapshot.facts.no_gpu_reason or "the driver names no GPU"
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
    """No GPU for us. Where torch has one, that is a fault of the installation, not of the machine."""
    if snapshot.torch.sees:
        finding = f"torch sees {snapshot.torch.sees}, and we see none: {reason}"
        remedy = "`pip install -e .` in SuperTuner's folder installs what it needs; `nvidia-smi` tells of the driver"
        return bad(GROUP, "GPU", finding, remedy)
    return absent(GROUP, "GPU", f"none: {reason}", "where one should be, `nvidia-smi` tells whether the system sees it")


def check_machine(snapshot: SystemSnapshot) -> CheckResult:
    facts = snapshot.facts
    host = f"{facts.arch or 'unknown architecture'}, {facts.cpus} CPUs, Linux {facts.kernel or 'of unknown version'}"
    if facts.machine is None:
        name = facts.gpus[0].device.name if facts.gpus else facts.cpu_name or "this machine"
        return absent(
            GROUP, "machine", f"{name} is not in the table of machines: bandwidths have nothing to stand against"
        )
    link = f", {facts.machine.link}" if facts.machine.link != "none" else ""
    return good(GROUP, "machine", f"{facts.machine.title} ({facts.machine.key}){link}; {host}")


def check_gpus(snapshot: SystemSnapshot) -> CheckResult:
    gpus = [gpu.device for gpu in snapshot.facts.gpus]
    kinds = {(gpu.name, gpu.total_bytes): sum(g.name == gpu.name for g in gpus) for gpu in gpus}
    text = ", ".join(f"{count} × {name}, {bytes_text(size)}" for (name, size), count in kinds.items())
    shown = (
        f", as CUDA_VISIBLE_DEVICES={snapshot.visible_devices} lets us see"
        if snapshot.visible_devices is not None
        else ""
    )
    return good(GROUP, "GPU", text + shown)


def check_driver(snapshot: SystemSnapshot) -> CheckResult:
    facts = snapshot.facts
    kernel = f", kernel driver {facts.nvidia_driver}" if facts.nvidia_driver else ""
    if facts.driver_version is None:
        return replace(absent(GROUP, "driver", f"its version is not known{kernel}"), needs_gpu=True)
    text = f"CUDA {format_cuda_version(facts.driver_version)}{kernel}"
    standing_in = ""
    if snapshot.driver.figure_origin == "stand-in":
        library = snapshot.driver.library or "its library"
        standing_in = f"; a stand-in for a GPU: there is no NVIDIA kernel driver below {library}"
    if facts.driver_version < BATCH_CALLS_VERSION:
        old = "too old for batch calls: each range is prefetched by a call of its own, none is discarded"
        remedy = "install a driver of branch 580 or newer: `sudo apt install nvidia-driver-580-open`, then reboot"
        return warning(GROUP, "driver", f"{text}, {old}{standing_in}", remedy)
    return good(GROUP, "driver", f"{text}; batch calls{standing_in}")


def check_managed_memory(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    if device.managed:
        return good(GROUP, "", "yes")
    if device.managed is None:
        return absent(GROUP, "", "the driver does not say")
    remedy = "see whether the module is there: `lsmod | grep nvidia_uvm`, else `sudo modprobe nvidia_uvm`"
    return bad(GROUP, "", "none: no hints for it, and no overflow", remedy)


def check_concurrent_access(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    if device.concurrent_managed:
        return good(GROUP, "", "CPU and GPU may use managed memory at once: prefetch and going beyond GPU memory work")
    if device.concurrent_managed is None:
        return absent(GROUP, "", "the driver does not say")
    remedy = (
        "this is so under WSL and on GPUs before Pascal; elsewhere look for refusals in `sudo dmesg | grep -i nvrm`"
    )
    return warning(GROUP, "", "no: no prefetch, and managed memory cannot go beyond GPU memory", remedy)


def check_ats(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    row = snapshot.facts.machine
    if device.host_page_tables:
        return good(GROUP, "", "the GPU uses the host's page tables: ordinary memory is its memory too")
    if row is not None and row.ats and not row.one_pool:
        remedy = (
            "see `cat /proc/driver/nvidia/params | grep -i -E 'ats|coherent'` and `nvidia-smi -q | grep -i addressing`"
        )
        return bad(GROUP, "", f"off, though {row.title} has it: ordinary memory is copied page by page", remedy)
    if device.host_page_tables is None:
        return absent(GROUP, "", "the driver does not say")
    how = "by faults (HMM), slower than ATS" if device.pageable else "not at all"
    return absent(GROUP, "", f"no; the GPU reads ordinary memory {how}")


def check_direct_access(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    if device.direct_host_access:
        return good(GROUP, "", "the CPU reads managed memory on the GPU without moving it")
    if device.direct_host_access is None:
        return absent(GROUP, "", "the driver does not say")
    return absent(GROUP, "", "no: what the CPU touches of managed memory moves to the host")


def check_memory_pool(device: DeviceProperties, snapshot: SystemSnapshot) -> CheckResult:
    if snapshot.facts.one_pool is None:
        return absent(GROUP, "", "the driver does not say whether CPU and GPU share one pool")
    if snapshot.facts.one_pool:
        return good(GROUP, "", "one, shared by CPU and GPU: there is nothing to spill into, and overflow is refused")
    return good(GROUP, "", "two: the GPU's own, and the host's")


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

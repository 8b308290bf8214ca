"""Decides whether overflow is possible on this machine and with this torch, and with which limits; a refusal has its
reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from supertuner.core.host import HostFacts
from supertuner.core.types import GIB, MIB, bytes_text
from supertuner.memory.driver import DeviceProperties
from supertuner.memory.overflow_allocator.plugin import OverflowLimits
from supertuner.memory.overflow_allocator.routing import OLDEST_TORCH, parse_version, version_text

if TYPE_CHECKING:
    from supertuner.config.settings.memory import OverflowSettings as Settings
    from supertuner.memory.probe import MachineFacts

SETTINGS_KEY: Final = "memory.overflow"
HOST_FLOOR_SHARE: Final = 0.10
"""Share of host memory that stays free if `host_floor_gb` is not set."""
_TURN_OFF_HINT: Final = f"set {SETTINGS_KEY}.enabled to false"


@dataclass(frozen=True, slots=True)
class TorchAllocatorFacts:
    """Properties of this torch that overflow depends on."""

    version: str
    sees_gpu: bool
    backend: str = "native"
    """The allocator in use: only torch's native one has pools."""
    memory_fraction: float = 1.0
    """The share of GPU memory that torch is limited to."""
    has_uvm_statistics: bool = False
    """Whether torch itself has `uvm.*` statistics: a patched build."""


def torch_allocator_facts(device: torch.device) -> TorchAllocatorFacts:
    """The properties of this torch for one of its devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return TorchAllocatorFacts(torch.__version__, sees_gpu=False)
    return TorchAllocatorFacts(
        torch.__version__,
        sees_gpu=True,
        backend=torch.cuda.get_allocator_backend(),
        memory_fraction=torch.cuda.get_per_process_memory_fraction(device.index or 0),
        has_uvm_statistics=any(key.startswith("uvm.") for key in torch.cuda.memory_stats(device)),
    )


def with_device_index(device: torch.device) -> torch.device:
    """The device with its index: "cuda" is the current GPU, which need not be the first."""
    number: int | None = device.index
    if device.type != "cuda" or number is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def unavailable_reason(
    settings: Settings, facts: MachineFacts, device: torch.device, torch_state: TorchAllocatorFacts, host: HostFacts
) -> str | None:
    """Why overflow is not possible, with a remedy; None if it is."""
    if not settings.enabled:
        return f"{SETTINGS_KEY}.enabled is false"
    if device.type != "cuda":
        return f"the device is {device.type}, which has no second memory to spill from; {_TURN_OFF_HINT}"
    number = device.index or 0
    gpu = next((gpu.device for gpu in facts.gpus if gpu.device.number == number), None)
    if gpu is None:
        return f"there is no GPU {number} ({facts.no_gpu_reason or 'the driver has fewer'}); {_TURN_OFF_HINT}"
    if host.memory_available() is None:
        return "the host's available memory cannot be read from /proc/meminfo, so host_floor_gb cannot be kept free"
    return _gpu_problem(gpu, facts) or _torch_problem(torch_state) or _host_floor_problem(settings, host)


def _host_floor_problem(settings: Settings, host: HostFacts) -> str | None:
    floor, total = settings.host_floor_gb, host.memory_total()
    if floor is None or total is None or floor * GIB < total:
        return None
    return f"host_floor_gb is {floor:g}, and the host has {bytes_text(total)}: nothing could ever spill; lower it"


def settings_warning(settings: Settings, gpu_bytes: int) -> str | None:
    """A setting that works but may be unintended; None if there is none."""
    reserve = settings.gpu_reserve_gb
    if reserve is None or reserve * GIB < gpu_bytes:
        return None
    return f"gpu_reserve_gb is {reserve:g}, and the GPU has {bytes_text(gpu_bytes)}: all memory will be managed"


def _gpu_problem(gpu: DeviceProperties, facts: MachineFacts) -> str | None:
    if facts.one_pool:
        return f"CPU and GPU share one memory on {gpu.name}, so there is no second memory to spill to; {_TURN_OFF_HINT}"
    if gpu.managed is False or gpu.concurrent_managed is False:
        missing = "managed memory" if gpu.managed is False else "managed memory that CPU and GPU can use concurrently"
        return f"{gpu.name} has no {missing}, which overflow requires; {_TURN_OFF_HINT}"
    return None


def _torch_problem(torch_state: TorchAllocatorFacts) -> str | None:
    if not torch_state.sees_gpu:
        return f"torch {torch_state.version} sees no GPU; install a CUDA build of torch, or {_TURN_OFF_HINT}"
    if parse_version(torch_state.version) < OLDEST_TORCH:
        oldest = version_text(OLDEST_TORCH)
        return f"torch {torch_state.version} is too old for overflow; install {oldest} or newer, or {_TURN_OFF_HINT}"
    if torch_state.backend != "native":
        remedy = "remove `backend` from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        return f"torch uses {torch_state.backend}, which has no pools; {remedy}"
    if torch_state.has_uvm_statistics:
        return f"this torch is patched and spills by itself (it has uvm.* statistics); use only one: {_TURN_OFF_HINT}"
    if torch_state.memory_fraction < 1.0:
        problem = f"a memory fraction of {torch_state.memory_fraction:g} is set for torch"
        return f"{problem}, which counts spilled memory as well; remove the fraction, or {_TURN_OFF_HINT}"
    return None


class HostCapacity:
    """Estimates how much managed memory the host could hold if all of it were moved to the host.

    The estimate has two upper bounds. Available plus allocated memory, which accounts for what other processes take.
    And the memory that was available when less was allocated, which accounts for memory that is allocated but not yet
    in the host. The plugin applies the same rule to what it can see itself.
    """

    def __init__(self) -> None:
        self._upper_bound: int | None = None

    def update(self, available: int, managed_bytes: int) -> int:
        """The estimate when `managed_bytes` are allocated and the host has `available` bytes left."""
        if self._upper_bound is None:
            self._upper_bound = available + managed_bytes  # where the first allocations reside is unknown
        self._upper_bound = max(self._upper_bound, available) if managed_bytes else available
        return min(self._upper_bound, available + managed_bytes)


def overflow_limits(settings: Settings, host: HostFacts, *, host_capacity: int | None) -> OverflowLimits:
    """The plugin's limits.

    `host_capacity` is the managed memory that the host, or this process's container, could hold. It does not include
    free GPU memory, although the kernel of a superchip counts that as host memory.
    """
    total = host.memory_total() or 0
    floor = settings.host_floor_gb * GIB if settings.host_floor_gb is not None else HOST_FLOOR_SHARE * total
    return OverflowLimits(
        ratio=settings.oversubscription_ratio,
        gpu_reserve_bytes=None if settings.gpu_reserve_gb is None else int(settings.gpu_reserve_gb * GIB),
        host_floor_bytes=int(floor),
        host_reserve_bytes=min(4 * GIB, max(256 * MIB, total // 64)),
        host_cap_bytes=host_capacity,
        meminfo=host.root / "proc/meminfo",
    )

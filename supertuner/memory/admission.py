"""Whether overflow can be had on this machine, and within which limits. Pure but for reading the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from supertuner.core.host import Host
from supertuner.core.types import GIB, MIB
from supertuner.memory.overflow import Limits

if TYPE_CHECKING:
    import torch

    from supertuner.config.memory import Overflow as Settings
    from supertuner.memory.probe import Facts

NAME: Final = "memory.overflow"
HOST_FLOOR_SHARE: Final = 0.10
"""Of host memory, where `host_floor_gb` is not set."""


def refusal(settings: Settings, facts: Facts, device: torch.device, fraction: float, own_keys: bool) -> str | None:
    """Why overflow cannot be had here, and what to do; None: nothing speaks against it.

    `fraction`: the share of GPU memory that torch was told to keep to. `own_keys`: torch has `uvm.*` statistics itself.
    """
    turn_off = f"set {NAME}.enabled to false"
    if not settings.enabled:
        return f"{NAME}.enabled is false"
    if device.type != "cuda":
        return f"the device is {device.type}, which has no second memory to spill from; {turn_off}"
    gpu = next((gpu.device for gpu in facts.gpus if gpu.device.number == (device.index or 0)), None)
    if gpu is None:
        return f"there is no GPU {device.index or 0} here ({facts.no_gpu_reason or 'not found'}); {turn_off}"
    if facts.one_pool:
        return f"CPU and GPU share one memory on {gpu.name}, so there is nowhere to spill to; {turn_off}"
    if gpu.managed is False or gpu.concurrent_managed is False:
        lacking = "managed memory" if gpu.managed is False else "managed memory that CPU and GPU use at once"
        return f"{gpu.name} has no {lacking}, without which GPU memory cannot be exceeded; {turn_off}"
    if fraction < 1.0:
        why = "which counts spilled memory as well"
        return f"a memory fraction of {fraction:g} is set for torch, {why}; remove the fraction, or {turn_off}"
    if own_keys:
        return f"this torch is patched and spills by itself (it has uvm.* statistics); use one of the two: {turn_off}"
    return None


def limits_of(settings: Settings, host: Host, *, managed_bytes: int = 0, on_gpu_bytes: int = 0) -> Limits:
    """The plugin's limits.

    `managed_bytes` live already: what the host has available is left beside them. `on_gpu_bytes` are free GPU memory
    that the kernel counts among the host's, as it does on a superchip whose GPU memory is a NUMA node.
    """
    total, available = host.memory_total() or 0, host.memory_available()
    floor = settings.host_floor_gb * GIB if settings.host_floor_gb is not None else HOST_FLOOR_SHARE * total
    return Limits(
        ratio=settings.oversubscription_ratio,
        gpu_reserve_bytes=None if settings.gpu_reserve_gb is None else int(settings.gpu_reserve_gb * GIB),
        host_floor_bytes=int(floor),
        host_reserve_bytes=min(4 * GIB, max(256 * MIB, total // 64)),
        host_cap_bytes=None if available is None else max(0, available - on_gpu_bytes) + managed_bytes,
        meminfo=host.root / "proc/meminfo",
    )

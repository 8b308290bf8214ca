"""`memory.overflow()`: the overflow allocator for the length of a `with` block, in any torch program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from supertuner.core.errors import MemoryEngineError
from supertuner.core.events import NullSink, Sink
from supertuner.core.host import HostFacts
from supertuner.core.types import GIB
from supertuner.memory.overflow_allocator.plugin import AccessPattern

if TYPE_CHECKING:
    import torch

    from supertuner.memory.overflow_allocator.pools import OverflowPools


@contextmanager
def overflow(
    limit_gib: float | None = None,
    *,
    device: int | torch.device = 0,
    host_floor_gib: float | None = None,
    oversubscription_ratio: float = 5.0,
    access_pattern: AccessPattern = "gpu_first",
    sink: Sink | None = None,
) -> Iterator[OverflowPools]:
    """Let torch allocate more than GPU memory inside the block: what does not fit becomes managed memory.

    Tensors that still exist after the block stay valid. The value of the `with` statement is the open pools:
    `reclaim_between_steps()` returns unused managed memory and is meant to be called after each optimizer step, and
    `stats()` returns the allocator's statistics.

    Args:
        limit_gib: GPU memory, in GiB, that allocations fill before they continue in managed memory. None: all but 5 %.
        device: The GPU.
        host_floor_gib: Host memory, in GiB, that stays free: an allocation that would leave less fails. None: 10 %.
        oversubscription_ratio: Hard limit of all allocated bytes, as a multiple of GPU memory.
        access_pattern: Preferred location of managed memory: the GPU ("gpu_first"), none ("balanced"), or the host
            ("cpu_first").
        sink: Receives decisions and warnings. None: they are discarded.

    Raises:
        MemoryEngineError: Overflow is not possible here, or gains nothing; the message contains the reason.
    """
    from supertuner.config.settings.memory import OverflowSettings
    from supertuner.memory.cuda import open_cuda
    from supertuner.memory.nvml import open_nvml
    from supertuner.memory.overflow_allocator.pools import open_overflow_pools
    from supertuner.memory.probe import probe_machine

    _require_sensible_limits(limit_gib, host_floor_gib, oversubscription_ratio)
    host, driver = HostFacts(), open_cuda()
    facts = probe_machine(host, driver, open_nvml())
    number = device if isinstance(device, int) else device.index or 0
    total_bytes = next((gpu.device.total_bytes for gpu in facts.gpus if gpu.device.number == number), 0)
    settings = OverflowSettings(
        enabled=True,
        oversubscription_ratio=oversubscription_ratio,
        access_pattern=access_pattern,
        gpu_reserve_gb=None if limit_gib is None else max(0.0, total_bytes / GIB - limit_gib),
        host_floor_gb=host_floor_gib,
    )
    with open_overflow_pools(settings, facts, host, sink or NullSink(), driver=driver, device=device) as pools:
        yield pools


def _require_sensible_limits(limit_gib: float | None, host_floor_gib: float | None, ratio: float) -> None:
    if limit_gib is not None and limit_gib <= 0:
        raise MemoryEngineError(f"memory.overflow: limit_gib is {limit_gib}; it must be above 0")
    if host_floor_gib is not None and host_floor_gib < 0:
        raise MemoryEngineError(f"memory.overflow: host_floor_gib is {host_floor_gib}; it must not be negative")
    if not 1 <= ratio <= 100:
        raise MemoryEngineError(f"memory.overflow: oversubscription_ratio is {ratio}; it must be between 1 and 100")

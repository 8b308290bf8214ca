"""torch's memory statistics of a GPU together with those of the overflow allocator, under the key names of the GH200
forks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supertuner.memory.driver import NotAvailable
from supertuner.memory.overflow_allocator.plugin import OverflowPlugin, OverflowStats, find_plugin

if TYPE_CHECKING:
    import torch

STAT_KEYS = {
    "stage": "stage",
    "entered": "transitions_in",
    "left": "transitions_out",
    "device_bytes": "device_bytes.current",
    "device_peak_bytes": "device_bytes.peak",
    "managed_bytes": "managed_bytes.current",
    "managed_peak_bytes": "managed_bytes.peak",
    "device_segments": "device_segments.current",
    "device_allocations": "device_segments.allocated",
    "managed_segments": "managed_segments.current",
    "managed_allocations": "managed_segments.allocated",
    "limit_bytes": "limit_bytes",
    "light_reclamations": "light_reclamations",
    "hard_reclamations": "hard_reclamations",
    "refused_ratio": "refusals.ratio",
    "refused_host": "refusals.host_floor",
    "refused_driver": "refusals.driver",
    "device_failures": "device_failures",
    "advice_failures": "advice_failures",
    "free_failures": "free_failures",
    "foreign_frees": "foreign_frees",
    "last_error": "last_error.code",
    "last_call": "last_error.call",
}
"""Field of `OverflowStats` → its key after `uvm.`."""


def stats(device: int | str | torch.device = 0) -> dict[str, int | float | str]:
    """`torch.cuda.memory_stats(device)` and the `uvm.*` keys; stage 0 means that overflow was not used.

    `device` is what torch's own function accepts; "cuda" is the current device. Keys that torch itself has take
    precedence. Without a built plugin there are no `uvm.*` keys.
    """
    import torch

    from supertuner.memory.overflow_allocator.admission import with_device_index

    torch_device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    number = with_device_index(torch_device).index
    figures: dict[str, int | float | str] = dict(torch.cuda.memory_stats(number)) if torch.cuda.is_available() else {}
    library = find_plugin()
    if isinstance(library, NotAvailable):
        return figures
    return {**uvm_stats(OverflowPlugin(library).stats(number)), **figures}


def uvm_stats(overflow_stats: OverflowStats) -> dict[str, int | float | str]:
    """The plugin's statistics under the keys of `stats()`."""
    return {f"uvm.{key}": getattr(overflow_stats, field) for field, key in STAT_KEYS.items()}

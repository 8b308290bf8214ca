"""The overflow allocator's plugin as Python sees it: found, given its limits, and asked for its statistics.

The plugin is a library of C that torch calls for each segment; `pools.py` routes torch to it. All of its state lives in
the library, once per process: opening it again gives the same account. Nothing here imports torch or touches a GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import ClassVar, Final, Literal, TypeAlias

from supertuner.memory.driver import MemoryKind, NotAvailable

AccessPattern: TypeAlias = Literal["gpu_first", "balanced", "cpu_first"]

FREE_SYMBOL: Final = "supertuner_free"
UNLIMITED: Final = (1 << 64) - 1
"""What the plugin takes for "not set"."""
_MAX_BYTES: Final = 1 << 63
"""More than any memory, and still a number to C."""
_STATISTICS_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class OverflowLimits:
    """What the plugin keeps to, for one GPU."""

    ratio: float = 5.0
    """Live bytes, device and managed, as a multiple of GPU memory."""
    gpu_reserve_bytes: int | None = None
    """GPU memory that stays free; None: 5 % of it."""
    host_floor_bytes: int = 0
    """Host memory that stays free."""
    host_reserve_bytes: int = 1 << 30
    """Managed memory that may be handed out between two looks at the host's free memory."""
    host_cap_bytes: int | None = None
    """What this process's container could hold of managed memory; None: it is in none."""
    meminfo: Path = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class OverflowStats:
    """The plugin's account of one GPU since the process began."""

    stage: int
    """1: device memory is given; 2: managed memory is. 0: nothing was asked for yet."""
    entered: int
    """How often stage 2 began …"""
    left: int
    """… and ended."""
    total_bytes: int
    free_bytes: int
    """Of the GPU, when the plugin last asked."""
    reserve_bytes: int
    margin_bytes: int
    limit_bytes: int
    device_bytes: int
    device_peak_bytes: int
    device_segments: int
    device_allocations: int
    managed_bytes: int
    managed_peak_bytes: int
    managed_segments: int
    managed_allocations: int
    frees: int
    foreign_frees: int
    """Pointers that the plugin was asked to free and had not given; ignored."""
    refused_ratio: int
    refused_host: int
    refused_driver: int
    """Refusals by reason: the oversubscription ratio, the floor of host memory, the driver."""
    device_failures: int
    """Device memory that the driver refused although it had called it free; managed memory was tried instead."""
    advice_failures: int
    free_failures: int
    light_reclamations: int
    hard_reclamations: int
    host_floor_bytes: int
    host_room_bytes: int
    host_looks: int
    last_error: int
    """The driver's code for the last call that failed, -1 for an error of our own, 0 for none."""
    last_call: str

    @property
    def refusals(self) -> int:
        return self.refused_ratio + self.refused_host + self.refused_driver


class _CStatistics(ctypes.Structure):
    """`struct statistics` of _overflow.c."""

    _fields_: ClassVar = [
        ("version", ctypes.c_uint32), ("size", ctypes.c_uint32),
        ("stage", ctypes.c_int32), ("last_error", ctypes.c_int32),
        ("last_call", ctypes.c_char * 32),
        *((name, ctypes.c_uint64) for name in (
            "total_bytes", "free_bytes", "reserve_bytes", "margin_bytes", "limit_bytes",
            "device_bytes", "managed_bytes", "device_peak_bytes", "managed_peak_bytes",
            "device_segments", "managed_segments", "device_allocations", "managed_allocations",
            "entered", "left", "frees", "foreign_frees",
            "refused_ratio", "refused_host", "refused_driver", "device_failures", "advice_failures", "free_failures",
            "light_reclamations", "hard_reclamations", "host_floor_bytes", "host_room_bytes", "host_looks",
        )),
    ]  # fmt: skip


class OverflowPlugin:
    """The plugin in this process. It is never unloaded: torch frees through it to the end."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._library = ctypes.CDLL(str(library))
        self._library.supertuner_overflow_kind.argtypes = (ctypes.c_void_p,)

    def configure(self, limits: OverflowLimits, device: int = 0) -> None:
        """Limits hold from the next segment on; what lives already stays."""
        reserve = UNLIMITED if limits.gpu_reserve_bytes is None else min(limits.gpu_reserve_bytes, _MAX_BYTES)
        status = self._library.supertuner_overflow_configure(
            device, ctypes.c_double(limits.ratio), ctypes.c_uint64(reserve)
        )
        assert status == 0, f"device {device}, ratio {limits.ratio}"
        assert len(str(limits.meminfo)) < 256, limits.meminfo
        cap = UNLIMITED if limits.host_cap_bytes is None else limits.host_cap_bytes
        floor = min(limits.host_floor_bytes, _MAX_BYTES)
        sizes = (ctypes.c_uint64(size) for size in (floor, limits.host_reserve_bytes, cap))
        self._library.supertuner_overflow_host(*sizes, str(limits.meminfo).encode())

    def stats(self, device: int = 0) -> OverflowStats:
        raw = _CStatistics()
        status = self._library.supertuner_overflow_statistics(
            device, ctypes.byref(raw), ctypes.c_size_t(ctypes.sizeof(raw))
        )
        assert status == 0 and raw.version == _STATISTICS_VERSION, (
            "the plugin was built from other sources than this file"
        )
        values = {name: getattr(raw, name) for name in OverflowStats.__slots__}
        return OverflowStats(**{**values, "last_call": raw.last_call.decode("ascii", "replace")})

    def segment_kind(self, segment: int) -> MemoryKind | None:
        """What the segment that begins at this address is; None: none of the plugin's begins there."""
        return {0: MemoryKind.DEVICE, 1: MemoryKind.MANAGED}.get(self._library.supertuner_overflow_kind(segment))

    def count_reclamations(self, light: int = 0, hard: int = 0, device: int = 0) -> None:
        """Count what was given back, beside what was handed out."""
        self._library.supertuner_overflow_reclaimed(device, ctypes.c_uint64(light), ctypes.c_uint64(hard))


def alloc_symbol(pattern: AccessPattern) -> str:
    """The function of the plugin that gives memory of this access pattern."""
    return f"supertuner_alloc_{pattern}"


def find_plugin() -> Path | NotAvailable:
    """The plugin, if it was built when the package was installed."""
    this_file = Path(__file__)
    candidates = (
        path for suffix in EXTENSION_SUFFIXES if (path := this_file.with_name(f"_overflow{suffix}")).is_file()
    )
    reason = "the overflow allocator was not built: install a C compiler (gcc), then run `pip install -e .` again"
    return next(candidates, None) or NotAvailable(reason)

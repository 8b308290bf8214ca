"""Python's view of the overflow allocator plugin: finding it, setting its limits, and reading its statistics.

The plugin is a C library that torch calls for each segment; `pools.py` routes torch to it. Its state belongs to the
library, once per process: opening it again gives the same account. This file imports no torch and uses no GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import ClassVar, Final, Literal, TypeAlias

from supertuner.memory.driver import MemoryKind, NotAvailable

AccessPattern: TypeAlias = Literal["gpu_first", "balanced", "cpu_first"]

UNLIMITED: Final = (1 << 64) - 1
"""The plugin's value for "not set"."""
_MAX_BYTES: Final = 1 << 63
"""Larger than any memory, and still representable in C."""
_STATISTICS_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class OverflowLimits:
    """The plugin's limits for one GPU."""

    ratio: float = 5.0
    """Maximum live bytes, device plus managed, as a multiple of GPU memory."""
    gpu_reserve_bytes: int | None = None
    """GPU memory that stays free; None: 5 % of it."""
    host_floor_bytes: int = 0
    """Host memory that stays free."""
    host_reserve_bytes: int = 1 << 30
    """Managed memory that may be allocated between two readings of the host's available memory."""
    host_cap_bytes: int | None = None
    """Managed memory that this process's container could hold; None: no container."""
    meminfo: Path = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class OverflowStats:
    """The plugin's statistics of one GPU since the process started, in the order of `struct statistics`."""

    stage: int
    """1: the plugin allocates device memory; 2: managed memory; 0: no request yet."""
    last_error: int
    """The driver's code of the last failed call, -1 for an error of the plugin itself, 0 for none."""
    last_call: str
    total_bytes: int
    free_bytes: int
    """Free GPU memory at the plugin's last query."""
    reserve_bytes: int
    margin_bytes: int
    limit_bytes: int
    device_bytes: int
    managed_bytes: int
    device_peak_bytes: int
    managed_peak_bytes: int
    device_segments: int
    managed_segments: int
    device_allocations: int
    managed_allocations: int
    entered: int
    """How often stage 2 began."""
    left: int
    """How often stage 2 ended."""
    frees: int
    foreign_frees: int
    """Requests to free pointers that the plugin had not allocated; ignored."""
    refused_ratio: int
    refused_host: int
    refused_driver: int
    """Refusals by reason: oversubscription ratio, host memory floor, driver."""
    device_failures: int
    """Device allocations that failed although the driver had reported enough free memory; managed memory was tried
    instead.
    """
    advice_failures: int
    free_failures: int
    light_reclamations: int
    hard_reclamations: int
    host_floor_bytes: int
    host_room_bytes: int
    host_looks: int

    @property
    def refusals(self) -> int:
        return self.refused_ratio + self.refused_host + self.refused_driver


class _CStatistics(ctypes.Structure):
    """`struct statistics` of _overflow.c."""

    _fields_: ClassVar = [
        ("version", ctypes.c_uint32), ("size", ctypes.c_uint32),
        ("stage", ctypes.c_int32), ("last_error", ctypes.c_int32),
        ("last_call", ctypes.c_char * 32),
        *((field.name, ctypes.c_uint64) for field in fields(OverflowStats)[3:]),
    ]  # fmt: skip


class OverflowPlugin:
    """The plugin in this process. It is never unloaded, because torch frees memory through it until the
    process ends.
    """

    def __init__(self, library: Path) -> None:
        self.library = library
        self._library = ctypes.CDLL(str(library))
        self._library.supertuner_overflow_kind.argtypes = (ctypes.c_void_p,)

    def symbols(self, pattern: AccessPattern) -> tuple[str, str]:
        """The names of its functions that allocate, for this access pattern, and free."""
        return f"supertuner_alloc_{pattern}", "supertuner_free"

    def configure(self, limits: OverflowLimits, device: int = 0) -> None:
        """Set the limits. They apply from the next segment on; existing segments stay."""
        reserve = UNLIMITED if limits.gpu_reserve_bytes is None else min(limits.gpu_reserve_bytes, _MAX_BYTES)
        ratio = ctypes.c_double(limits.ratio)
        status = self._library.supertuner_overflow_configure(device, ratio, ctypes.c_uint64(reserve))
        assert status == 0, f"device {device}, ratio {limits.ratio}"
        assert len(str(limits.meminfo)) < 256, limits.meminfo
        cap = UNLIMITED if limits.host_cap_bytes is None else limits.host_cap_bytes
        floor = min(limits.host_floor_bytes, _MAX_BYTES)
        sizes = (ctypes.c_uint64(size) for size in (floor, limits.host_reserve_bytes, cap))
        self._library.supertuner_overflow_host(*sizes, str(limits.meminfo).encode())

    def stats(self, device: int = 0) -> OverflowStats:
        raw = _CStatistics()
        size = ctypes.c_size_t(ctypes.sizeof(raw))
        status = self._library.supertuner_overflow_statistics(device, ctypes.byref(raw), size)
        assert status == 0 and raw.version == _STATISTICS_VERSION, "the plugin was built from another source"
        values = {field.name: getattr(raw, field.name) for field in fields(OverflowStats)}
        return OverflowStats(**{**values, "last_call": raw.last_call.decode("ascii", "replace")})

    def segment_kind(self, segment: int) -> MemoryKind | None:
        """The kind of the plugin's segment that begins at this address; None if there is none."""
        return {0: MemoryKind.DEVICE, 1: MemoryKind.MANAGED}.get(self._library.supertuner_overflow_kind(segment))

    def count_reclamations(self, light: int = 0, hard: int = 0, device: int = 0) -> None:
        """Add reclamations to the statistics."""
        self._library.supertuner_overflow_reclaimed(device, ctypes.c_uint64(light), ctypes.c_uint64(hard))


def find_plugin() -> Path | NotAvailable:
    """The path of the plugin, if it was built when the package was installed."""
    candidates = (Path(__file__).with_name(f"_overflow{suffix}") for suffix in EXTENSION_SUFFIXES)
    reason = "the overflow allocator was not built: install a C compiler (gcc), then run `pip install -e .` again"
    return next((path for path in candidates if path.is_file()), None) or NotAvailable(reason)

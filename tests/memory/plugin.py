"""Calls the overflow allocator as torch does, each time with separate state."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from supertuner.memory.driver import NotAvailable
from supertuner.memory.overflow_allocator.plugin import (
    AccessPattern,
    OverflowLimits,
    OverflowPlugin,
    OverflowStats,
    find_plugin,
)

PLENTY_KIB = 1 << 40


class PluginCopy:
    """A fresh copy of the library. Its state belongs to the library, so a copy starts at zero."""

    def __init__(self, limits: OverflowLimits | None = None, device: int = 0) -> None:
        library = find_plugin()
        if isinstance(library, NotAvailable):
            pytest.skip(library.reason)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copy(library, folder))
            self.overflow = OverflowPlugin(copy)
            self._c = ctypes.CDLL(str(copy))
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder)
        self.meminfo = Path(folder) / "meminfo"
        self.set_host_available(PLENTY_KIB << 10)
        self._limits = replace(limits or OverflowLimits(), meminfo=self.meminfo)
        self.overflow.configure(self._limits, device)
        self._free = getattr(self._c, self.overflow.symbols("gpu_first")[1])
        self._free.restype = None
        self._free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

    def set_host_available(self, available_bytes: int) -> None:
        """Set the available memory in the plugin's meminfo file."""
        self.meminfo.write_text(
            f"MemTotal:       {1 << 50} kB\nMemFree:              1 kB\nMemAvailable:   {available_bytes >> 10} kB\n"
        )

    def change_limits(self, **changes: object) -> None:
        self._limits = replace(self._limits, **changes)  # type: ignore[arg-type]
        self.overflow.configure(self._limits)

    def alloc(self, nbytes: int, pattern: AccessPattern = "gpu_first", device: int = 0) -> int | None:
        """The address of a new segment; None if refused, which torch raises as OutOfMemoryError."""
        function = getattr(self._c, self.overflow.symbols(pattern)[0])
        function.restype = ctypes.c_void_p
        function.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        address: int | None = function(nbytes, device, None)
        return address

    def free(self, address: int | None, nbytes: int = 0, device: int = 0) -> None:
        self._free(address, nbytes, device, None)

    def stats(self, device: int = 0) -> OverflowStats:
        return self.overflow.stats(device)

"""CUPTI's unified-memory counters for one GPU: bytes that managed memory migrated, and page faults of CPU and GPU.

Uses CUPTI's activity API: the library fills our buffers with records, and we add them up. CUPTI is opened only on
request, because a process has only one such client: a client that registers later (torch.profiler) receives the records
instead.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from supertuner.memory.driver import NotAvailable

LIBRARIES: Final = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")
KIND_UNIFIED_MEMORY_COUNTER: Final = 25
SCOPE_ONE_DEVICE: Final = 1
COUNTERS: Final = {1: "to_device_bytes", 2: "to_host_bytes", 3: "cpu_faults", 4: "gpu_fault_groups"}
"""CUpti_ActivityUnifiedMemoryCounterKind → the name of our figure."""
EVENT_COUNTERS: Final = ("cpu_faults",)
"""Counters whose records are one event each; their value field holds something else (the program counter)."""
BUFFER_BYTES: Final = 1 << 18
FLUSH_FORCED: Final = 1


class _CounterConfig(ctypes.Structure):
    """CUpti_ActivityUnifiedMemoryCounterConfig."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("scope", "kind", "device", "enable"))


_SIZE_POINTER = ctypes.POINTER(ctypes.c_size_t)
BufferRequestedCallback = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), _SIZE_POINTER, _SIZE_POINTER)
BufferCompletedCallback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


def record_bytes(version: int) -> int | None:
    """The length of a counter record in this version of CUPTI's interface; None if the version is unknown.

    Versions run from 18 (CUDA 11.8) to 28; since CUDA 13 they have the form 130001. CUDA 12.8 appended five numbers to
    the record, after the fields that we read.
    """
    if 18 <= version < 26:
        return 64
    return 104 if 26 <= version <= 28 or 130000 <= version < 140000 else None


def open_cupti(device: int = 0, libraries: Sequence[str] = LIBRARIES) -> CuptiCounters | NotAvailable:
    """Start counting for this GPU; or return why that is not possible. The CUDA driver must be initialised."""
    library = _load_library(libraries)
    if library is None:
        return NotAvailable(f"no CUPTI ({libraries[0]}) on this machine")
    version = ctypes.c_uint32()
    library.cuptiGetVersion(ctypes.byref(version))
    length = record_bytes(version.value)
    if length is None:
        return NotAvailable(f"CUPTI's interface has version {version.value}, which SuperTuner does not know")
    cupti = CuptiCounters(library, length)
    problem = cupti.start(device)
    return cupti if problem is None else NotAvailable(problem)


class CuptiCounters:
    """Counters of managed memory. `sample` returns the change since the last one."""

    def __init__(self, library: ctypes.CDLL, record_length: int) -> None:
        self._library: Any = library
        fields = [("kind", "u4"), ("counter", "u4"), ("value", "u8"), ("rest", f"V{record_length - 16}")]
        self._record_dtype = np.dtype(fields)
        self._lock = threading.Lock()
        self._buffers: dict[int, ctypes.Array[ctypes.c_uint64]] = {}
        self._totals = dict.fromkeys(COUNTERS.values(), 0)
        self._unread_bytes = 0
        self._open = False
        requested, completed = self._on_buffer_requested, self._on_buffer_completed
        self._callbacks = (BufferRequestedCallback(requested), BufferCompletedCallback(completed))

    def start(self, device: int) -> str | None:
        """Register, configure and enable the counters; return CUPTI's text for the first error, or None."""
        configs = [_CounterConfig(SCOPE_ONE_DEVICE, kind, device, 1) for kind in COUNTERS]
        steps: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("cuptiActivityRegisterCallbacks", self._callbacks),
            ("cuptiActivityConfigureUnifiedMemoryCounter", ((_CounterConfig * len(configs))(*configs), len(configs))),
            ("cuptiActivityEnable", (KIND_UNIFIED_MEMORY_COUNTER,)),
        )
        # CUPTI cannot unregister callbacks: from here on they must outlive this object, or a later call uses freed
        # memory.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._callbacks))
        self._open = True
        for name, arguments in steps:
            code = getattr(self._library, name)(*arguments)
            if code != 0:
                self._open = False
                return f"{name}: {self._error_text(code)}"
        return None

    def sample(self) -> dict[str, int]:
        """Counts since the last sample. Records that could not be read appear as `unread_bytes`."""
        self._library.cuptiActivityFlushAll(0)
        with self._lock:
            totals, self._totals = self._totals, dict.fromkeys(COUNTERS.values(), 0)
            if self._unread_bytes:
                totals["unread_bytes"], self._unread_bytes = self._unread_bytes, 0
        return totals

    def close(self) -> None:
        """Stop counting and collect the buffers."""
        self._library.cuptiActivityDisable(KIND_UNIFIED_MEMORY_COUNTER)
        self._library.cuptiActivityFlushAll(FLUSH_FORCED)
        self._open = False

    def _on_buffer_requested(self, buffer: Any, size: Any, most_records: Any) -> None:
        """CUPTI requests a buffer. After `close` it receives none and drops its records."""
        most_records[0] = 0
        if not self._open:
            buffer[0], size[0] = None, 0
            return
        memory = (ctypes.c_uint64 * (BUFFER_BYTES // 8))()
        with self._lock:
            self._buffers[ctypes.addressof(memory)] = memory
        buffer[0], size[0] = ctypes.addressof(memory), BUFFER_BYTES

    def _on_buffer_completed(self, context: int | None, stream: int, buffer: int, size: int, valid_bytes: int) -> None:
        """CUPTI has filled a buffer, whose first `valid_bytes` bytes are records."""
        with self._lock:
            memory = self._buffers.pop(buffer, None)
            if memory is None:  # a buffer of another client
                return
            count, rest = divmod(valid_bytes, self._record_dtype.itemsize)
            records = np.frombuffer(memoryview(memory).cast("B"), self._record_dtype, count)
            if rest or (records["kind"] != KIND_UNIFIED_MEMORY_COUNTER).any():
                # Another client enabled other records, whose lengths differ, so nothing in this buffer can be
                # interpreted.
                self._unread_bytes += valid_bytes
                return
            for kind, name in COUNTERS.items():
                values = records["value"][records["counter"] == kind]
                self._totals[name] += len(values) if name in EVENT_COUNTERS else int(values.sum())

    def _error_text(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuptiGetResultString(code, ctypes.byref(text))
        return f"error {code}" if text.value is None else text.value.decode()


def _load_library(names: Sequence[str]) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue  # not available under this name
    return None

"""Reads NVIDIA's management library: names and limits once; memory, power and clocks on every sample.

Read-only. Every value may be missing: no library, no driver behind it, or a GPU that does not report it (GB10's
memory). A missing value is None or absent, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from supertuner.memory.driver import NotAvailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NvmlGpuFacts:
    """A GPU as NVML describes it, in NVML's order, which is not always the driver's."""

    index: int
    name: str | None
    uuid: str | None
    """Such as `GPU-2dee1e25-b3b5-007e-2b55-79f2d0f2ebe5`: the same text as `DeviceProperties.uuid`."""
    total_bytes: int | None
    """None on GB10, which has no separate GPU memory."""
    sm_clock_limit_mhz: int | None
    power_limit_w: float | None


def open_nvml() -> NvmlLibrary | NotAvailable:
    """Open the library; or return why it is not available."""
    try:
        import pynvml
    except ImportError:
        return NotAvailable("nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return NotAvailable("no NVML (libnvidia-ml.so.1) on this machine")
    except pynvml.NVMLError_DriverNotLoaded:
        return NotAvailable("NVML is installed, but the NVIDIA kernel driver is not loaded")
    except pynvml.NVMLError as error:
        return NotAvailable(f"NVML does not start: {error}")
    return NvmlLibrary(pynvml)


class NvmlLibrary:
    """NVML, open until `close`. A query that a GPU does not support is sent once and then dropped."""

    def __init__(self, library: ModuleType) -> None:
        self._library: Any = library
        indices = range(self._query(library.nvmlDeviceGetCount) or 0)
        handles = {index: self._query(library.nvmlDeviceGetHandleByIndex, index) for index in indices}
        self._handles = {index: handle for index, handle in handles.items() if handle is not None}
        self._queries = {index: self._gauge_queries(handle) for index, handle in self._handles.items()}

    def driver_version(self) -> str | None:
        """Version of the kernel driver, such as 580.95.05."""
        return _as_text(self._query(self._library.nvmlSystemGetDriverVersion))

    def gpus(self) -> tuple[NvmlGpuFacts, ...]:
        """The GPUs that can be opened. A GPU that fell off the bus is not among them."""
        return tuple(self._describe(index, handle) for index, handle in self._handles.items())

    def sample(self, index: int) -> dict[str, float]:
        """Current gauges of the GPU with this NVML index. Values that it does not report are absent."""
        gauges: dict[str, float] = {}
        for name, query in tuple(self._queries.get(index, {}).items()):
            try:
                gauges.update(query())
            except (self._library.NVMLError_NotSupported, self._library.NVMLError_FunctionNotFound):
                del self._queries[index][name]
            except self._library.NVMLError:
                # Lost, reset or not permitted at the moment: no figure in this sample, and training does not need one.
                continue
        return gauges

    def close(self) -> None:
        self._library.nvmlShutdown()

    def _describe(self, index: int, handle: object) -> NvmlGpuFacts:
        query, library = self._query, self._library
        memory = query(library.nvmlDeviceGetMemoryInfo, handle)
        power_mw = query(library.nvmlDeviceGetEnforcedPowerLimit, handle)
        return NvmlGpuFacts(
            index=index,
            name=_as_text(query(library.nvmlDeviceGetName, handle)),
            uuid=_as_text(query(library.nvmlDeviceGetUUID, handle)),
            total_bytes=None if memory is None else int(memory.total),
            sm_clock_limit_mhz=query(library.nvmlDeviceGetMaxClockInfo, handle, library.NVML_CLOCK_SM),
            power_limit_w=None if power_mw is None else power_mw / 1000,
        )

    def _gauge_queries(self, handle: object) -> dict[str, Callable[[], Mapping[str, float]]]:
        """The queries of `sample`, each returning its figures."""
        library = self._library

        def memory() -> dict[str, float]:
            answer = library.nvmlDeviceGetMemoryInfo(handle)
            return {"used_bytes": int(answer.used), "free_bytes": int(answer.free)}

        def busy() -> dict[str, float]:
            answer = library.nvmlDeviceGetUtilizationRates(handle)
            return {"gpu_busy_percent": int(answer.gpu), "memory_busy_percent": int(answer.memory)}

        return {
            "memory": memory,
            "busy": busy,
            "power": lambda: {"power_w": library.nvmlDeviceGetPowerUsage(handle) / 1000},
            "clock": lambda: {"sm_clock_mhz": library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)},
            "heat": lambda: {"temperature_c": library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)},
        }

    def _query(self, function: Callable[..., T], *arguments: object) -> T | None:
        try:
            return function(*arguments)
        except self._library.NVMLError:
            # Not supported, lost or not permitted: the value is unknown in every case.
            return None


def _as_text(answer: str | bytes | None) -> str | None:
    """Some versions of the bindings return bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer

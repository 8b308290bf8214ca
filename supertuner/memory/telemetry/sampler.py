"""Samples memory figures during a run from every source that answers and emits them as one `memory` event per sample.

A figure that this machine does not provide is absent, never zero. `emit` limits its own rate: telemetry takes at most
half a percent of wall-clock time, measured with the sinks behind it, however slow a source or a sink is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from supertuner.core.closing import CloseOnExit
from supertuner.core.events import MEMORY_MEASUREMENT, MeasurementEvent, Sink
from supertuner.core.host import HostFacts
from supertuner.memory.driver import Driver, DriverError, NotAvailable
from supertuner.memory.nvml import NvmlLibrary
from supertuner.memory.probe import MachineFacts
from supertuner.memory.telemetry.cupti import CuptiCounters
from supertuner.memory.telemetry.kernel_counters import CounterSource, HostMemorySource, NumaNodeSource

if TYPE_CHECKING:
    import torch

MAX_TIME_SHARE: Final = 0.005
"""Upper bound on the share of wall-clock time that telemetry takes, on average."""

NO_CUPTI: Final = NotAvailable("CUPTI was not requested")

FigureValue: TypeAlias = int | float | str
TelemetryFigures: TypeAlias = dict[str, FigureValue]


@dataclass(frozen=True, slots=True, eq=False)
class GpuTelemetry:
    """The GPU to sample and the libraries that report on it. A library that is `NotAvailable` adds no figures."""

    driver: Driver | NotAvailable
    nvml: NvmlLibrary | NotAvailable
    cupti: CuptiCounters | NotAvailable = NO_CUPTI
    device: int = 0
    """The number that the CUDA driver gives the GPU."""
    torch_device: torch.device | None = None
    """Where torch's allocator is sampled; None, or a device that is not CUDA: nowhere."""


class MemorySampler(CloseOnExit):
    """Memory telemetry of one process and its GPU. Not valid after a fork: a child process creates its own.

    `overflow` returns the allocator's statistics, of which the keys that begin with `uvm.` are used. `hints` returns
    the number of hint outcomes by status.
    """

    def __init__(
        self,
        facts: MachineFacts,
        host: HostFacts,
        gpu: GpuTelemetry,
        *,
        overflow: Callable[[], Mapping[str, Any]] | None = None,
        hints: Callable[[], Mapping[str, int]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        driver, nvml, cupti, torch_device = gpu.driver, gpu.nvml, gpu.cupti, gpu.torch_device
        self._kernel_sources = (HostMemorySource(host), CounterSource(host), NumaNodeSource(host, facts.nodes))
        sources: list[Callable[[], Mapping[str, FigureValue]]] = [*self._kernel_sources]
        if not isinstance(driver, NotAvailable):
            sources.append(partial(_driver_figures, driver, gpu.device))
        if torch_device is not None and torch_device.type == "cuda":
            sources.append(partial(_torch_figures, torch_device))
        if overflow is not None:
            sources.append(lambda: _overflow_figures(overflow()))
        if hints is not None:
            sources.append(lambda: _with_prefix("hints", hints()))
        nvml_gpu = next((known.nvml for known in facts.gpus if known.device.number == gpu.device), None)
        if not isinstance(nvml, NotAvailable) and nvml_gpu is not None:
            sources.append(lambda: _with_prefix("nvml", nvml.sample(nvml_gpu.index)))
        if not isinstance(cupti, NotAvailable):
            sources.append(lambda: _with_prefix("cupti", cupti.sample()))
        self._sources = sources
        self._clock = clock
        self._next_emit_s: float | None = None
        self._constant_figures: TelemetryFigures = {f"uvm_driver.{k}": v for k, v in facts.uvm_parameters.items()}
        """Parameters of the kernel module do not change, so only the first event carries them."""

    def sample(self) -> TelemetryFigures:
        """All current figures. Counters report the change since the last sample, or since the sampler was created."""
        figures: TelemetryFigures = {}
        for source in self._sources:
            figures.update(source())
        return figures

    def emit(self, sink: Sink, step: int) -> bool:
        """Send one `memory` event for `step` and return True.

        Returns False without sampling while the time that the last event took still exceeds its share
        (`MAX_TIME_SHARE`).
        """
        start_s = self._clock()
        if self._next_emit_s is not None and start_s < self._next_emit_s:
            return False
        figures, self._constant_figures = self._constant_figures | self.sample(), {}
        figures["telemetry.sample_s"] = self._clock() - start_s
        sink.emit(MeasurementEvent(MEMORY_MEASUREMENT, {"step": step, **figures}))
        end_s = self._clock()
        self._next_emit_s = end_s + (end_s - start_s) * (1 / MAX_TIME_SHARE - 1)
        return True

    def close(self) -> None:
        for source in self._kernel_sources:
            source.close()


def _driver_figures(driver: Driver, device: int) -> TelemetryFigures:
    try:
        return {"gpu.free_bytes": driver.free_bytes(device)}
    except DriverError:
        return {}  # The driver does not report it, now or ever: training continues without the figure.


def _torch_figures(device: torch.device) -> TelemetryFigures:
    """Figures of torch's caching allocator. Uses the nested form: the flat one sorts 200 names per call."""
    import torch

    stats = torch.cuda.memory_stats_as_nested_dict(device)
    figures: TelemetryFigures = {}
    for name, field in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes")):
        totals = stats.get(field, {}).get("all")
        if totals is not None:
            figures[f"torch.{name}_bytes"] = totals["current"]
            figures[f"torch.{name}_peak_bytes"] = totals["peak"]
    if "num_alloc_retries" in stats:
        figures["torch.alloc_retries"] = stats["num_alloc_retries"]
    return figures


def _overflow_figures(stats: Mapping[str, Any]) -> TelemetryFigures:
    """The `uvm.*` keys of all statistics. A value that the allocator does not know is None there, and is left out."""
    uvm_items = ((name, value) for name, value in stats.items() if name.startswith("uvm."))
    return {name: value for name, value in uvm_items if isinstance(value, int | float | str)}


def _with_prefix(prefix: str, figures: Mapping[str, float]) -> TelemetryFigures:
    return {f"{prefix}.{name}": value for name, value in figures.items()}

"""How memory is doing while a run goes on: figures from whoever answers, as one `memory` event at a time.

A figure that this machine does not give is absent, never zero. `emit` rations itself: measured with the sinks behind
it, telemetry takes at most half a percent of the time, however slow a source or a sink is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from supertuner.core.events import MEMORY_MEASUREMENT, MeasurementEvent, Sink
from supertuner.core.host import HostFacts
from supertuner.memory.driver import Driver, Missing, Refused
from supertuner.memory.probe import Facts
from supertuner.memory.telemetry.cupti import Cupti
from supertuner.memory.telemetry.kernel_counters import Faults, HostMemory, Migrations, Nodes
from supertuner.memory.telemetry.nvml import Nvml

if TYPE_CHECKING:
    import torch

SHARE: Final = 0.005
"""Of wall-clock time, at most, on average."""

NO_CUPTI: Final = Missing("CUPTI was not asked for")

Value: TypeAlias = int | float | str
Figures: TypeAlias = dict[str, Value]


class Source(Protocol):
    """Gives figures when called; `close` lets go of what it holds."""

    def __call__(self) -> Mapping[str, Value]: ...

    def close(self) -> None: ...


class Sampler:
    """Telemetry of one process and its GPU. Not for other processes: a forked child makes its own.

    `overflow` gives the allocator's statistics (keys that begin with `uvm.` are taken), `hints` counts of outcomes by
    name. NVML and CUPTI are used where they are handed over and answer.
    """

    def __init__(
        self,
        facts: Facts,
        host: HostFacts,
        driver: Driver | Missing,
        nvml: Nvml | Missing,
        cupti: Cupti | Missing = NO_CUPTI,
        *,
        device: int = 0,
        torch_device: torch.device | None = None,
        overflow: Callable[[], Mapping[str, Any]] | None = None,
        hints: Callable[[], Mapping[str, int]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        sources: list[Source] = [HostMemory(host), Faults(), Migrations(host), Nodes(host, facts.nodes)]
        if not isinstance(driver, Missing):
            sources.append(_Asked(lambda: _free_by_driver(driver, device)))
        if torch_device is not None and torch_device.type == "cuda":
            sources.append(_Asked(lambda: _by_torch(torch_device)))
        if overflow is not None:
            sources.append(_Asked(lambda: _allocator(overflow())))
        if hints is not None:
            sources.append(_Asked(lambda: _named("hints", hints())))
        index = _nvml_index(facts, device)
        if not isinstance(nvml, Missing) and index is not None:
            sources.append(_Asked(lambda: _named("nvml", nvml.sample(index))))
        if not isinstance(cupti, Missing):
            sources.append(_Asked(lambda: _named("cupti", cupti.sample())))
        self._sources = sources
        self._clock = clock
        self._due: float | None = None
        self._first: Figures = {f"uvm_driver.{name}": value for name, value in facts.uvm_parameters.items()}
        """Parameters of the driver do not change: they come once, with the first event."""

    def sample(self) -> Figures:
        """All figures, as of now. Counters say what happened since the last sample, or since the sampler was made."""
        found: Figures = {}
        for source in self._sources:
            found.update(source())
        return found

    def emit(self, sink: Sink, step: int) -> bool:
        """Send one `memory` event for `step`, unless the last one cost so much that it is not yet paid for."""
        began = self._clock()
        if self._due is not None and began < self._due:
            return False
        figures, self._first = self._first | self.sample(), {}
        figures["telemetry.sample_s"] = self._clock() - began
        sink.emit(MeasurementEvent(MEMORY_MEASUREMENT, {"step": step, **figures}))
        ended = self._clock()
        self._due = ended + (ended - began) * (1 / SHARE - 1)
        return True

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Asked:
    """A source that holds nothing."""

    def __init__(self, ask: Callable[[], Mapping[str, Value]]) -> None:
        self._ask = ask

    def __call__(self) -> Mapping[str, Value]:
        return self._ask()

    def close(self) -> None:
        pass


def _free_by_driver(driver: Driver, device: int) -> Figures:
    try:
        return {"gpu.free_bytes": driver.free_bytes(device)}
    except Refused:
        return {}  # a driver that does not say, now or ever: training goes on without the figure


def _by_torch(device: torch.device) -> Figures:
    """What torch's allocator holds. From the nested form: the flat one sorts some two hundred names at each call."""
    import torch

    stats = torch.cuda.memory_stats_as_nested_dict(device)
    found: Figures = {}
    for name, field in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes")):
        whole = stats.get(field, {}).get("all")
        if whole is not None:
            found[f"torch.{name}_bytes"] = whole["current"]
            found[f"torch.{name}_peak_bytes"] = whole["peak"]
    if "num_alloc_retries" in stats:
        found["torch.alloc_retries"] = stats["num_alloc_retries"]
    return found


def _allocator(stats: Mapping[str, Any]) -> Figures:
    """The overflow allocator's own figures out of all statistics; what it does not know is None there."""
    chosen = ((name, value) for name, value in stats.items() if name.startswith("uvm."))
    return {name: value for name, value in chosen if isinstance(value, int | float | str)}


def _named(prefix: str, figures: Mapping[str, float]) -> Figures:
    return {f"{prefix}.{name}": value for name, value in figures.items()}


def _nvml_index(facts: Facts, device: int) -> int | None:
    known = (gpu.nvml.index for gpu in facts.gpus if gpu.device.number == device and gpu.nvml is not None)
    return next(known, None)

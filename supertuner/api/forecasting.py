"""Forecasts and plans a run on a machine. Everything is modelled: no weights, no staged data and no GPU are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supertuner.config.sources.load import LoadedConfig
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.core.interrupts import interrupts_win
from supertuner.core.types import JSON
from supertuner.plan.forecast.forecast_store import cached_forecast
from supertuner.plan.forecast.results import EstimateOptions, RunForecast
from supertuner.plan.forecast.target_machine import find_machine_capacity
from supertuner.plan.placement.plan import MemoryPlan
from supertuner.sinks.console import ConsoleSink

if TYPE_CHECKING:
    from supertuner.plan.forecast.timeline import MemoryTimeline


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Where weights, activations and optimizer state live while a run trains, and what is fetched when."""

    machine: str
    """Title of the machine."""
    phases: Mapping[str, MemoryPlan]
    """Training phase (`train <expert>`) → its plan. Empty if the size of GPU memory is unknown."""

    @property
    def fits(self) -> bool | None:
        """Whether every plan fits the machine; None: there is no plan."""
        return all(plan.fits for plan in self.phases.values()) if self.phases else None

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values."""
        phases = {phase: plan.to_dict() for phase, plan in self.phases.items()}
        return {"modelled": True, "machine": self.machine, "fits": self.fits, "phases": phases}


def estimate(
    config: LoadedConfig,
    machine: str | None = None,
    *,
    samples: int | None = None,
    compute_share: float | None = None,
    advise: bool = True,
) -> RunForecast:
    """Forecast the memory, disk and time of a run on a machine.

    The run's steps are traced on fake tensors. The first forecast of a large model takes half a minute. Traces are
    cached below `run.output_dir`, so that later forecasts take seconds. The forecast is stored as well: the same
    question again is answered at once.

    Args:
        config: The configuration, from `load_config`.
        machine: Name of a machine such as "gh200-96" or "rtx-4090", or "this" for this machine with the memory that is
            free now. None: this machine if it has a GPU, otherwise a GH200.
        samples: Number of samples to assume for each dataset that is not on this machine. None: unknown.
        compute_share: Share of the published peak rates that kernels reach, for a second set of times. None: 0.4.
        advise: Also evaluate single changes of the settings (`.changes`).

    Returns:
        The forecast: `.fits`, `.peak_bytes`, `.step_seconds`, `.phases`, `.plans`, `.timing`, `.changes`.

    Raises:
        OptionError: The machine is not known.
        ModelError: The model must be downloaded first, or cannot process a bucket of the data.
    """
    return estimate_runs([config], machine, samples=samples, compute_share=compute_share, advise=advise)[0]


@interrupts_win()
def estimate_runs(
    configs: Sequence[LoadedConfig],
    machine: str | None = None,
    *,
    samples: int | None = None,
    compute_share: float | None = None,
    advise: bool = True,
    console: ConsoleSink | NullSink | None = None,
) -> list[RunForecast]:
    """Like `estimate`, for several configurations on the same machine.

    Changes of the settings (`advise`) are evaluated only for the first configuration. `console` shows progress.
    """
    capacity = find_machine_capacity(machine, HostFacts())
    progress = console or NullSink()
    return [
        cached_forecast(
            config.config, capacity, EstimateOptions(samples, compute_share, advise and not at), progress, progress
        )
        for at, config in enumerate(configs)
    ]


@interrupts_win()
def memory_timeline(
    config: LoadedConfig, machine: str | None = None, *, samples: int | None = None, console: ConsoleSink | NullSink
) -> tuple[str, MemoryTimeline]:
    """The training phase that needs the most memory, and its memory over time with everything on the GPU."""
    capacity = find_machine_capacity(machine, HostFacts())
    from supertuner.plan.forecast.forecast import estimate_run

    estimate = estimate_run(config.config, capacity, EstimateOptions(samples, advise=False), console, console)
    return estimate.fullest_expert().phase, estimate.memory_timeline()


@interrupts_win()
def plan(config: LoadedConfig, machine: str | None = None, *, samples: int | None = None) -> RunPlan:
    """Plan the memory of a run on a machine, with the `plan.*` settings applied.

    The arguments and errors are those of `estimate`.
    """
    capacity = find_machine_capacity(machine, HostFacts())
    from supertuner.plan.forecast.forecast import plan_run

    return RunPlan(capacity.title, plan_run(config.config, capacity, samples))

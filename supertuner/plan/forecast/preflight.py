"""What a run says of itself before anything is loaded: one line whether it fits, and a refusal where it cannot.

On a CPU a model that is small beside its memory is not traced: that would take longer than it is worth, and says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError, TrainError
from supertuner.core.events import NoteEvent, Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import bytes_text
from supertuner.memory.machines import MACHINES
from supertuner.plan.forecast.report import change_text, verdict_text
from supertuner.plan.forecast.results import FitStatus, MachineCapacity, RunForecast
from supertuner.plan.forecast.survey import survey_datasets
from supertuner.plan.forecast.target_machine import THIS_MACHINE, find_machine_capacity

if TYPE_CHECKING:
    import torch

    from supertuner.plan.forecast.forecast import RunEstimate

SMALL_SHARE = 0.01
"""Of a CPU's memory: weights below it are not what fills it."""
EVENT_TOPIC = "forecast"
SHARDED_NOT_FORECAST = (
    'what a process needs of weights that are shared out (parallel.strategy "fsdp") is not worked out'
)


def preflight_check(
    config: RunConfig,
    device: torch.device,
    *,
    host: HostFacts,
    sink: Sink,
    progress: Progress,
    force: bool = False,
    sharded: bool = False,
) -> RunEstimate | None:
    """Say whether the run fits; TrainError if it cannot, unless told otherwise. None: there was nothing to work out, or
    it cannot be: weights that are `shared_out` over processes are not forecast."""
    if config.forecast.before_training == "never":
        return None
    if sharded:
        sink.emit(NoteEvent(EVENT_TOPIC, f"no forecast and no plan: {SHARDED_NOT_FORECAST}"))
        return None
    capacity = _device_capacity(device, host)
    if config.forecast.before_training == "auto" and (reason := _why_not_needed(config, capacity)):
        sink.emit(NoteEvent(EVENT_TOPIC, reason))
        return None
    from supertuner.plan.forecast.forecast import forecast_run
    from supertuner.plan.forecast.trace_provider import CachedTraceProvider

    try:
        traces = CachedTraceProvider(config, capacity, sink, progress)
    except ModelError as error:  # a model that nobody knows before it is downloaded: the run itself will tell more
        sink.emit(NoteEvent(EVENT_TOPIC, f"no forecast before the model is here: {error}"))
        return None
    estimate = forecast_run(config, capacity, traces, survey_datasets(config), advise=True)
    forecast = estimate.forecast
    refuses = config.forecast.refuse and not force
    if forecast.verdict.fit is not FitStatus.DOES_NOT_FIT:
        sink.emit(NoteEvent(EVENT_TOPIC, verdict_text(forecast)))
    elif refuses:
        raise TrainError(refusal_text(forecast))
    else:
        sink.emit(WarningEvent(EVENT_TOPIC, f"{verdict_text(forecast)}; it begins all the same, as it was told to"))
    return estimate


def refusal_text(forecast: RunForecast) -> str:
    """What is missing, what would help, and how to begin all the same."""
    lines = [verdict_text(forecast), *(f"  {change_text(change)}" for change in forecast.changes if change.fits)]
    if len(lines) > 1:
        lines.insert(1, "any one of these would make it fit:")
    end = "`supertuner estimate` has all of it; to begin all the same: --anyway, or forecast.refuse: false"
    return "\n".join([*lines, end])


def _device_capacity(device: torch.device, host: HostFacts) -> MachineCapacity:
    """Of the device that the run computes on."""
    if device.type == "cuda":
        return find_machine_capacity(THIS_MACHINE, host, device.index or 0)
    available = host.memory_available()
    return MachineCapacity(
        replace(MACHINES["cpu"], title=f"this machine ({device})"), "this machine", None, available, "available"
    )


def _why_not_needed(config: RunConfig, capacity: MachineCapacity) -> str | None:
    """Why no step is traced; None: one is."""
    if not capacity.on_cpu or capacity.host_bytes is None:
        return None
    weights = _weight_bytes(config)
    if weights is None or weights > SMALL_SHARE * capacity.host_bytes:
        return None
    size = f" ({bytes_text(weights)})" if weights else ""
    return f"no forecast: the model{size} is small beside {bytes_text(capacity.host_bytes)} of host memory"


def _weight_bytes(config: RunConfig) -> int | None:
    """Of the model's files on this machine; None: they are not here."""
    path = config.model.path
    if path is None or path == "tiny":
        return 0
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))

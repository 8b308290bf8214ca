"""The check before a run loads anything: one line that says whether the run fits, and a refusal if it does not.

On a CPU, a model that is small compared with host memory is not traced: tracing would take longer than the check is
worth. The check then says so.
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
from supertuner.plan.forecast.report import change_text
from supertuner.plan.forecast.results import FitStatus, MachineCapacity, RunForecast, verdict_text
from supertuner.plan.forecast.survey import survey_datasets
from supertuner.plan.forecast.target_machine import THIS_MACHINE, find_machine_capacity

if TYPE_CHECKING:
    import torch

    from supertuner.plan.forecast.forecast import RunEstimate

SMALL_SHARE = 0.01
"""Share of host memory: a model with fewer weights does not fill a CPU's memory."""
EVENT_TOPIC = "forecast"
SHARDED_NOT_FORECAST = 'the memory of a process that holds a shard (parallel.strategy "fsdp") is not modelled'


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
    """Report whether the run fits on `device`. Raises TrainError if it does not, unless `force` or
    `forecast.refuse: false`.

    Returns None if no forecast was made: it is switched off, not needed, or not possible (`sharded` weights, a model
    that is unknown before it is downloaded).
    """
    if config.forecast.before_training == "never":
        return None
    if sharded:
        sink.emit(NoteEvent(EVENT_TOPIC, f"no forecast and no plan: {SHARDED_NOT_FORECAST}"))
        return None
    capacity = device_capacity(device, host)
    if config.forecast.before_training == "auto" and (reason := why_not_needed(config, capacity)):
        sink.emit(NoteEvent(EVENT_TOPIC, reason))
        return None
    from supertuner.plan.forecast.forecast import forecast_run
    from supertuner.plan.forecast.results import EstimateOptions
    from supertuner.plan.forecast.run_model import RunModel
    from supertuner.plan.forecast.trace_provider import CachedTraceProvider

    try:
        traces = CachedTraceProvider(config, capacity, sink, progress)
    except ModelError as error:  # an unpublished model that is not downloaded yet: loading it reports the details
        sink.emit(NoteEvent(EVENT_TOPIC, f"no forecast until the model is on this machine: {error}"))
        return None
    run = RunModel(config, capacity, traces, survey_datasets(config))
    estimate = forecast_run(run, EstimateOptions())
    forecast = estimate.forecast
    if forecast.verdict.fit is not FitStatus.DOES_NOT_FIT:
        sink.emit(NoteEvent(EVENT_TOPIC, verdict_text(forecast)))
    elif config.forecast.refuse and not force:
        raise TrainError(refusal_text(forecast))
    else:
        switch = "force" if force else "forecast.refuse: false"
        sink.emit(WarningEvent(EVENT_TOPIC, f"{verdict_text(forecast)}; it starts anyway because of {switch}"))
    return estimate


def refusal_text(forecast: RunForecast) -> str:
    """What is missing, which single changes would make the run fit, and how to start it anyway."""
    # A change of the machine is written as the option of `supertuner estimate`, which training does not have.
    changes = [change_text(change).removeprefix("--") for change in forecast.changes if change.fits]
    lines = [verdict_text(forecast), *(f"  {change}" for change in changes)]
    if len(lines) > 1:
        lines.insert(1, "any one of these changes would make it fit:")
    full = "`supertuner estimate CONFIG --machine this` prints the whole forecast"
    return "\n".join([*lines, f"{full}; to start anyway: `force`, or forecast.refuse: false"])


def device_capacity(device: torch.device, host: HostFacts) -> MachineCapacity:
    """The memory that is free on the device that the run computes on."""
    if device.type == "cuda":
        return find_machine_capacity(THIS_MACHINE, host, device.index or 0)
    cpu = replace(MACHINES["cpu"], title=f"this machine ({device})")
    return MachineCapacity(cpu, "this machine", None, host.memory_available(), "available")


def why_not_needed(config: RunConfig, capacity: MachineCapacity) -> str | None:
    """Why no step is traced; None: a step is traced."""
    if not capacity.on_cpu or capacity.host_bytes is None:
        return None
    weights = _weight_bytes(config)
    if weights is None or weights > SMALL_SHARE * capacity.host_bytes:
        return None
    size = f" ({bytes_text(weights)})" if weights else ""
    return f"no forecast: the model{size} is small compared with {bytes_text(capacity.host_bytes)} of host memory"


def _weight_bytes(config: RunConfig) -> int | None:
    """Bytes of the model's files on this machine; None: they are not here."""
    path = config.model.path
    if path is None or path == "tiny":
        return 0
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))

"""What a run says of itself before anything is loaded: one line whether it fits, and a refusal where it cannot.

On a CPU a model that is small beside its memory is not traced: that would take longer than it is worth, and says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import ModelError, TrainError
from supertuner.core.events import Noted, Progress, Sink, Warned
from supertuner.core.host import Host
from supertuner.core.types import bytes_text
from supertuner.memory.machines import MACHINES
from supertuner.plan.forecast.model import Fit, Forecast, Room
from supertuner.plan.forecast.report import change_text, verdict
from supertuner.plan.forecast.survey import survey
from supertuner.plan.forecast.target_machine import THIS, room_of

if TYPE_CHECKING:
    import torch

    from supertuner.plan.forecast.forecast import Estimated

SMALL_SHARE = 0.01
"""Of a CPU's memory: weights below it are not what fills it."""
WHAT = "forecast"
NOT_SHARED_OUT = 'what a process needs of weights that are shared out (parallel.strategy "fsdp") is not worked out'


def before_training(
    config: RunConfig,
    device: torch.device,
    *,
    host: Host,
    sink: Sink,
    progress: Progress,
    anyway: bool = False,
    shared_out: bool = False,
) -> Estimated | None:
    """Say whether the run fits; TrainError if it cannot, unless told otherwise. None: there was nothing to work out, or
    it cannot be: weights that are `shared_out` over processes are not forecast."""
    if config.forecast.before_training == "never":
        return None
    if shared_out:
        sink.emit(Noted(WHAT, f"no forecast and no plan: {NOT_SHARED_OUT}"))
        return None
    room = _room(device, host)
    if config.forecast.before_training == "auto" and (why := _not_needed(config, room)):
        sink.emit(Noted(WHAT, why))
        return None
    from supertuner.plan.forecast.forecast import forecast_run
    from supertuner.plan.forecast.traces import Traces

    try:
        traces = Traces(config, room, sink, progress)
    except ModelError as error:  # a model that nobody knows before it is downloaded: the run itself will tell more
        sink.emit(Noted(WHAT, f"no forecast before the model is here: {error}"))
        return None
    estimated = forecast_run(config, room, traces, survey(config), advise=True)
    found = estimated.forecast
    refused = config.forecast.refuse and not anyway
    if found.judged.fit is not Fit.DOES_NOT:
        sink.emit(Noted(WHAT, verdict(found)))
    elif refused:
        raise TrainError(refusal(found))
    else:
        sink.emit(Warned(WHAT, f"{verdict(found)}; it begins all the same, as it was told to"))
    return estimated


def refusal(found: Forecast) -> str:
    """What is missing, what would help, and how to begin all the same."""
    lines = [verdict(found), *(f"  {change_text(change)}" for change in found.changes if change.fits)]
    if len(lines) > 1:
        lines.insert(1, "any one of these would make it fit:")
    end = "`supertuner estimate` has all of it; to begin all the same: --anyway, or forecast.refuse: false"
    return "\n".join([*lines, end])


def _room(device: torch.device, host: Host) -> Room:
    """Of the device that the run computes on."""
    if device.type == "cuda":
        return room_of(THIS, host, device.index or 0)
    available = host.memory_available()
    return Room(
        replace(MACHINES["cpu"], title=f"this machine ({device})"), "this machine", None, available, "available"
    )


def _not_needed(config: RunConfig, room: Room) -> str | None:
    """Why no step is traced; None: one is."""
    if not room.on_cpu or room.host_bytes is None:
        return None
    weights = _weight_bytes(config)
    if weights is None or weights > SMALL_SHARE * room.host_bytes:
        return None
    size = f" ({bytes_text(weights)})" if weights else ""
    return f"no forecast: the model{size} is small beside {bytes_text(room.host_bytes)} of host memory"


def _weight_bytes(config: RunConfig) -> int | None:
    """Of the model's files on this machine; None: they are not here."""
    path = config.model.path
    if path is None or path == "tiny":
        return 0
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))

"""`supertuner estimate`: a configuration's forecast on a machine, other values of its settings beside it, and pictures.

Only looks: no run is begun, nothing is staged, loaded or downloaded. Traces are kept, so that a second look is instant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.config.sources.load import Loaded, load
from supertuner.core.durable import write_bytes
from supertuner.core.errors import OptionError
from supertuner.core.host import Host
from supertuner.core.types import JSON, bytes_text
from supertuner.plan.forecast.model import Fit, Forecast, Room
from supertuner.plan.forecast.report import as_json, columns, duration, page
from supertuner.plan.forecast.survey import survey
from supertuner.plan.forecast.target_machine import room_of
from supertuner.sinks.console import Console
from supertuner.tools.estimate_picture import Bar

if TYPE_CHECKING:
    from PIL.Image import Image

    from supertuner.plan.forecast.forecast import Estimated

WHAT_IF = re.compile(r"\s*(?P<key>[^=]+?)\s*=\s*(?P<values>.+)")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a configuration."""

    config: Path
    sets: tuple[str, ...] = ()
    machine: str | None = None
    samples: int | None = None
    compute_share: float | None = None
    advise: bool = True
    what_ifs: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Tried:
    """One value of a setting."""

    value: str
    estimated: Estimated
    current: bool
    """It is what the configuration says."""


@dataclass(frozen=True, eq=False, slots=True)
class WhatIf:
    key: str
    tried: tuple[Tried, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    estimated: Estimated
    what_ifs: tuple[WhatIf, ...]

    @property
    def forecast(self) -> Forecast:
        return self.estimated.forecast

    @property
    def fits(self) -> bool:
        return self.forecast.judged.fit in (Fit.FITS, Fit.TIGHT)


def answer(question: Question, console: Console) -> Answer:
    """The forecast, and those of the other values."""
    room = room_of(question.machine, Host())
    loaded = load(question.config, sets=question.sets, check_paths=False)
    others = [_loaded(text, question) for text in question.what_ifs]  # refused before anything is traced
    for note in loaded.notes:
        console.emit(note)
    with console.phase("loading libraries"):
        pass

    def tried(value: str, other: Loaded) -> Tried:
        return Tried(value, _estimated(other, room, question, console, advise=False), other.config == loaded.config)

    return Answer(
        _estimated(loaded, room, question, console, advise=question.advise),
        tuple(WhatIf(key, tuple(tried(*one) for one in values.items())) for key, values in others),
    )


def _loaded(text: str, question: Question) -> tuple[str, dict[str, Loaded]]:
    """The configuration with each value that a what-if asks about."""
    key, values = _parsed(text)
    found = {}
    for value in values:
        found[value] = load(question.config, sets=[*question.sets, f"{key}={value}"], check_paths=False)
    return key, found


def _estimated(loaded: Loaded, room: Room, question: Question, console: Console, *, advise: bool) -> Estimated:
    from supertuner.plan.forecast.forecast import forecast_run
    from supertuner.plan.forecast.traces import Traces

    config = loaded.config
    held = survey(config, question.samples)
    tracing = Traces(config, room, console, console)
    return forecast_run(config, room, tracing, held, compute_share=question.compute_share, advise=advise)


def _parsed(text: str) -> tuple[str, list[str]]:
    """`train.batch_size=1,2,4`: commas inside brackets belong to a value."""
    match = WHAT_IF.fullmatch(text)
    if match is None:
        raise OptionError(f"--what-if {text}: write key=value,value, for example train.batch_size=1,2,4,8")
    values, depth = [""], 0
    for sign in match["values"]:
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0:
            values.append("")
        else:
            values[-1] += sign
    found = [value.strip() for value in values]
    if not all(found):
        raise OptionError(f"--what-if {text}: a value is missing between two commas")
    return match["key"], list(dict.fromkeys(found))


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lines(found: Answer) -> list[str]:
    """The page, and a table for every what-if."""
    text = page(found.forecast)
    for what_if in found.what_ifs:
        text += ["", *_table(what_if)]
    return text


def _table(what_if: WhatIf) -> list[str]:
    rows = [[f"what if {what_if.key} were", "all on the GPU", "", "a step", "samples/s", "the run"]]
    for one in what_if.tried:
        forecast = one.estimated.forecast
        judged, timing, fullest = forecast.judged, forecast.timing, forecast.fullest
        pace = None if timing is None else timing.paces[0]
        total = None if pace is None else pace.total_s
        rows.append(
            [
                one.value + (" (as now)" if one.current else ""),
                "" if fullest is None else bytes_text(fullest.everything_bytes),
                judged.fit.value,
                "" if pace is None else duration(pace.step_s),
                "" if pace is None or timing is None else f"{timing.window / pace.step_s:.3g}",
                "" if total is None else duration(total),
            ]
        )
    return columns(rows, right={1, 3, 4, 5})


def document(found: Answer) -> dict[str, JSON]:
    """The same for programs."""
    return {
        **as_json(found.forecast),
        "what_if": [
            {
                "key": what_if.key,
                "tried": [{"value": one.value, **as_json(one.estimated.forecast)} for one in what_if.tried],
            }
            for what_if in found.what_ifs
        ],
    }


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def require_picture(path: Path) -> None:
    """Said before the work is done, not after."""
    if path.suffix.lower() != ".png":
        raise OptionError(f"--plot {path}: the picture is a PNG; let its name end in .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OptionError(f"--plot {path}: cannot be written there; name a file in a folder that exists")


def plot(found: Answer, path: Path) -> None:
    from supertuner.sinks.drawing import png_bytes

    write_bytes(path, png_bytes(picture(found)))


def picture(found: Answer) -> Image:
    """The fullest step as it goes, and a chart for every what-if."""
    from supertuner.plan.placement.throughput import Rates
    from supertuner.plan.placement.timeline import timeline
    from supertuner.tools import estimate_picture as drawn

    forecast, expertise = found.forecast, found.estimated.fullest()
    room, trace = forecast.room, expertise.traced
    rates = Rates.of(room.machine)
    line = timeline(trace, None if rates.unknown else rates.seconds, found.estimated.idle_bytes(expertise))
    per, name = _unit(float(line.edges[-1])) if line.in_seconds else (1.0, "operators")
    unit = f"{name}, modelled at the machine's published rates" if line.in_seconds else name
    limit = room.host_bytes if room.on_cpu else room.gpu_bytes
    followed = any(phase.planned is not None for phase in forecast.phases)
    planned = "a micro-batch and the update, modelled" + (", before any plan" if followed else "")
    step = drawn.Course(
        title=f"{forecast.model}: {trace.phase}",
        note=f"{planned}; {forecast.settings}",
        edges=line.edges / per,
        bytes_by_class=line.bytes_by_class,
        passes=tuple(drawn.Passing(span.name, span.begin / per, span.end / per) for span in line.spans),
        unit=unit,
        limit_bytes=limit,
        limit_name=room.title,
    )
    charts = [
        drawn.WhatIf(
            f"What if {what_if.key} were …",
            tuple(_bar(one) for one in what_if.tried),
            limit,
            room.title,
        )
        for what_if in found.what_ifs
    ]
    return drawn.draw_estimate(step, charts)


def _unit(seconds: float) -> tuple[float, str]:
    """In which a step is counted: so many seconds each."""
    units = ((3600.0, 60.0, "minutes"), (1.0, 1.0, "seconds"), (1e-3, 1e-3, "milliseconds"))
    return next(((per, name) for least, per, name in units if seconds >= least), (1e-6, "microseconds"))


def _bar(one: Tried) -> Bar:
    forecast = one.estimated.forecast
    timing, fullest = forecast.timing, forecast.fullest
    pace = None if timing is None else timing.paces[0]
    rate = "" if pace is None or timing is None else f"{timing.window / pace.step_s:.3g} samples/s"
    classes = {} if fullest is None else fullest.gpu
    return Bar(one.value, classes, None if pace is None else pace.step_s, one.current, rate)

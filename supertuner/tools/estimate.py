"""`supertuner estimate`: loads the configuration, runs the forecast, and presents it as text, JSON and a picture.

Nothing is started, staged, loaded or downloaded. Traces are cached, so that a second estimate is instant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.api.forecasting import estimate_runs, memory_timeline
from supertuner.config.sources.load import load_config
from supertuner.core.durable import write_bytes
from supertuner.core.errors import OptionError
from supertuner.core.types import JSON, bytes_text
from supertuner.plan.forecast.report import align_columns, report_lines
from supertuner.plan.forecast.results import RunForecast, step_duration_text
from supertuner.sinks.console import ConsoleSink
from supertuner.sinks.phase_counters import rate_text
from supertuner.tools.estimate_picture import PassBand, StepMemoryChart, WhatIfBar, WhatIfChart, render_estimate

if TYPE_CHECKING:
    from supertuner.plan.forecast.timeline import MemoryTimeline


WHAT_IF_PATTERN = re.compile(r"\s*(?P<key>[^=]+?)\s*=\s*(?P<values>.+)")


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The arguments of `supertuner estimate`."""

    config: Path
    sets: tuple[str, ...] = ()
    machine: str | None = None
    samples: int | None = None
    compute_share: float | None = None
    advise: bool = True
    what_ifs: tuple[str, ...] = ()
    plot: bool = False
    """The result also has the memory of a step over time, which needs its traces."""


@dataclass(frozen=True, eq=False, slots=True)
class WhatIfResult:
    """The forecast with one value of the setting."""

    value: str
    forecast: RunForecast
    current: bool
    """True: the configuration has this value."""

    @property
    def samples_per_s(self) -> str:
        """As text; empty: unknown."""
        timing = self.forecast.timing
        return "" if timing is None else rate_text(timing.window / timing.paces[0].step_s)


@dataclass(frozen=True, eq=False, slots=True)
class WhatIfComparison:
    """The forecasts with each value of one setting."""

    key: str
    results: tuple[WhatIfResult, ...]


@dataclass(frozen=True, eq=False, slots=True)
class EstimateResult:
    """The forecast, and a comparison for each `--what-if`."""

    forecast: RunForecast
    what_ifs: tuple[WhatIfComparison, ...]
    timeline: tuple[str, MemoryTimeline] | None = None
    """The fullest training phase, and its memory over time; None: it was not asked for."""

    @property
    def fits(self) -> bool:
        """False also if the size of a memory is unknown."""
        return self.forecast.fits is True


def run_estimate(request: EstimateRequest, console: ConsoleSink) -> EstimateResult:
    """Raises OptionError or ConfigError for a wrong argument before anything is traced."""
    loaded = load_config(request.config, sets=request.sets, check_paths=False)
    what_ifs = [parse_what_if(text) for text in request.what_ifs]
    alternatives = [
        load_config(request.config, sets=[*request.sets, f"{key}={value}"], check_paths=False)
        for key, values in what_ifs
        for value in values
    ]
    for note in loaded.notes:
        console.emit(note)
    forecast, *others = estimate_runs(
        [loaded, *alternatives],
        request.machine,
        samples=request.samples,
        compute_share=request.compute_share,
        advise=request.advise,
        console=console,
    )
    remaining = iter(zip(others, (other.config == loaded.config for other in alternatives), strict=True))
    results = [(key, tuple(WhatIfResult(value, *next(remaining)) for value in values)) for key, values in what_ifs]
    timeline = (
        memory_timeline(loaded, request.machine, samples=request.samples, console=console) if request.plot else None
    )
    return EstimateResult(forecast, tuple(WhatIfComparison(*result) for result in results), timeline)


def parse_what_if(text: str) -> tuple[str, list[str]]:
    """The setting and its values from `train.batch_size=1,2,4`. Commas inside brackets belong to a value.

    Raises OptionError if `text` has no `=` or an empty value.
    """
    match = WHAT_IF_PATTERN.fullmatch(text)
    if match is None:
        raise OptionError(f"--what-if {text}: write key=value,value, for example train.batch_size=1,2,4,8")
    values, depth = [""], 0
    for character in match["values"]:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    stripped = [value.strip() for value in values]
    if not all(stripped):
        raise OptionError(f"--what-if {text}: a value is missing between two commas")
    return match["key"], list(dict.fromkeys(stripped))


# ── text and JSON ────────────────────────────────────────────────────────────────────────────────────────────────────


def estimate_lines(result: EstimateResult) -> list[str]:
    """The page of the forecast, and a table for each what-if."""
    lines = report_lines(result.forecast)
    for what_if in result.what_ifs:
        lines += ["", *_what_if_table(what_if)]
    return lines


def _what_if_table(what_if: WhatIfComparison) -> list[str]:
    rows = [[f"what if {what_if.key} were", "all on the GPU", "", "a step", "samples/s", "the run"]]
    for one in what_if.results:
        forecast = one.forecast
        timing, fullest = forecast.timing, forecast.fullest_phase
        times = (None, None) if timing is None else (timing.paces[0].step_s, timing.paces[0].total_s)
        step, total = ("" if seconds is None else step_duration_text(seconds) for seconds in times)
        value = one.value + (" (as configured)" if one.current else "")
        size = "" if fullest is None else bytes_text(fullest.all_on_gpu_bytes)
        rows.append([value, size, forecast.verdict.fit.value, step, one.samples_per_s, total])
    return align_columns(rows, right_aligned={1, 3, 4, 5})


def estimate_json(result: EstimateResult) -> dict[str, JSON]:
    """The forecast (`RunForecast.to_dict`), and under `what_if` those of other values."""
    what_ifs: list[JSON] = []
    for what_if in result.what_ifs:
        tried: list[JSON] = [{"value": one.value, **one.forecast.to_dict()} for one in what_if.results]
        what_ifs.append({"key": what_if.key, "tried": tried})
    return {**result.forecast.to_dict(), "what_if": what_ifs}


# ── picture ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def require_plot_path(path: Path) -> None:
    """Raises OptionError if the picture cannot be written to `path`; called before the forecast, which takes longer."""
    if path.suffix.lower() != ".png":
        raise OptionError(f"--plot {path}: the picture is a PNG; give it a name that ends in .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OptionError(f"--plot {path}: cannot be written; name a file in a folder that exists")


def write_plot(result: EstimateResult, path: Path) -> None:
    write_bytes(path, estimate_png(result))


def estimate_png(result: EstimateResult) -> bytes:
    """The picture: the memory of the fullest step over time, and a bar chart for each what-if."""
    capacity = result.forecast.capacity
    limit = capacity.host_bytes if capacity.on_cpu else capacity.gpu_bytes
    charts = [
        WhatIfChart(f"What if {what_if.key} were …", tuple(map(_what_if_bar, what_if.results)), limit, capacity.title)
        for what_if in result.what_ifs
    ]
    return render_estimate(_step_chart(result, limit), charts)


def _step_chart(result: EstimateResult, limit: int | None) -> StepMemoryChart:
    assert result.timeline is not None, "EstimateRequest.plot was not set"
    forecast, (phase, timeline) = result.forecast, result.timeline
    unit_s, unit = _time_unit(float(timeline.edges[-1])) if timeline.in_seconds else (1.0, "operators")
    followed = any(phase.plan_estimate is not None for phase in forecast.phases)
    description = "a micro-batch and the update, modelled" + (", before any plan" if followed else "")
    return StepMemoryChart(
        title=f"{forecast.model}: {phase}",
        note=f"{description}; {forecast.settings}",
        edges=timeline.edges / unit_s,
        bytes_by_class=timeline.bytes_by_class,
        passes=tuple(PassBand(span.name, span.begin / unit_s, span.end / unit_s) for span in timeline.passes),
        unit=f"{unit}, modelled at the machine's published rates" if timeline.in_seconds else unit,
        limit_bytes=limit,
        limit_name=forecast.capacity.title,
    )


def _time_unit(seconds: float) -> tuple[float, str]:
    """The unit of the time axis for a step of this length: its seconds and its name."""
    units = ((3600.0, 60.0, "minutes"), (1.0, 1.0, "seconds"), (1e-3, 1e-3, "milliseconds"))
    return next(((per, name) for least, per, name in units if seconds >= least), (1e-6, "microseconds"))


def _what_if_bar(result: WhatIfResult) -> WhatIfBar:
    forecast = result.forecast
    classes = {} if forecast.fullest_phase is None else forecast.fullest_phase.gpu
    rate = f"{result.samples_per_s} samples/s" if result.samples_per_s else ""
    return WhatIfBar(result.value, classes, forecast.step_seconds, result.current, rate)

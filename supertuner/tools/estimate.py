"""`supertuner estimate`: a configuration's forecast on a machine, other values of its settings beside it, and pictures.

Only looks: no run is begun, nothing is staged, loaded or downloaded. Traces are kept, so that a second look is instant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.config.sources.load import LoadedConfig, load_config
from supertuner.core.durable import write_bytes
from supertuner.core.errors import OptionError
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON, bytes_text
from supertuner.plan.forecast.report import align_columns, forecast_json, report_lines, step_duration_text
from supertuner.plan.forecast.results import FitStatus, MachineCapacity, RunForecast
from supertuner.plan.forecast.survey import survey_datasets
from supertuner.plan.forecast.target_machine import find_machine_capacity
from supertuner.sinks.console import ConsoleSink
from supertuner.tools.estimate_picture import WhatIfBar

if TYPE_CHECKING:
    from PIL.Image import Image

    from supertuner.plan.forecast.forecast import RunEstimate

WHAT_IF_PATTERN = re.compile(r"\s*(?P<key>[^=]+?)\s*=\s*(?P<values>.+)")


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """What is asked of a configuration."""

    config: Path
    sets: tuple[str, ...] = ()
    machine: str | None = None
    samples: int | None = None
    compute_share: float | None = None
    advise: bool = True
    what_ifs: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class WhatIfResult:
    """One value of a setting."""

    value: str
    estimate: RunEstimate
    current: bool
    """It is what the configuration says."""


@dataclass(frozen=True, eq=False, slots=True)
class WhatIfComparison:
    key: str
    results: tuple[WhatIfResult, ...]


@dataclass(frozen=True, eq=False, slots=True)
class EstimateResult:
    estimate: RunEstimate
    what_ifs: tuple[WhatIfComparison, ...]

    @property
    def forecast(self) -> RunForecast:
        return self.estimate.forecast

    @property
    def fits(self) -> bool:
        return self.forecast.verdict.fit in (FitStatus.FITS, FitStatus.TIGHT)


def run_estimate(request: EstimateRequest, console: ConsoleSink) -> EstimateResult:
    """The forecast, and those of the other values."""
    capacity = find_machine_capacity(request.machine, HostFacts())
    loaded = load_config(request.config, sets=request.sets, check_paths=False)
    others = [_load_what_if(text, request) for text in request.what_ifs]  # refused before anything is traced
    for note in loaded.notes:
        console.emit(note)
    with console.phase("loading libraries"):
        pass

    def try_value(value: str, other: LoadedConfig) -> WhatIfResult:
        return WhatIfResult(
            value, _estimate_config(other, capacity, request, console, advise=False), other.config == loaded.config
        )

    return EstimateResult(
        _estimate_config(loaded, capacity, request, console, advise=request.advise),
        tuple(WhatIfComparison(key, tuple(try_value(*one) for one in values.items())) for key, values in others),
    )


def _load_what_if(text: str, request: EstimateRequest) -> tuple[str, dict[str, LoadedConfig]]:
    """The configuration with each value that a what-if asks about."""
    key, values = _parse_what_if(text)
    loaded_by_value = {}
    for value in values:
        loaded_by_value[value] = load_config(request.config, sets=[*request.sets, f"{key}={value}"], check_paths=False)
    return key, loaded_by_value


def _estimate_config(
    loaded: LoadedConfig, capacity: MachineCapacity, request: EstimateRequest, console: ConsoleSink, *, advise: bool
) -> RunEstimate:
    from supertuner.plan.forecast.forecast import forecast_run
    from supertuner.plan.forecast.trace_provider import CachedTraceProvider

    config = loaded.config
    datasets = survey_datasets(config, request.samples)
    traces = CachedTraceProvider(config, capacity, console, console)
    return forecast_run(config, capacity, traces, datasets, compute_share=request.compute_share, advise=advise)


def _parse_what_if(text: str) -> tuple[str, list[str]]:
    """`train.batch_size=1,2,4`: commas inside brackets belong to a value."""
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


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def estimate_lines(result: EstimateResult) -> list[str]:
    """The page, and a table for every what-if."""
    text = report_lines(result.forecast)
    for what_if in result.what_ifs:
        text += ["", *_what_if_table(what_if)]
    return text


def _what_if_table(what_if: WhatIfComparison) -> list[str]:
    rows = [[f"what if {what_if.key} were", "all on the GPU", "", "a step", "samples/s", "the run"]]
    for what_if_result in what_if.results:
        forecast = what_if_result.estimate.forecast
        judged, timing, fullest = forecast.verdict, forecast.timing, forecast.fullest_phase
        pace = None if timing is None else timing.paces[0]
        total = None if pace is None else pace.total_s
        rows.append(
            [
                what_if_result.value + (" (as now)" if what_if_result.current else ""),
                "" if fullest is None else bytes_text(fullest.all_on_gpu_bytes),
                judged.fit.value,
                "" if pace is None else step_duration_text(pace.step_s),
                "" if pace is None or timing is None else f"{timing.window / pace.step_s:.3g}",
                "" if total is None else step_duration_text(total),
            ]
        )
    return align_columns(rows, right_aligned={1, 3, 4, 5})


def estimate_json(result: EstimateResult) -> dict[str, JSON]:
    """The same for programs."""
    return {
        **forecast_json(result.forecast),
        "what_if": [
            {
                "key": what_if.key,
                "tried": [{"value": one.value, **forecast_json(one.estimate.forecast)} for one in what_if.results],
            }
            for what_if in result.what_ifs
        ],
    }


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def require_plot_path(path: Path) -> None:
    """Said before the work is done, not after."""
    if path.suffix.lower() != ".png":
        raise OptionError(f"--plot {path}: the picture is a PNG; let its name end in .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OptionError(f"--plot {path}: cannot be written there; name a file in a folder that exists")


def write_plot(result: EstimateResult, path: Path) -> None:
    from supertuner.sinks.drawing import png_bytes

    write_bytes(path, png_bytes(draw_result(result)))


def draw_result(result: EstimateResult) -> Image:
    """The fullest step as it goes, and a chart for every what-if."""
    from supertuner.plan.placement.throughput import MachineRates
    from supertuner.plan.placement.timeline import build_timeline
    from supertuner.tools import estimate_picture as drawn

    forecast, expert_forecast = result.forecast, result.estimate.fullest_expert()
    capacity, trace = forecast.capacity, expert_forecast.trace
    rates = MachineRates.from_machine(capacity.machine)
    timeline_data = build_timeline(
        trace, None if rates.unknown_rates else rates.seconds, result.estimate.idle_bytes(expert_forecast)
    )
    seconds_per_unit, name = (
        _time_unit(float(timeline_data.edges[-1])) if timeline_data.in_seconds else (1.0, "operators")
    )
    unit = f"{name}, modelled at the machine's published rates" if timeline_data.in_seconds else name
    limit = capacity.host_bytes if capacity.on_cpu else capacity.gpu_bytes
    followed = any(phase.plan_estimate is not None for phase in forecast.phases)
    description = "a micro-batch and the update, modelled" + (", before any plan" if followed else "")
    step_chart = drawn.StepMemoryChart(
        title=f"{forecast.model}: {trace.phase}",
        note=f"{description}; {forecast.settings}",
        edges=timeline_data.edges / seconds_per_unit,
        bytes_by_class=timeline_data.bytes_by_class,
        passes=tuple(
            drawn.PassBand(span.name, span.begin / seconds_per_unit, span.end / seconds_per_unit)
            for span in timeline_data.passes
        ),
        unit=unit,
        limit_bytes=limit,
        limit_name=capacity.title,
    )
    charts = [
        drawn.WhatIfChart(
            f"What if {what_if.key} were …",
            tuple(_what_if_bar(one) for one in what_if.results),
            limit,
            capacity.title,
        )
        for what_if in result.what_ifs
    ]
    return drawn.draw_estimate(step_chart, charts)


def _time_unit(seconds: float) -> tuple[float, str]:
    """In which a step is counted: so many seconds each."""
    units = ((3600.0, 60.0, "minutes"), (1.0, 1.0, "seconds"), (1e-3, 1e-3, "milliseconds"))
    return next(((per, name) for least, per, name in units if seconds >= least), (1e-6, "microseconds"))


def _what_if_bar(what_if_result: WhatIfResult) -> WhatIfBar:
    forecast = what_if_result.estimate.forecast
    timing, fullest = forecast.timing, forecast.fullest_phase
    pace = None if timing is None else timing.paces[0]
    rate = "" if pace is None or timing is None else f"{timing.window / pace.step_s:.3g} samples/s"
    classes = {} if fullest is None else fullest.gpu
    return WhatIfBar(what_if_result.value, classes, None if pace is None else pace.step_s, what_if_result.current, rate)

"""Draws a run's losses: single steps thin, the trend thick, held-out losses as rings, the window size below.

Each expert has its own colour. The loss axis is logarithmic if the losses span more than a factor of 20. It leaves out
single spikes, which triangles at the upper edge mark. A long run is drawn as the range of losses per pixel column, and
is read in bounded memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from supertuner.core.durable import write_bytes
from supertuner.core.errors import RunFolderError
from supertuner.runs.binned_series import BinnedSeries, Floats, SeriesBinner, smooth_series
from supertuner.runs.loss_files import HELD_OUT_FILE, HeldOutRecord, iterate_losses, read_held_out_losses
from supertuner.sinks.drawing import CARD, INK, MUTED, drawable_text
from supertuner.sinks.plot_style import FAINT_RULE, FONT, add_axes, add_text, figure_png, new_figure, points
from supertuner.sinks.training_events import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 1280, 720
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 84, 52
WINDOW_HEIGHT, PANEL_GAP = 96, 46
PLOT_WIDTH = WIDTH - LEFT - RIGHT
LOSS_HEIGHT = HEIGHT - TOP - BOTTOM - WINDOW_HEIGHT - PANEL_GAP
COLOURS = ("#2f6fb3", "#d1603d", "#3f8f5b", "#8a5fb0", "#b0892f")
PALE_ALPHA = 0.4
"""Opacity of the line through single steps."""
WINDOW_COLOUR = "#6b7280"
LOG_AXIS_RATIO = 20


@dataclass(frozen=True, eq=False, slots=True)
class LossSeries:
    """The losses of one expert."""

    name: str
    losses: BinnedSeries
    held_out: tuple[tuple[float, float], ...] = ()
    """(step, mean held-out loss) of each validation."""


@dataclass(frozen=True, eq=False, slots=True)
class LossCurve:
    """Everything that the picture shows."""

    series: tuple[LossSeries, ...]
    windows: BinnedSeries
    """Samples in the window of each step."""
    steps: int
    last_step: int
    not_finite: int = 0
    """Steps whose loss is not finite."""
    samples: int = 0


def draw_curve(loss_log: Path, out: Path, held_out: Path | None = None) -> None:
    """Write the picture of `loss_log` to `out` as PNG.

    Held-out losses are read from `held_out`, by default `validation.jsonl` beside the log. Raises RunFolderError if
    the log is empty or invalid, or if `out` cannot be written.
    """
    curve = read_curve(loss_log, loss_log.with_name(HELD_OUT_FILE) if held_out is None else held_out)
    picture = figure_png(render_curve(curve, loss_log.absolute().parent.name))
    try:
        write_bytes(out, picture)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written: {error.strerror}") from error


def read_curve(loss_log: Path, held_out: Path) -> LossCurve:
    curve = build_curve(iterate_losses(loss_log), read_held_out_losses(held_out))
    if curve is None:
        raise RunFolderError(f"{loss_log} is empty: there is no curve to draw before the first step")
    return curve


def build_curve(records: Iterable[StepRecord], held_out: Sequence[HeldOutRecord]) -> LossCurve | None:
    """Group losses and held-out means by expert, in the order in which experts appear; None without records.

    Losses that are not finite are only counted. The records are not kept: memory does not grow with their number.
    """
    binners: defaultdict[str, SeriesBinner] = defaultdict(SeriesBinner)
    windows, steps, not_finite, last = SeriesBinner(), 0, 0, None
    for record in records:
        binner = binners[record.expert]
        if math.isfinite(record.loss):
            binner.add(record.step, record.loss)
        else:
            not_finite += 1
        windows.add(record.step, record.window)
        steps, last = steps + 1, record
    if last is None:
        return None
    means: dict[str, list[tuple[float, float]]] = {}
    for row in held_out:
        if row.sigma is None and row.loss is not None and row.expert is not None:
            means.setdefault(row.expert, []).append((row.step, row.loss))
    series = tuple(
        LossSeries(name, binners[name].series(), tuple(means.get(name, []))) for name in {**binners, **means}
    )
    return LossCurve(series, windows.series(), steps, last.step, not_finite, last.samples)


def loss_limits(curve: LossCurve) -> tuple[float, float, bool]:
    """(low, high, logarithmic) of the loss axis: it shows every trend and held-out loss and most single steps."""
    shown = [loss for series in curve.series for loss in _losses_to_show(series)]
    if not shown:
        return 0.0, 1.0, False
    low, high = min(shown), max(shown)
    if low > 0 and high / low > LOG_AXIS_RATIO:
        return low * 0.9, high * 1.1, True
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return max(0.0, low - margin) if low >= 0 else low - margin, high + margin, False


def _losses_to_show(series: LossSeries) -> Iterable[float]:
    yield from (loss for _, loss in series.held_out)
    if len(series.losses):
        trend = smooth_series(series.losses)
        yield from (float(trend.min()), float(trend.max()))
        yield from map(float, np.quantile(series.losses.first_values, (0.01, 0.98)))


def render_curve(curve: LossCurve, name: str) -> Figure:
    figure = new_figure(WIDTH, HEIGHT)
    loss_axes = add_axes(figure, LEFT, TOP, PLOT_WIDTH, LOSS_HEIGHT)
    window_axes = add_axes(figure, LEFT, HEIGHT - BOTTOM - WINDOW_HEIGHT, PLOT_WIDTH, WINDOW_HEIGHT)
    first, last = _step_limits(curve)
    for axes in (loss_axes, window_axes):
        _format_steps_axis(axes, first, last)
    loss_axes.tick_params(labelbottom=False)
    low, high, logarithmic = loss_limits(curve)
    _format_loss_axis(loss_axes, low, high, logarithmic)
    for number, series in enumerate(curve.series):
        _draw_series(loss_axes, series, COLOURS[number % len(COLOURS)])
    _draw_window_sizes(window_axes, curve)
    add_text(figure, 16, TOP - 20, "loss", 13)
    add_text(figure, 16, HEIGHT - BOTTOM - WINDOW_HEIGHT - 20, "window", 13)
    add_text(figure, LEFT, HEIGHT - 23, "optimizer step", 13)
    _draw_heading(figure, curve, name)
    return figure


def _step_limits(curve: LossCurve) -> tuple[float, float]:
    held_out = [step for series in curve.series for step, _ in series.held_out]
    first, last = min([*held_out, float(curve.windows.steps[0])]), max([*held_out, float(curve.last_step)])
    return (first - 1, last + 1) if first == last else (first, last)


def _format_steps_axis(axes: Axes, first: float, last: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(first, last)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick_label))
    axes.grid(True, axis="x", color=FAINT_RULE, linewidth=points(1))


def _format_loss_axis(axes: Axes, low: float, high: float, logarithmic: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, ScalarFormatter

    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(_log_ticks(low, high)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_tick_label))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    axes.set_ylim(low, high)


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten, or powers alone if there are many. (LogLocator overflows near 1e300.)"""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    factors = (1, 2, 5) if len(powers) <= 3 else (1,)
    ticks = [factor * 10.0**power for power in powers[:: max(1, len(powers) // 8)] for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def _tick_label(value: float, _: int | None = None) -> str:
    return f"{value:,g}" if abs(value) < 1e6 else f"{value:g}"


def _draw_series(axes: Axes, series: LossSeries, colour: str) -> None:
    low, high = axes.get_ylim()
    if len(series.losses):
        steps, losses = _reduce_to_columns(series.losses, *axes.get_xlim())
        axes.plot(steps, np.clip(losses, low, high), color=colour, alpha=PALE_ALPHA, linewidth=points(1))
        spikes = steps[losses > high]
        edge, height_share = np.full(len(spikes), 1 + 3 / LOSS_HEIGHT), axes.get_xaxis_transform()
        triangle: dict[str, Any] = {"color": _pale(colour), "markersize": points(8), "markeredgewidth": 0}
        axes.plot(spikes, edge, "^", transform=height_share, clip_on=False, **triangle)
        trend = np.clip(smooth_series(series.losses), low, high)
        marker = "o" if len(trend) == 1 else None
        axes.plot(series.losses.steps, trend, color=colour, linewidth=points(3), marker=marker, markersize=points(6))
    for step, loss in series.held_out:
        axes.plot(step, min(max(loss, low), high), clip_on=False, zorder=5, **_ring(colour))


def _ring(colour: str) -> dict[str, Any]:
    """Properties of a Line2D that draws only a ring."""
    edge = {"markerfacecolor": CARD, "markeredgecolor": colour, "markeredgewidth": points(2)}
    return {"linestyle": "none", "marker": "o", "markersize": points(9), **edge}


def _pale(colour: str) -> str:
    """The colour as PALE_ALPHA shows it on white, but opaque: triangles that overlap do not darken."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * PALE_ALPHA):02x}" for part in parts)


def _reduce_to_columns(series: BinnedSeries, first: float, last: float) -> tuple[Floats, Floats]:
    """At most two points per pixel column, its lowest and its highest value: more change nothing and are slow."""
    if len(series) <= PLOT_WIDTH:  # bins of one value
        return series.steps, series.first_values
    columns = np.round((series.steps - first) / (last - first) * PLOT_WIDTH).astype(np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(columns)) + 1])
    lows, highs = np.minimum.reduceat(series.lows, starts), np.maximum.reduceat(series.highs, starts)
    # One column goes up and the next one down, so that the line between two columns stays inside their ranges.
    rising = np.arange(len(starts)) % 2 == 0
    values = np.column_stack([np.where(rising, lows, highs), np.where(rising, highs, lows)])
    places = first + columns[starts] * (last - first) / PLOT_WIDTH  # evenly spaced, whatever the bins are
    return np.repeat(places, 2), values.reshape(-1)


def _draw_window_sizes(axes: Axes, curve: LossCurve) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylim(0, max(1.0, float(curve.windows.highs.max())) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick_label))
    steps, sizes = _reduce_to_columns(curve.windows, *axes.get_xlim())
    steps, sizes = np.append(steps, curve.last_step), np.append(sizes, sizes[-1])
    axes.step(steps, sizes, where="post", color=WINDOW_COLOUR, linewidth=points(2))


def _draw_heading(figure: Figure, curve: LossCurve, name: str) -> None:
    """The run's name, how much was trained, and the legend."""
    from matplotlib.lines import Line2D

    add_text(figure, LEFT, 18, name, 21, max_width=PLOT_WIDTH, color=INK)
    note = f"loss by step; {curve.steps:,} steps, {curve.samples:,} samples"
    if curve.not_finite:
        note += f"; {curve.not_finite} not finite"
    end = add_text(figure, LEFT, 57, note, 14, va="center").get_window_extent().x1
    handles = [
        Line2D([], [], color=COLOURS[number % len(COLOURS)], linewidth=points(3), label=drawable_text(series.name))
        for number, series in enumerate(curve.series)
    ]
    if any(series.held_out for series in curve.series):
        handles.append(Line2D([], [], label="held-out", **_ring(MUTED)))
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": ((end + 26) / WIDTH, 1 - 57 / HEIGHT)}
    style: dict[str, Any] = {"labelcolor": INK, "prop": {"family": FONT, "size": points(14)}, "frameon": False}
    spacing: dict[str, Any] = {"handlelength": 1.6, "columnspacing": 1.6, "borderpad": 0}
    legend = figure.legend(handles=handles, ncols=len(handles), **place, **style, **spacing)
    for label in legend.get_texts():
        label.set_parse_math(False)

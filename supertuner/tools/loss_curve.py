"""Draws a run's losses: each step thin, the trend thick, by expert; held-out loss as points; the window below.

The scale of the loss is logarithmic where the losses span much, and leaves single spikes out of the picture: they are
marked at the upper edge. A long run is drawn as the range of its losses in each column of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from supertuner.core.durable import write_bytes
from supertuner.core.errors import RunFolderError
from supertuner.core.types import JSON
from supertuner.sinks.drawing import (
    CARD,
    INK,
    MUTED,
    RULE,
    drawable_text,
    load_font,
    new_sheet,
    png_bytes,
    shorten_line,
    text_width,
)
from supertuner.sinks.jsonlines import read_records
from supertuner.tools.axes import ChartAxis, linear_axis, log_axis

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

HELD_OUT_LOG = "validation.jsonl"
SUPERSAMPLING = 2
"""Drawn this much larger and then made smaller, which smooths the lines."""
WIDTH, HEIGHT = 1280, 720
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 84, 52
WINDOW_HEIGHT, PANEL_GAP = 96, 46
COLOURS = ("#2f6fb3", "#d1603d", "#3f8f5b", "#8a5fb0", "#b0892f")
PALE_SHARE = 0.62
"""How far a single step's line is from its colour towards white."""
WINDOW_COLOUR = "#6b7280"
MIN_TREND_STEPS = 8
"""Steps below which there is no trend to speak of."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class LossSeries:
    """The losses of one expert."""

    name: str
    steps: Floats
    losses: Floats
    held_out: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class LossCurve:
    """What a picture is drawn of."""

    series: tuple[LossSeries, ...]
    steps: Floats
    windows: Floats
    not_finite: int = 0
    samples: int = 0


def draw_curve(loss_log: Path, out: Path, held_out: Path | None = None) -> None:
    """Write the picture of `loss_log` to `out` as PNG; held-out losses are looked for beside the log."""
    curve = read_curve(loss_log, loss_log.with_name(HELD_OUT_LOG) if held_out is None else held_out)
    picture = png_bytes(render_curve(curve, loss_log.absolute().parent.name))
    try:
        write_bytes(out, picture)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written: {error.strerror}") from error


def read_curve(loss_log: Path, held_out: Path) -> LossCurve:
    records = list(read_records(loss_log))
    if not records:
        raise RunFolderError(f"{loss_log} has no line yet: there is no curve to draw before the first step")
    try:
        return build_curve(records, list(read_records(held_out)))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{loss_log}: a line lacks step, window, expert or loss ({error})") from error


def build_curve(records: Sequence[Mapping[str, JSON]], held_out: Sequence[Mapping[str, JSON]]) -> LossCurve:
    """Losses and held-out means by expert, in the order in which experts appear; losses that are None are counted."""
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        expert_points = points.setdefault(str(record["expert"]), [])
        if record["loss"] is not None:
            expert_points.append((_finite_number(record["step"]), _finite_number(record["loss"])))
    means: dict[str, list[tuple[float, float]]] = {}
    for row in held_out:
        if row["level"] is None and row["loss"] is not None and row["expert"] is not None:
            means.setdefault(str(row["expert"]), []).append((_finite_number(row["step"]), _finite_number(row["loss"])))
    series = tuple(
        LossSeries(name, *_columns(points.get(name, [])), tuple(means.get(name, []))) for name in {**points, **means}
    )
    steps, windows = _columns([(_finite_number(r["step"]), _finite_number(r["window"])) for r in records])
    missing = sum(record["loss"] is None for record in records)
    return LossCurve(series, steps, windows, missing, int(_finite_number(records[-1]["samples"])))


def smooth_losses(losses: Floats) -> Floats:
    """The trend: a mean over neighbours on both sides, about a thirtieth of the run; ends lean on what they have.

    A loss counts at most three times the geometric mean around it, so that one bad step is not taken for a trend.
    """
    if len(losses) < MIN_TREND_STEPS:
        return losses
    half_width = max(1, len(losses) // 60)
    typical = np.exp(_running_mean(np.log(np.maximum(losses, 1e-12)), half_width))
    return _running_mean(_running_mean(np.minimum(losses, 3 * typical), half_width), half_width)


def _running_mean(values: Floats, half_width: int) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    low, high = np.maximum(0, place - half_width), np.minimum(len(values), place + half_width + 1)
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def render_curve(curve: LossCurve, name: str) -> Image:
    """The picture."""
    from PIL import Image

    canvas, pen = new_sheet(WIDTH * SUPERSAMPLING, HEIGHT * SUPERSAMPLING, CARD)
    x_axis = _steps_axis(curve)
    loss_axis = _loss_axis(curve)
    window_axis = _window_axis(curve)
    for axis in (loss_axis, window_axis):
        _draw_grid(pen, x_axis, axis)
    for number, series in enumerate(curve.series):
        _draw_series(pen, x_axis, loss_axis, series, COLOURS[number % len(COLOURS)])
    _draw_window_sizes(pen, x_axis, window_axis, curve)
    _draw_labels(pen, x_axis, loss_axis, window_axis, curve, name)
    return canvas.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def _steps_axis(curve: LossCurve) -> ChartAxis:
    held_out = [step for series in curve.series for step, _ in series.held_out]
    low, high = min([*held_out, float(curve.steps[0])]), max([*held_out, float(curve.steps[-1])])
    if high == low:
        low, high = low - 1, high + 1
    return linear_axis(low, high, LEFT * SUPERSAMPLING, (WIDTH - RIGHT) * SUPERSAMPLING, whole_numbers=True)


def _loss_axis(curve: LossCurve) -> ChartAxis:
    """From the smallest to the largest trend or held-out loss, with most of the single steps in between."""
    floor_px, top_px = (HEIGHT - BOTTOM - WINDOW_HEIGHT - PANEL_GAP) * SUPERSAMPLING, TOP * SUPERSAMPLING
    shown = [loss for series in curve.series for loss in _losses_to_show(series)]
    if not shown:
        return linear_axis(0.0, 1.0, floor_px, top_px)
    low, high = min(shown), max(shown)
    if low > 0 and high / low > 20:
        return log_axis(low, high, floor_px, top_px)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return linear_axis(max(0.0, low - margin) if low >= 0 else low - margin, high + margin, floor_px, top_px)


def _losses_to_show(series: LossSeries) -> Iterable[float]:
    yield from (loss for _, loss in series.held_out)
    if len(series.losses):
        trend = smooth_losses(series.losses)
        yield from (float(trend.min()), float(trend.max()))
        yield from map(float, np.quantile(series.losses, (0.01, 0.98)))


def _window_axis(curve: LossCurve) -> ChartAxis:
    bottom = (HEIGHT - BOTTOM) * SUPERSAMPLING
    highest = max(1.0, float(curve.windows.max()))
    return linear_axis(
        0.0, highest * 1.15, bottom, bottom - WINDOW_HEIGHT * SUPERSAMPLING, whole_numbers=True, few_ticks=True
    )


def _draw_grid(pen: ImageDraw, x_axis: ChartAxis, y_axis: ChartAxis) -> None:
    left, right = x_axis.low_px, x_axis.high_px
    for tick in y_axis.ticks:
        y = y_axis.to_pixel(tick)
        pen.line((left, y, right, y), fill=RULE, width=SUPERSAMPLING)
        text = y_axis.tick_label(tick)
        pen.text(
            (left - 8 * SUPERSAMPLING - text_width(text, 13 * SUPERSAMPLING), y - 8 * SUPERSAMPLING),
            text,
            MUTED,
            load_font(13 * SUPERSAMPLING),
        )
    for tick in x_axis.ticks:
        x = x_axis.to_pixel(tick)
        pen.line((x, y_axis.low_px, x, y_axis.high_px), fill="#efeeea", width=SUPERSAMPLING)
    pen.line((left, y_axis.low_px, right, y_axis.low_px), fill=MUTED, width=SUPERSAMPLING)


def _draw_series(pen: ImageDraw, x_axis: ChartAxis, y_axis: ChartAxis, series: LossSeries, colour: str) -> None:
    if len(series.losses):
        _draw_single_steps(pen, x_axis, y_axis, series, _pale_colour(colour))
        trend = smooth_losses(series.losses)
        line = [
            (x_axis.to_pixel(s), y_axis.to_clamped_pixel(v)) for s, v in _thin_out_points(x_axis, series.steps, trend)
        ]
        if len(line) > 1:
            pen.line(line, fill=colour, width=3 * SUPERSAMPLING, joint="curve")
        else:
            _draw_dot(pen, *line[0], colour, 3)
    for step, loss in series.held_out:
        _draw_dot(pen, x_axis.to_pixel(step), y_axis.to_clamped_pixel(loss), colour, 5, ring=True)


def _draw_single_steps(pen: ImageDraw, x_axis: ChartAxis, y_axis: ChartAxis, series: LossSeries, colour: str) -> None:
    """Each step; where there are several in a column of pixels, their range. A triangle marks what lies above."""
    width = (x_axis.high_px - x_axis.low_px) / (x_axis.high - x_axis.low)
    columns = np.round((x_axis.low_px + (series.steps - x_axis.low) * width) / SUPERSAMPLING).astype(np.int64)
    first = np.concatenate([[0], np.flatnonzero(np.diff(columns)) + 1])
    lows, highs = np.minimum.reduceat(series.losses, first), np.maximum.reduceat(series.losses, first)
    path: list[tuple[float, float]] = []
    for column, low, high in zip(columns[first].tolist(), lows.tolist(), highs.tolist(), strict=True):
        x = column * SUPERSAMPLING
        ends = sorted((y_axis.to_clamped_pixel(high), y_axis.to_clamped_pixel(low)), reverse=len(path) % 4 == 2)
        path += [(x, y) for y in ends]
        if y_axis.is_above(high):
            y = y_axis.high_px
            pen.polygon(
                [(x - 4 * SUPERSAMPLING, y), (x + 4 * SUPERSAMPLING, y), (x, y - 6 * SUPERSAMPLING)], fill=colour
            )
    for begin, end in pairwise(path):
        pen.line((*begin, *end), fill=colour, width=SUPERSAMPLING)


def _thin_out_points(x_axis: ChartAxis, steps: Floats, values: Floats) -> list[tuple[float, float]]:
    """At most one point for every pixel: more would only slow the drawing."""
    every = max(1, len(steps) // (WIDTH - LEFT - RIGHT))
    picked = [*range(0, len(steps), every)]
    if picked[-1] != len(steps) - 1:
        picked.append(len(steps) - 1)
    return [(float(steps[i]), float(values[i])) for i in picked]


def _draw_window_sizes(pen: ImageDraw, x_axis: ChartAxis, y_axis: ChartAxis, curve: LossCurve) -> None:
    """The window's size as a staircase: it holds until the step at which it changes."""
    change = np.flatnonzero(np.diff(curve.windows)) + 1
    edges = [0, *change.tolist(), len(curve.steps)]
    path: list[tuple[float, float]] = []
    for begin, end in pairwise(edges):
        y = y_axis.to_pixel(float(curve.windows[begin]))
        right = (
            x_axis.to_pixel(float(curve.steps[end]))
            if end < len(curve.steps)
            else x_axis.to_pixel(float(curve.steps[-1]))
        )
        path += [(x_axis.to_pixel(float(curve.steps[begin])), y), (right, y)]
    pen.line(path, fill=WINDOW_COLOUR, width=2 * SUPERSAMPLING)


def _draw_labels(
    pen: ImageDraw, x_axis: ChartAxis, loss_axis: ChartAxis, window_axis: ChartAxis, curve: LossCurve, name: str
) -> None:
    """Title, names of the axes, legend."""
    title = shorten_line(drawable_text(name), (WIDTH - LEFT - RIGHT) * SUPERSAMPLING, 22 * SUPERSAMPLING)
    pen.text((LEFT * SUPERSAMPLING, 16 * SUPERSAMPLING), title, INK, load_font(22 * SUPERSAMPLING))
    note = f"loss by step; {len(curve.steps):,} steps, {curve.samples:,} samples"
    if curve.not_finite:
        note += f"; {curve.not_finite} not finite"
    pen.text((LEFT * SUPERSAMPLING, 48 * SUPERSAMPLING), note, MUTED, load_font(14 * SUPERSAMPLING))
    _draw_legend(pen, curve, LEFT + text_width(note, 14) + 36)
    for axis, word in ((loss_axis, "loss"), (window_axis, "window")):
        pen.text((16 * SUPERSAMPLING, axis.high_px - 22 * SUPERSAMPLING), word, MUTED, load_font(13 * SUPERSAMPLING))
    for tick in x_axis.ticks:
        text = x_axis.tick_label(tick)
        x = min(
            x_axis.to_pixel(tick) - text_width(text, 13 * SUPERSAMPLING) / 2,
            WIDTH * SUPERSAMPLING - text_width(text, 13 * SUPERSAMPLING) - 4,
        )
        pen.text((x, window_axis.low_px + 8 * SUPERSAMPLING), text, MUTED, load_font(13 * SUPERSAMPLING))
    pen.text(
        (x_axis.low_px, window_axis.low_px + 28 * SUPERSAMPLING), "optimizer step", MUTED, load_font(13 * SUPERSAMPLING)
    )


def _draw_legend(pen: ImageDraw, curve: LossCurve, left: float) -> None:
    entries: list[tuple[str, Callable[[float, float], None]]] = []
    for number, series in enumerate(curve.series):
        entries.append((drawable_text(series.name), _stroke_drawer(pen, COLOURS[number % len(COLOURS)])))
    if any(series.held_out for series in curve.series):
        entries.append(("held-out", lambda x, y: _draw_dot(pen, x + 11 * SUPERSAMPLING, y, MUTED, 5, ring=True)))
    x, y = left * SUPERSAMPLING, 57 * SUPERSAMPLING
    for text, mark in entries:
        mark(x, y)
        pen.text((x + 30 * SUPERSAMPLING, y - 9 * SUPERSAMPLING), text, INK, load_font(14 * SUPERSAMPLING))
        x += 30 * SUPERSAMPLING + text_width(text, 14 * SUPERSAMPLING) + 22 * SUPERSAMPLING


def _stroke_drawer(pen: ImageDraw, colour: str) -> Callable[[float, float], None]:
    return lambda x, y: pen.line((x, y, x + 22 * SUPERSAMPLING, y), fill=colour, width=3 * SUPERSAMPLING)


def _draw_dot(pen: ImageDraw, x: float, y: float, colour: str, radius: int, ring: bool = False) -> None:
    r = radius * SUPERSAMPLING
    pen.ellipse((x - r, y - r, x + r, y + r), fill=CARD if ring else colour, outline=colour, width=2 * SUPERSAMPLING)


def _pale_colour(colour: str) -> str:
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * PALE_SHARE):02x}" for part in parts)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    return np.array([p[0] for p in points], np.float64), np.array([p[1] for p in points], np.float64)


def _finite_number(value: JSON) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)

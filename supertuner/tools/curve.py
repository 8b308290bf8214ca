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
from supertuner.sinks.drawing import CARD, INK, QUIET, RULE, drawable, font, png_bytes, sheet_of, shortened, text_width
from supertuner.sinks.jsonlines import read_lines
from supertuner.tools.axes import Axis, linear, logarithmic

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

HELD_OUT = "validation.jsonl"
SCALE = 2
"""Drawn this much larger and then made smaller, which smooths the lines."""
WIDTH, HEIGHT = 1280, 720
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 84, 52
WINDOW_HEIGHT, BETWEEN = 96, 46
COLOURS = ("#2f6fb3", "#d1603d", "#3f8f5b", "#8a5fb0", "#b0892f")
PALE = 0.62
"""How far a single step's line is from its colour towards white."""
WINDOW_COLOUR = "#6b7280"
FEWEST = 8
"""Steps below which there is no trend to speak of."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Series:
    """The losses of one expert."""

    name: str
    steps: Floats
    losses: Floats
    held_out: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Curve:
    """What a picture is drawn of."""

    series: tuple[Series, ...]
    steps: Floats
    windows: Floats
    not_finite: int = 0
    samples: int = 0


def draw_curve(loss_log: Path, out: Path, held_out: Path | None = None) -> None:
    """Write the picture of `loss_log` to `out` as PNG; held-out losses are looked for beside the log."""
    curve = read_curve(loss_log, loss_log.with_name(HELD_OUT) if held_out is None else held_out)
    picture = png_bytes(draw(curve, loss_log.absolute().parent.name))
    try:
        write_bytes(out, picture)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written: {error.strerror}") from error


def read_curve(loss_log: Path, held_out: Path) -> Curve:
    records = list(read_lines(loss_log))
    if not records:
        raise RunFolderError(f"{loss_log} has no line yet: there is no curve to draw before the first step")
    try:
        return curve_of(records, list(read_lines(held_out)))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{loss_log}: a line lacks step, window, expert or loss ({error})") from error


def curve_of(records: Sequence[Mapping[str, JSON]], held_out: Sequence[Mapping[str, JSON]]) -> Curve:
    """Losses and held-out means by expert, in the order in which experts appear; losses that are None are counted."""
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        own = points.setdefault(str(record["expert"]), [])
        if record["loss"] is not None:
            own.append((_number(record["step"]), _number(record["loss"])))
    means: dict[str, list[tuple[float, float]]] = {}
    for row in held_out:
        if row["level"] is None and row["loss"] is not None and row["expert"] is not None:
            means.setdefault(str(row["expert"]), []).append((_number(row["step"]), _number(row["loss"])))
    series = tuple(
        Series(name, *_columns(points.get(name, [])), tuple(means.get(name, []))) for name in {**points, **means}
    )
    steps, windows = _columns([(_number(r["step"]), _number(r["window"])) for r in records])
    missing = sum(record["loss"] is None for record in records)
    return Curve(series, steps, windows, missing, int(_number(records[-1]["samples"])))


def smoothed(losses: Floats) -> Floats:
    """The trend: a mean over neighbours on both sides, about a thirtieth of the run; ends lean on what they have.

    A loss counts at most three times the geometric mean around it, so that one bad step is not taken for a trend.
    """
    if len(losses) < FEWEST:
        return losses
    reach = max(1, len(losses) // 60)
    usual = np.exp(_running_mean(np.log(np.maximum(losses, 1e-12)), reach))
    return _running_mean(_running_mean(np.minimum(losses, 3 * usual), reach), reach)


def _running_mean(values: Floats, reach: int) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    low, high = np.maximum(0, place - reach), np.minimum(len(values), place + reach + 1)
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def draw(curve: Curve, name: str) -> Image:
    """The picture."""
    from PIL import Image

    sheet, pen = sheet_of(WIDTH * SCALE, HEIGHT * SCALE, CARD)
    across = _steps_axis(curve)
    upper = _loss_axis(curve)
    lower = _window_axis(curve)
    for axis in (upper, lower):
        _grid(pen, across, axis)
    for number, series in enumerate(curve.series):
        _series(pen, across, upper, series, COLOURS[number % len(COLOURS)])
    _windows(pen, across, lower, curve)
    _words(pen, across, upper, lower, curve, name)
    return sheet.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def _steps_axis(curve: Curve) -> Axis:
    held_out = [step for series in curve.series for step, _ in series.held_out]
    low, high = min([*held_out, float(curve.steps[0])]), max([*held_out, float(curve.steps[-1])])
    if high == low:
        low, high = low - 1, high + 1
    return linear(low, high, LEFT * SCALE, (WIDTH - RIGHT) * SCALE, whole=True)


def _loss_axis(curve: Curve) -> Axis:
    """From the smallest to the largest trend or held-out loss, with most of the single steps in between."""
    floor_px, top_px = (HEIGHT - BOTTOM - WINDOW_HEIGHT - BETWEEN) * SCALE, TOP * SCALE
    shown = [loss for series in curve.series for loss in _important(series)]
    if not shown:
        return linear(0.0, 1.0, floor_px, top_px)
    low, high = min(shown), max(shown)
    if low > 0 and high / low > 20:
        return logarithmic(low, high, floor_px, top_px)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return linear(max(0.0, low - margin) if low >= 0 else low - margin, high + margin, floor_px, top_px)


def _important(series: Series) -> Iterable[float]:
    yield from (loss for _, loss in series.held_out)
    if len(series.losses):
        trend = smoothed(series.losses)
        yield from (float(trend.min()), float(trend.max()))
        yield from map(float, np.quantile(series.losses, (0.01, 0.98)))


def _window_axis(curve: Curve) -> Axis:
    bottom = (HEIGHT - BOTTOM) * SCALE
    highest = max(1.0, float(curve.windows.max()))
    return linear(0.0, highest * 1.15, bottom, bottom - WINDOW_HEIGHT * SCALE, whole=True, few=True)


def _grid(pen: ImageDraw, across: Axis, axis: Axis) -> None:
    left, right = across.low_px, across.high_px
    for tick in axis.ticks:
        y = axis.at(tick)
        pen.line((left, y, right, y), fill=RULE, width=SCALE)
        text = axis.text(tick)
        pen.text((left - 8 * SCALE - text_width(text, 13 * SCALE), y - 8 * SCALE), text, QUIET, font(13 * SCALE))
    for tick in across.ticks:
        x = across.at(tick)
        pen.line((x, axis.low_px, x, axis.high_px), fill="#efeeea", width=SCALE)
    pen.line((left, axis.low_px, right, axis.low_px), fill=QUIET, width=SCALE)


def _series(pen: ImageDraw, across: Axis, axis: Axis, series: Series, colour: str) -> None:
    if len(series.losses):
        _thin(pen, across, axis, series, _pale(colour))
        trend = smoothed(series.losses)
        line = [(across.at(s), axis.clamped(v)) for s, v in _few_points(across, series.steps, trend)]
        if len(line) > 1:
            pen.line(line, fill=colour, width=3 * SCALE, joint="curve")
        else:
            _dot(pen, *line[0], colour, 3)
    for step, loss in series.held_out:
        _dot(pen, across.at(step), axis.clamped(loss), colour, 5, ring=True)


def _thin(pen: ImageDraw, across: Axis, axis: Axis, series: Series, colour: str) -> None:
    """Each step; where there are several in a column of pixels, their range. A triangle marks what lies above."""
    width = (across.high_px - across.low_px) / (across.high - across.low)
    columns = np.round((across.low_px + (series.steps - across.low) * width) / SCALE).astype(np.int64)
    first = np.concatenate([[0], np.flatnonzero(np.diff(columns)) + 1])
    lows, highs = np.minimum.reduceat(series.losses, first), np.maximum.reduceat(series.losses, first)
    path: list[tuple[float, float]] = []
    for column, low, high in zip(columns[first].tolist(), lows.tolist(), highs.tolist(), strict=True):
        x = column * SCALE
        ends = sorted((axis.clamped(high), axis.clamped(low)), reverse=len(path) % 4 == 2)
        path += [(x, y) for y in ends]
        if axis.is_above(high):
            y = axis.high_px
            pen.polygon([(x - 4 * SCALE, y), (x + 4 * SCALE, y), (x, y - 6 * SCALE)], fill=colour)
    for begin, end in pairwise(path):
        pen.line((*begin, *end), fill=colour, width=SCALE)


def _few_points(across: Axis, steps: Floats, values: Floats) -> list[tuple[float, float]]:
    """At most one point for every pixel: more would only slow the drawing."""
    every = max(1, len(steps) // (WIDTH - LEFT - RIGHT))
    picked = [*range(0, len(steps), every)]
    if picked[-1] != len(steps) - 1:
        picked.append(len(steps) - 1)
    return [(float(steps[i]), float(values[i])) for i in picked]


def _windows(pen: ImageDraw, across: Axis, axis: Axis, curve: Curve) -> None:
    """The window's size as a staircase: it holds until the step at which it changes."""
    change = np.flatnonzero(np.diff(curve.windows)) + 1
    edges = [0, *change.tolist(), len(curve.steps)]
    path: list[tuple[float, float]] = []
    for begin, end in pairwise(edges):
        y = axis.at(float(curve.windows[begin]))
        right = across.at(float(curve.steps[end])) if end < len(curve.steps) else across.at(float(curve.steps[-1]))
        path += [(across.at(float(curve.steps[begin])), y), (right, y)]
    pen.line(path, fill=WINDOW_COLOUR, width=2 * SCALE)


def _words(pen: ImageDraw, across: Axis, upper: Axis, lower: Axis, curve: Curve, name: str) -> None:
    """Title, names of the axes, legend."""
    title = shortened(drawable(name), (WIDTH - LEFT - RIGHT) * SCALE, 22 * SCALE)
    pen.text((LEFT * SCALE, 16 * SCALE), title, INK, font(22 * SCALE))
    note = f"loss by step; {len(curve.steps):,} steps, {curve.samples:,} samples"
    if curve.not_finite:
        note += f"; {curve.not_finite} not finite"
    pen.text((LEFT * SCALE, 48 * SCALE), note, QUIET, font(14 * SCALE))
    _legend(pen, curve, LEFT + text_width(note, 14) + 36)
    for axis, word in ((upper, "loss"), (lower, "window")):
        pen.text((16 * SCALE, axis.high_px - 22 * SCALE), word, QUIET, font(13 * SCALE))
    for tick in across.ticks:
        text = across.text(tick)
        x = min(across.at(tick) - text_width(text, 13 * SCALE) / 2, WIDTH * SCALE - text_width(text, 13 * SCALE) - 4)
        pen.text((x, lower.low_px + 8 * SCALE), text, QUIET, font(13 * SCALE))
    pen.text((across.low_px, lower.low_px + 28 * SCALE), "optimizer step", QUIET, font(13 * SCALE))


def _legend(pen: ImageDraw, curve: Curve, left: float) -> None:
    entries: list[tuple[str, Callable[[float, float], None]]] = []
    for number, series in enumerate(curve.series):
        entries.append((drawable(series.name), _stroke(pen, COLOURS[number % len(COLOURS)])))
    if any(series.held_out for series in curve.series):
        entries.append(("held-out", lambda x, y: _dot(pen, x + 11 * SCALE, y, QUIET, 5, ring=True)))
    x, y = left * SCALE, 57 * SCALE
    for text, mark in entries:
        mark(x, y)
        pen.text((x + 30 * SCALE, y - 9 * SCALE), text, INK, font(14 * SCALE))
        x += 30 * SCALE + text_width(text, 14 * SCALE) + 22 * SCALE


def _stroke(pen: ImageDraw, colour: str) -> Callable[[float, float], None]:
    return lambda x, y: pen.line((x, y, x + 22 * SCALE, y), fill=colour, width=3 * SCALE)


def _dot(pen: ImageDraw, x: float, y: float, colour: str, radius: int, ring: bool = False) -> None:
    r = radius * SCALE
    pen.ellipse((x - r, y - r, x + r, y + r), fill=CARD if ring else colour, outline=colour, width=2 * SCALE)


def _pale(colour: str) -> str:
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * PALE):02x}" for part in parts)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    return np.array([p[0] for p in points], np.float64), np.array([p[1] for p in points], np.float64)


def _number(value: JSON) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)

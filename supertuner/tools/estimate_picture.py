"""Draws a forecast: the memory of a step as it goes, by class, under the machine's limit; and what other settings take.

Both charts are of modelled figures and say so. Classes are stacked from what always stays to what comes and goes, each
in one colour everywhere, so that the two charts and the table of the command can be read together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from supertuner.core.types import GIB, KIB, MIB, bytes_text
from supertuner.plan.forecast.report import duration
from supertuner.sinks.drawing import CARD, INK, QUIET, RULE, drawable, font, sheet_of, shortened, text_width
from supertuner.tools.axes import Axis, linear

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SCALE = 2
"""Drawn this much larger and then made smaller, which smooths the edges."""
WIDTH = 1280
LEFT, RIGHT, TOP, BOTTOM = 92, 232, 96, 60
STEP_HEIGHT, WHAT_IF_HEIGHT = 640, 520
COLOURS: Mapping[str, str] = {
    "frozen weights": "#4a6d8c",
    "idle experts": "#a9bccb",
    "encoders": "#7a9a57",
    "trained weights": "#2f9c95",
    "gradients": "#d98c3f",
    "optimizer state": "#8a5fb0",
    "batch": "#6b7280",
    "activations": "#e3c565",
    "temporaries": "#c8553d",
}
"""In the order in which they are stacked."""
OTHER = "#9aa0a6"
LIMIT = "#b3261e"
PALE = "#f3f1ea"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Passing:
    """A stretch of the step with a name: the forward pass, the backward pass, the update."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, eq=False, slots=True)
class Course:
    """Bytes by class from moment to moment."""

    title: str
    note: str
    edges: Floats
    """Where each moment begins, and where the last one ends, in the unit of the axis; never falling."""
    bytes_by_class: Mapping[str, Floats]
    """For each class one value per moment."""
    passes: tuple[Passing, ...]
    unit: str
    """What the axis counts: `seconds, modelled`, `operators`."""
    limit_bytes: int | None
    limit_name: str


@dataclass(frozen=True, slots=True)
class Bar:
    """What one value of a setting takes."""

    label: str
    bytes_by_class: Mapping[str, int]
    seconds: float | None
    """Of a step, modelled; None: not known."""
    current: bool = False
    """What the configuration says."""
    note: str = ""
    """Below its time: samples a second, or why there is nothing to see."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    title: str
    bars: tuple[Bar, ...]
    limit_bytes: int | None
    limit_name: str


def draw_estimate(step: Course | None, what_ifs: Sequence[WhatIf] = ()) -> Image:
    """One picture of all charts, below each other."""
    from PIL import Image

    heights = [*([STEP_HEIGHT] if step else []), *[WHAT_IF_HEIGHT] * len(what_ifs)]
    sheet, pen = sheet_of(WIDTH * SCALE, max(1, sum(heights)) * SCALE, CARD)
    top = 0
    if step is not None:
        _draw_course(pen, step, top)
        top += STEP_HEIGHT
    for what_if in what_ifs:
        if top:
            pen.line((0, top * SCALE, WIDTH * SCALE, top * SCALE), fill=RULE, width=2 * SCALE)
        _draw_what_if(pen, what_if, top)
        top += WHAT_IF_HEIGHT
    return sheet.resize((WIDTH, max(1, sum(heights))), Image.Resampling.LANCZOS)


def stacked(names: Sequence[str]) -> list[str]:
    """Classes in the order in which they are stacked; those without a colour of their own come last."""
    known = [name for name in COLOURS if name in names]
    return [*known, *sorted(name for name in names if name not in COLOURS)]


def _draw_course(pen: ImageDraw, course: Course, top: int) -> None:
    order = stacked([name for name, values in course.bytes_by_class.items() if values.max(initial=0.0) > 0])
    total = sum((course.bytes_by_class[name] for name in order), np.zeros(len(course.edges) - 1))
    highest = max(float(total.max(initial=0.0)), 1.0)
    down = _bytes_axis(max(highest, float(course.limit_bytes or 0)), highest, top, STEP_HEIGHT, course.limit_bytes)
    low, high = float(course.edges[0]), float(course.edges[-1])
    across = linear(low, high if high > low else low + 1, LEFT * SCALE, (WIDTH - RIGHT) * SCALE)
    _title(pen, course.title, course.note, top)
    _passes(pen, course.passes, across, down)
    _grid(pen, across, down, _unit(highest))
    _areas(pen, course, order, across, down)
    for tick in across.ticks:
        text = across.text(tick)
        x = across.at(tick) - text_width(text, 13 * SCALE) / 2
        pen.text((x, down.low_px + 8 * SCALE), text, QUIET, font(13 * SCALE))
    pen.text((across.low_px, down.low_px + 30 * SCALE), drawable(course.unit), QUIET, font(13 * SCALE))
    _limit(pen, course.limit_bytes, course.limit_name, down)
    at = int(total.argmax()) if len(total) else 0
    _peak(pen, across.at(float(course.edges[at] + course.edges[at + 1]) / 2), down.clamped(highest), highest)
    at_peak = {name: float(course.bytes_by_class[name][at]) for name in order}
    _legend(pen, "at the peak", at_peak, highest, top)


def _areas(pen: ImageDraw, course: Course, order: Sequence[str], across: Axis, down: Axis) -> None:
    """One column of pixels at a time, each as high as its fullest moment: no peak is lost however many moments are in
    a column."""
    first, last = int(across.low_px), int(across.high_px)
    columns = np.arange(first, last + 1, SCALE, dtype=np.float64)  # of the finished picture
    low, high = across.low, across.high
    begin = low + (columns - first) / max(1, last - first) * (high - low)
    owner = np.clip(np.searchsorted(course.edges, begin, side="right") - 1, 0, len(course.edges) - 2)
    until = np.clip(np.searchsorted(course.edges, np.append(begin[1:], high), side="left"), owner + 1, None)
    values = np.stack([course.bytes_by_class[name] for name in order]) if order else np.zeros((0, 1))
    total = values.sum(axis=0)
    for column, one, end in zip(columns.tolist(), owner.tolist(), until.tolist(), strict=True):
        fullest = one + int(total[one:end].argmax())
        y, below = down.low_px, 0.0
        for name, value in zip(order, values[:, fullest].tolist(), strict=True):
            below += value
            above = down.clamped(below)
            if above < y:
                pen.rectangle((column, above, column + SCALE - 1, y), fill=COLOURS.get(name, OTHER))
            y = above


def _passes(pen: ImageDraw, passes: Sequence[Passing], across: Axis, down: Axis) -> None:
    for number, one in enumerate(passes):
        left, right = across.clamped(one.begin), across.clamped(one.end)
        if number % 2 == 0:
            pen.rectangle((left, down.high_px, right, down.low_px), fill=PALE)
        name = drawable(one.name)
        width = text_width(name, 13 * SCALE)
        if width <= right - left or number == len(passes) - 1:  # the last one may stand out to the left
            x = min((left + right - width) / 2, across.high_px - width)
            pen.text((x, down.high_px - 20 * SCALE), name, QUIET, font(13 * SCALE))


def _draw_what_if(pen: ImageDraw, what_if: WhatIf, top: int) -> None:
    totals = [sum(bar.bytes_by_class.values()) for bar in what_if.bars]
    highest = float(max([*totals, 1]))
    floor = top + WHAT_IF_HEIGHT - BOTTOM - 44
    down = _bytes_axis(
        max(highest, float(what_if.limit_bytes or 0)), highest, top, floor - top + BOTTOM, what_if.limit_bytes
    )
    across = linear(0.0, float(max(1, len(what_if.bars))), LEFT * SCALE, (WIDTH - RIGHT) * SCALE)
    _title(
        pen,
        what_if.title,
        "the fullest phase with everything on the GPU, and the time of a step as the run does it: modelled",
        top,
    )
    _grid(pen, across, down, _unit(highest), upright=False)
    order = stacked(sorted({name for bar in what_if.bars for name, size in bar.bytes_by_class.items() if size > 0}))
    room = (across.high_px - across.low_px) / max(1, len(what_if.bars))
    middles = [across.low_px + (number + 0.5) * room for number in range(len(what_if.bars))]
    tops = [
        _bar(pen, bar, order, middle, min(room * 0.56, 150 * SCALE), down)
        for bar, middle in zip(what_if.bars, middles, strict=True)
    ]
    _limit(pen, what_if.limit_bytes, what_if.limit_name, down)
    for bar, middle, y in zip(what_if.bars, middles, tops, strict=True):
        _bar_words(pen, bar, middle, room, y, down)
    current = next((bar for bar in what_if.bars if bar.current), None)
    shown = current or max(what_if.bars, key=lambda bar: sum(bar.bytes_by_class.values()), default=None)
    if shown is not None:
        at = {name: float(shown.bytes_by_class.get(name, 0)) for name in order}
        _legend(pen, f"at {shown.label}", at, float(sum(shown.bytes_by_class.values())), top)


def _bar(pen: ImageDraw, bar: Bar, order: Sequence[str], middle: float, width: float, down: Axis) -> float:
    """The bar; where it ends."""
    left, right, y, below = middle - width / 2, middle + width / 2, down.low_px, 0.0
    for name in order:
        below += bar.bytes_by_class.get(name, 0)
        above = down.clamped(below)
        if above < y:
            pen.rectangle((left, above, right, max(above, y - 1)), fill=COLOURS.get(name, OTHER))
        y = above
    return y


def _bar_words(pen: ImageDraw, bar: Bar, middle: float, room: float, y: float, down: Axis) -> None:
    """Its size above it, over the line of the limit; its value, time and note below."""
    if total := sum(bar.bytes_by_class.values()):
        text = bytes_text(total)
        left = middle - text_width(text, 14 * SCALE) / 2
        pen.rectangle((left - 4 * SCALE, y - 22 * SCALE, 2 * middle - left + 4 * SCALE, y - 4 * SCALE), fill=CARD)
        pen.text((left, y - 22 * SCALE), text, INK, font(14 * SCALE))
    label = bar.label + (" (as configured)" if bar.current else "")
    seconds = "" if bar.seconds is None else f"{duration(bar.seconds)} a step"
    for line, size, colour, at in (
        (label, 15, INK, 10),
        (seconds or bar.note, 13, QUIET, 32),
        (bar.note if seconds else "", 13, QUIET, 50),
    ):
        text = shortened(drawable(line), int(room - 6 * SCALE), size * SCALE)
        place = (middle - text_width(text, size * SCALE) / 2, down.low_px + at * SCALE)
        pen.text(place, text, colour, font(size * SCALE))


def _bytes_axis(reach: float, highest: float, top: int, height: int, limit: int | None) -> Axis:
    """Up to the limit or the highest value, and a little more. A limit far above a small step would flatten it: then
    the axis ends above the step, and the limit is told in words."""
    if limit is not None and limit > 6 * highest:
        reach = highest
    unit = _unit(highest)[0]
    axis = linear(0.0, reach * 1.12 / unit, (top + height - BOTTOM) * SCALE, (top + TOP) * SCALE)
    ticks = tuple(tick * unit for tick in axis.ticks)
    return Axis(0.0, reach * 1.12, axis.low_px, axis.high_px, ticks, axis.scale, axis.decimals)


def _unit(highest: float) -> tuple[float, str]:
    return next(
        (unit for unit in ((float(GIB), "GiB"), (float(MIB), "MiB")) if highest >= unit[0]), (float(KIB), "KiB")
    )


def _grid(pen: ImageDraw, across: Axis, down: Axis, unit: tuple[float, str], upright: bool = True) -> None:
    left, right = across.low_px, across.high_px
    for tick in down.ticks:
        y = down.at(tick)
        pen.line((left, y, right, y), fill=RULE, width=SCALE)
        text = f"{tick / unit[0]:,.{down.decimals or 0}f}"
        pen.text((left - 8 * SCALE - text_width(text, 13 * SCALE), y - 8 * SCALE), text, QUIET, font(13 * SCALE))
    if upright:
        for tick in across.ticks:
            pen.line((across.at(tick), down.low_px, across.at(tick), down.high_px), fill="#efeeea", width=SCALE)
    pen.line((left, down.low_px, right, down.low_px), fill=QUIET, width=SCALE)
    pen.text((16 * SCALE, down.high_px - 20 * SCALE), unit[1], QUIET, font(13 * SCALE))


def _limit(pen: ImageDraw, limit: int | None, name: str, down: Axis) -> None:
    """A broken line across the chart, with its name; words alone where the line would be far above."""
    if limit is None:
        return
    left, right = LEFT * SCALE, (WIDTH - RIGHT) * SCALE
    text = shortened(drawable(f"{name}: {bytes_text(limit)}"), right - left, 13 * SCALE)
    if down.is_above(float(limit)):  # in the margin: there is nothing of the chart that it could be beside
        place = ((WIDTH - RIGHT + 22) * SCALE, down.high_px - 22 * SCALE)
        pen.text(place, _fitted(f"{name}: {bytes_text(limit)}", RIGHT - 26), LIMIT, font(13 * SCALE))
        return
    y = down.at(float(limit))
    for x in range(left, right, 14 * SCALE):
        pen.line((x, y, min(right, x + 9 * SCALE), y), fill=LIMIT, width=2 * SCALE)
    width = text_width(text, 13 * SCALE)
    pen.rectangle((left + 6 * SCALE, y - 20 * SCALE, left + 14 * SCALE + width, y - 3 * SCALE), fill=CARD)
    pen.text((left + 10 * SCALE, y - 20 * SCALE), text, LIMIT, font(13 * SCALE))


def _peak(pen: ImageDraw, x: float, y: float, highest: float) -> None:
    text = f"peak {bytes_text(highest)}"
    width = text_width(text, 14 * SCALE)
    left = min(max(x - width / 2, LEFT * SCALE + 4 * SCALE), (WIDTH - RIGHT) * SCALE - width - 4 * SCALE)
    box = (left - 5 * SCALE, y - 28 * SCALE, left + width + 5 * SCALE, y - 8 * SCALE)
    pen.polygon([(x - 5 * SCALE, y - 8 * SCALE), (x + 5 * SCALE, y - 8 * SCALE), (x, y - 1 * SCALE)], fill=INK)
    pen.rectangle(box, fill=INK)
    pen.text((left, y - 27 * SCALE), text, CARD, font(14 * SCALE))


def _legend(pen: ImageDraw, heading: str, at: Mapping[str, float], total: float, top: int) -> None:
    """Classes from the top of the stack downwards, with what they take."""
    left, y = (WIDTH - RIGHT + 22) * SCALE, (top + TOP) * SCALE
    pen.text((left, y), _fitted(heading, RIGHT - 30), QUIET, font(13 * SCALE))
    for name in reversed(list(at)):
        y += 34 * SCALE
        square = (left, y + 3 * SCALE, left + 13 * SCALE, y + 16 * SCALE)
        pen.rectangle(square, fill=COLOURS.get(name, OTHER))
        pen.text((left + 22 * SCALE, y), _fitted(name, RIGHT - 60), INK, font(14 * SCALE))
        pen.text((left + 22 * SCALE, y + 16 * SCALE), bytes_text(at[name]), QUIET, font(12 * SCALE))
    y += 44 * SCALE
    pen.line((left, y - 5 * SCALE, (WIDTH - 20) * SCALE, y - 5 * SCALE), fill=RULE, width=SCALE)
    pen.text((left + 22 * SCALE, y), f"together {bytes_text(total)}", INK, font(14 * SCALE))


def _title(pen: ImageDraw, title: str, note: str, top: int) -> None:
    room = (WIDTH - LEFT - 24) * SCALE
    pen.text((LEFT * SCALE, (top + 16) * SCALE), shortened(drawable(title), room, 22 * SCALE), INK, font(22 * SCALE))
    pen.text((LEFT * SCALE, (top + 46) * SCALE), shortened(drawable(note), room, 14 * SCALE), QUIET, font(14 * SCALE))


def _fitted(text: str, width: int) -> str:
    return shortened(drawable(text), width * SCALE, 13 * SCALE)

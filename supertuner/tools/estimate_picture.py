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
from supertuner.plan.forecast.report import step_duration_text
from supertuner.sinks.drawing import (
    CARD,
    INK,
    MUTED,
    RULE,
    drawable_text,
    load_font,
    new_sheet,
    shorten_line,
    text_width,
)
from supertuner.tools.axes import ChartAxis, linear_axis

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
OTHER_COLOUR = "#9aa0a6"
LIMIT_COLOUR = "#b3261e"
BAND_COLOUR = "#f3f1ea"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PassBand:
    """A stretch of the step with a name: the forward pass, the backward pass, the update."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, eq=False, slots=True)
class StepMemoryChart:
    """Bytes by class from moment to moment."""

    title: str
    note: str
    edges: Floats
    """Where each moment begins, and where the last one ends, in the unit of the axis; never falling."""
    bytes_by_class: Mapping[str, Floats]
    """For each class one value per moment."""
    passes: tuple[PassBand, ...]
    unit: str
    """What the axis counts: `seconds, modelled`, `operators`."""
    limit_bytes: int | None
    limit_name: str


@dataclass(frozen=True, slots=True)
class WhatIfBar:
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
class WhatIfChart:
    title: str
    bars: tuple[WhatIfBar, ...]
    limit_bytes: int | None
    limit_name: str


def draw_estimate(step: StepMemoryChart | None, what_ifs: Sequence[WhatIfChart] = ()) -> Image:
    """One picture of all charts, below each other."""
    from PIL import Image

    heights = [*([STEP_HEIGHT] if step else []), *[WHAT_IF_HEIGHT] * len(what_ifs)]
    sheet, pen = new_sheet(WIDTH * SCALE, max(1, sum(heights)) * SCALE, CARD)
    top = 0
    if step is not None:
        _draw_step_memory(pen, step, top)
        top += STEP_HEIGHT
    for what_if in what_ifs:
        if top:
            pen.line((0, top * SCALE, WIDTH * SCALE, top * SCALE), fill=RULE, width=2 * SCALE)
        _draw_what_if(pen, what_if, top)
        top += WHAT_IF_HEIGHT
    return sheet.resize((WIDTH, max(1, sum(heights))), Image.Resampling.LANCZOS)


def stacking_order(names: Sequence[str]) -> list[str]:
    """Classes in the order in which they are stacked; those without a colour of their own come last."""
    known = [name for name in COLOURS if name in names]
    return [*known, *sorted(name for name in names if name not in COLOURS)]


def _draw_step_memory(pen: ImageDraw, chart: StepMemoryChart, top: int) -> None:
    order = stacking_order([name for name, values in chart.bytes_by_class.items() if values.max(initial=0.0) > 0])
    total = sum((chart.bytes_by_class[name] for name in order), np.zeros(len(chart.edges) - 1))
    highest = max(float(total.max(initial=0.0)), 1.0)
    down = _bytes_axis(max(highest, float(chart.limit_bytes or 0)), highest, top, STEP_HEIGHT, chart.limit_bytes)
    low, high = float(chart.edges[0]), float(chart.edges[-1])
    across = linear_axis(low, high if high > low else low + 1, LEFT * SCALE, (WIDTH - RIGHT) * SCALE)
    _draw_title(pen, chart.title, chart.note, top)
    _draw_passes(pen, chart.passes, across, down)
    _draw_grid(pen, across, down, _byte_unit(highest))
    _draw_areas(pen, chart, order, across, down)
    for tick in across.ticks:
        text = across.tick_label(tick)
        x = across.to_pixel(tick) - text_width(text, 13 * SCALE) / 2
        pen.text((x, down.low_px + 8 * SCALE), text, MUTED, load_font(13 * SCALE))
    pen.text((across.low_px, down.low_px + 30 * SCALE), drawable_text(chart.unit), MUTED, load_font(13 * SCALE))
    _draw_limit(pen, chart.limit_bytes, chart.limit_name, down)
    at = int(total.argmax()) if len(total) else 0
    _draw_peak(
        pen, across.to_pixel(float(chart.edges[at] + chart.edges[at + 1]) / 2), down.to_clamped_pixel(highest), highest
    )
    at_peak = {name: float(chart.bytes_by_class[name][at]) for name in order}
    _draw_legend(pen, "at the peak", at_peak, highest, top)


def _draw_areas(
    pen: ImageDraw, chart: StepMemoryChart, order: Sequence[str], across: ChartAxis, down: ChartAxis
) -> None:
    """One column of pixels at a time, each as high as its fullest moment: no peak is lost however many moments are in
    a column."""
    first, last = int(across.low_px), int(across.high_px)
    columns = np.arange(first, last + 1, SCALE, dtype=np.float64)  # of the finished picture
    low, high = across.low, across.high
    begin = low + (columns - first) / max(1, last - first) * (high - low)
    owner = np.clip(np.searchsorted(chart.edges, begin, side="right") - 1, 0, len(chart.edges) - 2)
    until = np.clip(np.searchsorted(chart.edges, np.append(begin[1:], high), side="left"), owner + 1, None)
    values = np.stack([chart.bytes_by_class[name] for name in order]) if order else np.zeros((0, 1))
    total = values.sum(axis=0)
    for column, one, end in zip(columns.tolist(), owner.tolist(), until.tolist(), strict=True):
        fullest = one + int(total[one:end].argmax())
        y, below = down.low_px, 0.0
        for name, value in zip(order, values[:, fullest].tolist(), strict=True):
            below += value
            above = down.to_clamped_pixel(below)
            if above < y:
                pen.rectangle((column, above, column + SCALE - 1, y), fill=COLOURS.get(name, OTHER_COLOUR))
            y = above


def _draw_passes(pen: ImageDraw, passes: Sequence[PassBand], across: ChartAxis, down: ChartAxis) -> None:
    for number, one in enumerate(passes):
        left, right = across.to_clamped_pixel(one.begin), across.to_clamped_pixel(one.end)
        if number % 2 == 0:
            pen.rectangle((left, down.high_px, right, down.low_px), fill=BAND_COLOUR)
        name = drawable_text(one.name)
        width = text_width(name, 13 * SCALE)
        if width <= right - left or number == len(passes) - 1:  # the last one may stand out to the left
            x = min((left + right - width) / 2, across.high_px - width)
            pen.text((x, down.high_px - 20 * SCALE), name, MUTED, load_font(13 * SCALE))


def _draw_what_if(pen: ImageDraw, what_if: WhatIfChart, top: int) -> None:
    totals = [sum(bar.bytes_by_class.values()) for bar in what_if.bars]
    highest = float(max([*totals, 1]))
    floor = top + WHAT_IF_HEIGHT - BOTTOM - 44
    down = _bytes_axis(
        max(highest, float(what_if.limit_bytes or 0)), highest, top, floor - top + BOTTOM, what_if.limit_bytes
    )
    across = linear_axis(0.0, float(max(1, len(what_if.bars))), LEFT * SCALE, (WIDTH - RIGHT) * SCALE)
    _draw_title(
        pen,
        what_if.title,
        "the fullest phase with everything on the GPU, and the time of a step as the run does it: modelled",
        top,
    )
    _draw_grid(pen, across, down, _byte_unit(highest), upright=False)
    order = stacking_order(
        sorted({name for bar in what_if.bars for name, size in bar.bytes_by_class.items() if size > 0})
    )
    bar_width = (across.high_px - across.low_px) / max(1, len(what_if.bars))
    middles = [across.low_px + (number + 0.5) * bar_width for number in range(len(what_if.bars))]
    tops = [
        _draw_bar(pen, bar, order, middle, min(bar_width * 0.56, 150 * SCALE), down)
        for bar, middle in zip(what_if.bars, middles, strict=True)
    ]
    _draw_limit(pen, what_if.limit_bytes, what_if.limit_name, down)
    for bar, middle, y in zip(what_if.bars, middles, tops, strict=True):
        _draw_bar_text(pen, bar, middle, bar_width, y, down)
    current = next((bar for bar in what_if.bars if bar.current), None)
    shown = current or max(what_if.bars, key=lambda bar: sum(bar.bytes_by_class.values()), default=None)
    if shown is not None:
        at = {name: float(shown.bytes_by_class.get(name, 0)) for name in order}
        _draw_legend(pen, f"at {shown.label}", at, float(sum(shown.bytes_by_class.values())), top)


def _draw_bar(
    pen: ImageDraw, bar: WhatIfBar, order: Sequence[str], middle: float, width: float, down: ChartAxis
) -> float:
    """The bar; where it ends."""
    left, right, y, below = middle - width / 2, middle + width / 2, down.low_px, 0.0
    for name in order:
        below += bar.bytes_by_class.get(name, 0)
        above = down.to_clamped_pixel(below)
        if above < y:
            pen.rectangle((left, above, right, max(above, y - 1)), fill=COLOURS.get(name, OTHER_COLOUR))
        y = above
    return y


def _draw_bar_text(
    pen: ImageDraw, bar: WhatIfBar, middle: float, available_width: float, y: float, down: ChartAxis
) -> None:
    """Its size above it, over the line of the limit; its value, time and note below."""
    if total := sum(bar.bytes_by_class.values()):
        text = bytes_text(total)
        left = middle - text_width(text, 14 * SCALE) / 2
        pen.rectangle((left - 4 * SCALE, y - 22 * SCALE, 2 * middle - left + 4 * SCALE, y - 4 * SCALE), fill=CARD)
        pen.text((left, y - 22 * SCALE), text, INK, load_font(14 * SCALE))
    label = bar.label + (" (as configured)" if bar.current else "")
    seconds = "" if bar.seconds is None else f"{step_duration_text(bar.seconds)} a step"
    for line, size, colour, at in (
        (label, 15, INK, 10),
        (seconds or bar.note, 13, MUTED, 32),
        (bar.note if seconds else "", 13, MUTED, 50),
    ):
        text = shorten_line(drawable_text(line), int(available_width - 6 * SCALE), size * SCALE)
        place = (middle - text_width(text, size * SCALE) / 2, down.low_px + at * SCALE)
        pen.text(place, text, colour, load_font(size * SCALE))


def _bytes_axis(reach: float, highest: float, top: int, height: int, limit: int | None) -> ChartAxis:
    """Up to the limit or the highest value, and a little more. A limit far above a small step would flatten it: then
    the axis ends above the step, and the limit is told in words."""
    if limit is not None and limit > 6 * highest:
        reach = highest
    unit = _byte_unit(highest)[0]
    axis = linear_axis(0.0, reach * 1.12 / unit, (top + height - BOTTOM) * SCALE, (top + TOP) * SCALE)
    ticks = tuple(tick * unit for tick in axis.ticks)
    return ChartAxis(0.0, reach * 1.12, axis.low_px, axis.high_px, ticks, axis.scale, axis.decimals)


def _byte_unit(highest: float) -> tuple[float, str]:
    return next(
        (unit for unit in ((float(GIB), "GiB"), (float(MIB), "MiB")) if highest >= unit[0]), (float(KIB), "KiB")
    )


def _draw_grid(
    pen: ImageDraw, across: ChartAxis, down: ChartAxis, unit: tuple[float, str], upright: bool = True
) -> None:
    left, right = across.low_px, across.high_px
    for tick in down.ticks:
        y = down.to_pixel(tick)
        pen.line((left, y, right, y), fill=RULE, width=SCALE)
        text = f"{tick / unit[0]:,.{down.decimals or 0}f}"
        pen.text((left - 8 * SCALE - text_width(text, 13 * SCALE), y - 8 * SCALE), text, MUTED, load_font(13 * SCALE))
    if upright:
        for tick in across.ticks:
            pen.line(
                (across.to_pixel(tick), down.low_px, across.to_pixel(tick), down.high_px), fill="#efeeea", width=SCALE
            )
    pen.line((left, down.low_px, right, down.low_px), fill=MUTED, width=SCALE)
    pen.text((16 * SCALE, down.high_px - 20 * SCALE), unit[1], MUTED, load_font(13 * SCALE))


def _draw_limit(pen: ImageDraw, limit: int | None, name: str, down: ChartAxis) -> None:
    """A broken line across the chart, with its name; words alone where the line would be far above."""
    if limit is None:
        return
    left, right = LEFT * SCALE, (WIDTH - RIGHT) * SCALE
    text = shorten_line(drawable_text(f"{name}: {bytes_text(limit)}"), right - left, 13 * SCALE)
    if down.is_above(float(limit)):  # in the margin: there is nothing of the chart that it could be beside
        place = ((WIDTH - RIGHT + 22) * SCALE, down.high_px - 22 * SCALE)
        pen.text(place, _shorten(f"{name}: {bytes_text(limit)}", RIGHT - 26), LIMIT_COLOUR, load_font(13 * SCALE))
        return
    y = down.to_pixel(float(limit))
    for x in range(left, right, 14 * SCALE):
        pen.line((x, y, min(right, x + 9 * SCALE), y), fill=LIMIT_COLOUR, width=2 * SCALE)
    width = text_width(text, 13 * SCALE)
    pen.rectangle((left + 6 * SCALE, y - 20 * SCALE, left + 14 * SCALE + width, y - 3 * SCALE), fill=CARD)
    pen.text((left + 10 * SCALE, y - 20 * SCALE), text, LIMIT_COLOUR, load_font(13 * SCALE))


def _draw_peak(pen: ImageDraw, x: float, y: float, highest: float) -> None:
    text = f"peak {bytes_text(highest)}"
    width = text_width(text, 14 * SCALE)
    left = min(max(x - width / 2, LEFT * SCALE + 4 * SCALE), (WIDTH - RIGHT) * SCALE - width - 4 * SCALE)
    box = (left - 5 * SCALE, y - 28 * SCALE, left + width + 5 * SCALE, y - 8 * SCALE)
    pen.polygon([(x - 5 * SCALE, y - 8 * SCALE), (x + 5 * SCALE, y - 8 * SCALE), (x, y - 1 * SCALE)], fill=INK)
    pen.rectangle(box, fill=INK)
    pen.text((left, y - 27 * SCALE), text, CARD, load_font(14 * SCALE))


def _draw_legend(pen: ImageDraw, heading: str, bytes_by_class: Mapping[str, float], total: float, top: int) -> None:
    """Classes from the top of the stack downwards, with what they take."""
    left, y = (WIDTH - RIGHT + 22) * SCALE, (top + TOP) * SCALE
    pen.text((left, y), _shorten(heading, RIGHT - 30), MUTED, load_font(13 * SCALE))
    for name in reversed(list(bytes_by_class)):
        y += 34 * SCALE
        square = (left, y + 3 * SCALE, left + 13 * SCALE, y + 16 * SCALE)
        pen.rectangle(square, fill=COLOURS.get(name, OTHER_COLOUR))
        pen.text((left + 22 * SCALE, y), _shorten(name, RIGHT - 60), INK, load_font(14 * SCALE))
        pen.text((left + 22 * SCALE, y + 16 * SCALE), bytes_text(bytes_by_class[name]), MUTED, load_font(12 * SCALE))
    y += 44 * SCALE
    pen.line((left, y - 5 * SCALE, (WIDTH - 20) * SCALE, y - 5 * SCALE), fill=RULE, width=SCALE)
    pen.text((left + 22 * SCALE, y), f"together {bytes_text(total)}", INK, load_font(14 * SCALE))


def _draw_title(pen: ImageDraw, title: str, note: str, top: int) -> None:
    available_width = (WIDTH - LEFT - 24) * SCALE
    pen.text(
        (LEFT * SCALE, (top + 16) * SCALE),
        shorten_line(drawable_text(title), available_width, 22 * SCALE),
        INK,
        load_font(22 * SCALE),
    )
    pen.text(
        (LEFT * SCALE, (top + 46) * SCALE),
        shorten_line(drawable_text(note), available_width, 14 * SCALE),
        MUTED,
        load_font(14 * SCALE),
    )


def _shorten(text: str, width: int) -> str:
    return shorten_line(drawable_text(text), width * SCALE, 13 * SCALE)

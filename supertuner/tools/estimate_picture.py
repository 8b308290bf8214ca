"""Draws a forecast: the memory of a step over time, by class of tensor, below the machine's limit; and what-if bars.

All figures are modelled, and the picture says so. Classes are stacked from what stays in memory to what comes and goes.
A class has the same colour everywhere, so that both charts and the command's table can be read together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from supertuner.core.types import GIB, KIB, MIB, bytes_text
from supertuner.plan.forecast.results import step_duration_text
from supertuner.sinks.drawing import CARD, INK, MUTED, RULE
from supertuner.sinks.plot_style import FAINT_RULE, add_axes, add_text, figure_png, new_figure, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 1280
LEFT, RIGHT, TOP, BOTTOM = 92, 232, 96, 60
"""Margins of the step chart in pixels; the legend is in the right one."""
STEP_HEIGHT, WHAT_IF_HEIGHT = 640, 520
PLOT_WIDTH = WIDTH - LEFT - RIGHT
BAR_TEXT_HEIGHT = 44
"""Additional height below what-if bars, for their times."""
MAX_BAR_WIDTH = 150
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
"""In the order in which classes are stacked."""
OTHER_COLOUR = "#9aa0a6"
LIMIT_COLOUR = "#b3261e"
BAND_COLOUR = "#f3f1ea"
EDGE_WIDTH = 0.3
"""Outline of areas and bars in points: a class too small for a row of pixels still shows as a thin line."""
FAR_LIMIT = 6
"""A limit more than this many times above the data is not drawn to scale: it would flatten the data."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PassBand:
    """When the forward pass, the backward pass or the update runs."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, eq=False, slots=True)
class StepMemoryChart:
    """The bytes of each class over time."""

    title: str
    note: str
    edges: Floats
    """The begin of each interval and the end of the last one, in the unit of the axis; never decreasing."""
    bytes_by_class: Mapping[str, Floats]
    """For each class one value per interval."""
    passes: tuple[PassBand, ...]
    unit: str
    """Name of the time axis: `seconds, modelled`, `operators`."""
    limit_bytes: int | None
    limit_name: str


@dataclass(frozen=True, slots=True)
class WhatIfBar:
    """Memory and time with one value of a setting."""

    label: str
    bytes_by_class: Mapping[str, int]
    seconds: float | None
    """Modelled time of a step; None: unknown."""
    current: bool = False
    """True: the configuration has this value."""
    note: str = ""
    """Below the time: samples per second, or why there is no bar."""


@dataclass(frozen=True, slots=True)
class WhatIfChart:
    title: str
    bars: tuple[WhatIfBar, ...]
    limit_bytes: int | None
    limit_name: str


class _MemoryAxes:
    """Axes whose vertical scale is bytes, and the picture that they are in."""

    def __init__(self, figure: Figure, top: float, height: float, highest: float, limit: int | None) -> None:
        """The scale reaches to the limit or to the highest value, and 12 % more. If the limit is far above the values,
        it reaches only to the values: the limit is then named, not drawn (`_draw_limit`)."""
        from matplotlib.ticker import MaxNLocator, StrMethodFormatter

        units = ((float(GIB), "GiB"), (float(MIB), "MiB"))
        self.unit, unit_name = next((one for one in units if highest >= one[0]), (float(KIB), "KiB"))
        self.figure, self.top, self.bottom = figure, top, top + height
        self.reach = highest if limit is None or limit > FAR_LIMIT * highest else max(highest, float(limit))
        self.axes = add_axes(figure, LEFT, top, PLOT_WIDTH, height)
        self.axes.set_ylim(0, self.reach * 1.12 / self.unit)
        self.axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        self.axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        add_text(figure, 16, top - 8, unit_name, 13, va="bottom")

    def pixel(self, x: float, nbytes: float) -> tuple[float, float]:
        """Pixels from the left and from the upper edge of the picture."""
        left, up = self.axes.transData.transform((x, nbytes / self.unit))
        return float(left), float(self.figure.bbox.height - up)


def render_estimate(step: StepMemoryChart | None, what_ifs: Sequence[WhatIfChart] = ()) -> bytes:
    """One PNG with all charts, below each other. Equal charts give equal bytes."""
    heights = [*([STEP_HEIGHT] if step else []), *[WHAT_IF_HEIGHT] * len(what_ifs)]
    figure = new_figure(WIDTH, max(1, sum(heights)))
    top = 0
    if step is not None:
        _draw_step_memory(figure, step)
        top += STEP_HEIGHT
    for what_if in what_ifs:
        if top:
            _draw_rectangle(figure, 0, top - 1, WIDTH, 2, RULE)
        _draw_what_if(figure, what_if, top)
        top += WHAT_IF_HEIGHT
    return figure_png(figure)


def stacking_order(names: Sequence[str]) -> list[str]:
    """Classes from the bottom of the stack to its top; classes without a colour come last."""
    known = [name for name in COLOURS if name in names]
    return [*known, *sorted(name for name in names if name not in COLOURS)]


# ── the step over time ───────────────────────────────────────────────────────────────────────────────────────────────


def _draw_step_memory(figure: Figure, chart: StepMemoryChart) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    order = stacking_order([name for name, values in chart.bytes_by_class.items() if values.max(initial=0.0) > 0])
    total = sum((chart.bytes_by_class[name] for name in order), np.zeros(len(chart.edges) - 1))
    peak = max(float(total.max(initial=0.0)), 1.0)
    _draw_title(figure, chart.title, chart.note, 0)
    memory = _MemoryAxes(figure, TOP, STEP_HEIGHT - TOP - BOTTOM, peak, chart.limit_bytes)
    low, high = float(chart.edges[0]), float(chart.edges[-1])
    memory.axes.set_xlim(low, high if high > low else low + 1)
    memory.axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    memory.axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    memory.axes.grid(True, axis="x", color=FAINT_RULE, linewidth=points(1))
    _draw_passes(memory, chart.passes)
    _draw_areas(memory, chart, order)
    add_text(figure, LEFT, memory.bottom + 32, chart.unit, 13)
    _draw_limit(memory, chart.limit_bytes, chart.limit_name)
    at = int(total.argmax()) if len(total) else 0
    _draw_peak(memory, float(chart.edges[at] + chart.edges[at + 1]) / 2, peak)
    at_peak = {name: float(chart.bytes_by_class[name][at]) for name in order}
    _draw_legend(figure, "at the peak", at_peak, peak, TOP)


def _draw_areas(memory: _MemoryAxes, chart: StepMemoryChart, order: Sequence[str]) -> None:
    """The stacked classes, one column per pixel. A column shows the fullest of its intervals, so that no peak is lost
    however many intervals share a pixel."""
    begins = np.linspace(*memory.axes.get_xlim(), PLOT_WIDTH + 1)
    first = np.clip(np.searchsorted(chart.edges, begins[:-1], side="right") - 1, 0, len(chart.edges) - 2)
    until = np.maximum(np.searchsorted(chart.edges, begins[1:], side="left"), first + 1)
    values = np.array([chart.bytes_by_class[name] for name in order]).reshape(len(order), len(chart.edges) - 1)
    total = values.sum(axis=0)
    fullest = [one + int(total[one:end].argmax()) for one, end in zip(first.tolist(), until.tolist(), strict=True)]
    lower = np.zeros(PLOT_WIDTH + 1)
    for name, upper in zip(order, np.cumsum(values[:, [*fullest, fullest[-1]]], axis=0) / memory.unit, strict=True):
        style: dict[str, Any] = {"color": COLOURS.get(name, OTHER_COLOUR), "linewidth": EDGE_WIDTH, "zorder": 2}
        memory.axes.fill_between(begins, lower, upper, where=upper > lower, step="post", **style)
        lower = upper


def _draw_passes(memory: _MemoryAxes, passes: Sequence[PassBand]) -> None:
    """A band behind every other pass, and their names above. A name that is wider than its pass is left out; the last
    name is always drawn, and ends at the right edge at the latest."""
    for number, one in enumerate(passes):
        if number % 2 == 0:
            memory.axes.axvspan(one.begin, one.end, color=BAND_COLOUR, linewidth=0, zorder=0)
        left, right = memory.pixel(one.begin, 0)[0], memory.pixel(one.end, 0)[0]
        middle = (left + right) / 2
        name = add_text(memory.figure, middle, memory.top - 8, one.name, 13, ha="center", va="bottom")
        width = name.get_window_extent().width
        if number == len(passes) - 1:
            name.set_x(min(middle, LEFT + PLOT_WIDTH - width / 2) / WIDTH)
        elif width > right - left:
            name.remove()


def _draw_peak(memory: _MemoryAxes, time: float, peak: float) -> None:
    """A dark label with a small arrow that points at the peak."""
    from matplotlib.patches import Polygon

    x, y = memory.pixel(time, peak)
    text = add_text(memory.figure, x, y - 18, f"peak {bytes_text(peak)}", 13, ha="center", va="center", color=CARD)
    text.set_zorder(5)
    half = text.get_window_extent().width / 2 + 6
    middle = min(max(x, LEFT + half), LEFT + PLOT_WIDTH - half)
    text.set_x(middle / WIDTH)
    _draw_rectangle(memory.figure, middle - half, y - 29, 2 * half, 22, INK, zorder=4)
    up = memory.figure.bbox.height - y
    corners = [(x - 5, up + 8), (x + 5, up + 8), (x, up + 1)]
    memory.figure.add_artist(Polygon(corners, transform=None, color=INK, linewidth=0, zorder=4))


# ── what-if bars ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _draw_what_if(figure: Figure, what_if: WhatIfChart, top: int) -> None:
    highest = float(max([sum(bar.bytes_by_class.values()) for bar in what_if.bars] + [1]))
    note = "the fullest phase with everything on the GPU, and the time of a step under the run's plan: modelled"
    _draw_title(figure, what_if.title, note, top)
    height = WHAT_IF_HEIGHT - TOP - BOTTOM - BAR_TEXT_HEIGHT
    memory = _MemoryAxes(figure, top + TOP, height, highest, what_if.limit_bytes)
    memory.axes.set_xlim(0, max(1, len(what_if.bars)))
    memory.axes.set_xticks([])
    _draw_limit(memory, what_if.limit_bytes, what_if.limit_name)
    names = {name for bar in what_if.bars for name, size in bar.bytes_by_class.items() if size > 0}
    order = stacking_order(sorted(names))
    slot_px = PLOT_WIDTH / max(1, len(what_if.bars))
    for number, bar in enumerate(what_if.bars):
        below, width = 0.0, min(slot_px * 0.56, MAX_BAR_WIDTH) / slot_px
        for name in order:
            if size := bar.bytes_by_class.get(name, 0) / memory.unit:
                colour = COLOURS.get(name, OTHER_COLOUR)
                style: dict[str, Any] = {"color": colour, "edgecolor": colour, "linewidth": EDGE_WIDTH, "zorder": 2}
                memory.axes.bar(number + 0.5, size, width, below, **style)
            below += size
        _draw_bar_text(memory, bar, number + 0.5, slot_px - 6)
    current = next((bar for bar in what_if.bars if bar.current), None)
    shown = current or max(what_if.bars, key=lambda bar: sum(bar.bytes_by_class.values()), default=None)
    if shown is not None:
        sizes = {name: float(shown.bytes_by_class.get(name, 0)) for name in order}
        _draw_legend(figure, f"at {shown.label}", sizes, float(sum(shown.bytes_by_class.values())), top + TOP)


def _draw_bar_text(memory: _MemoryAxes, bar: WhatIfBar, x: float, max_width: float) -> None:
    """The size above the bar, in front of the grid and the limit's line; value, time and note below it."""
    total = sum(bar.bytes_by_class.values())
    middle, end = memory.pixel(x, total)
    if total:
        _draw_label(memory.figure, middle, end - 12, bytes_text(total), INK, ha="center")
    label = bar.label + (" (as configured)" if bar.current else "")
    seconds = "" if bar.seconds is None else f"{step_duration_text(bar.seconds)} a step"
    lines = ((label, 14, 10, INK), (seconds or bar.note, 13, 32, MUTED), (bar.note if seconds else "", 13, 50, MUTED))
    for text, size, below, colour in lines:
        top = memory.bottom + below
        add_text(memory.figure, middle, top, text, size, max_width=max_width, ha="center", color=colour)


# ── parts of both ────────────────────────────────────────────────────────────────────────────────────────────────────


def _draw_title(figure: Figure, title: str, note: str, top: int) -> None:
    add_text(figure, LEFT, top + 16, title, 20, max_width=WIDTH - LEFT - 24, color=INK)
    add_text(figure, LEFT, top + 47, note, 13, max_width=WIDTH - LEFT - 24)


def _draw_limit(memory: _MemoryAxes, limit: int | None, name: str) -> None:
    """A dashed line with the machine's name; only the name, in the margin, if the limit is above the axes."""
    if limit is None:
        return
    text = f"{name}: {bytes_text(limit)}"
    if limit > memory.reach * 1.12:
        left = WIDTH - RIGHT + 22
        add_text(memory.figure, left, memory.top - 22, text, 13, max_width=RIGHT - 26, color=LIMIT_COLOUR)
        return
    memory.axes.axhline(limit / memory.unit, color=LIMIT_COLOUR, linewidth=points(2), dashes=(4.5, 2.5), zorder=3)
    _draw_label(memory.figure, LEFT + 10, memory.pixel(0, limit)[1] - 12, text, LIMIT_COLOUR)


def _draw_legend(figure: Figure, heading: str, bytes_by_class: Mapping[str, float], total: float, top: float) -> None:
    """The classes from the top of the stack to its bottom, with their sizes."""
    left, y = WIDTH - RIGHT + 22, top
    add_text(figure, left, y, heading, 13, max_width=RIGHT - 30)
    for name in reversed(list(bytes_by_class)):
        y += 34
        _draw_rectangle(figure, left, y + 2, 13, 13, COLOURS.get(name, OTHER_COLOUR))
        add_text(figure, left + 22, y, name, 13, max_width=RIGHT - 60, color=INK)
        add_text(figure, left + 22, y + 17, bytes_text(bytes_by_class[name]), 11)
    y += 44
    _draw_rectangle(figure, left, y - 6, WIDTH - 20 - left, 1, RULE)
    add_text(figure, left + 22, y + 1, f"total {bytes_text(total)}", 13, color=INK)


def _draw_label(figure: Figure, x: float, y: float, text: str, colour: str, ha: str = "left") -> None:
    """Text whose middle is at height `y`, on a rectangle that hides grid and lines behind it."""
    label = add_text(figure, x, y, text, 13, max_width=PLOT_WIDTH - 20, ha=ha, va="center", color=colour)
    label.set_zorder(5)
    extent = label.get_window_extent()
    _draw_rectangle(figure, extent.x0 - 4, y - 9, extent.width + 8, 18, CARD, zorder=4)


def _draw_rectangle(
    figure: Figure, left: float, top: float, width: float, height: float, colour: str, zorder: float = 1
) -> None:
    """A filled rectangle, in pixels from the upper left corner."""
    from matplotlib.patches import Rectangle

    corner = (left, figure.bbox.height - top - height)
    figure.add_artist(Rectangle(corner, width, height, transform=None, color=colour, linewidth=0, zorder=zorder))

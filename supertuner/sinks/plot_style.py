"""The style of charts drawn with matplotlib: sizes in pixels, one font, quiet grid lines, reproducible PNG files.

matplotlib is imported only inside the functions, because importing it takes half a second. Figures use the Agg canvas
directly and never pyplot, whose global state a library must not change.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from supertuner.sinks.drawing import CARD, MUTED, RULE, drawable_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

DPI: Final = 100
FONT: Final = "DejaVu Sans"
"""matplotlib ships it, so charts look the same on every machine."""
TICK_PX: Final = 12
"""Height of tick labels and axis names."""
FAINT_RULE: Final = "#efeeea"


def points(pixels: float) -> float:
    """Pixels of the finished picture in matplotlib's unit, 1/72 inch."""
    return pixels * 72 / DPI


def new_figure(width_px: int, height_px: int) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_px / DPI, height_px / DPI), dpi=DPI, facecolor=CARD)
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place in pixels from the upper left corner: horizontal grid lines, a base line, no other frame."""
    whole_width, whole_height = figure.bbox.width, figure.bbox.height
    box = (left / whole_width, 1 - (top + height) / whole_height, width / whole_width, height / whole_height)
    axes = figure.add_axes(box, facecolor="none")
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=MUTED, linewidth=points(1))
    axes.grid(True, axis="y", color=RULE, linewidth=points(1))
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, pad=points(8))
    axes.tick_params(which="both", labelcolor=MUTED, labelsize=points(TICK_PX), labelfontfamily=FONT)
    return axes


def add_text(
    figure: Figure, left: float, top: float, text: str, size_px: float, *, max_width: float | None = None, **style: Any
) -> Text:
    """One line of text at a place in pixels from the upper left corner, shortened with an ellipsis to `max_width`.

    `style` are properties of matplotlib's Text; by default the text is muted and starts at `left`.
    """
    font = {"fontsize": points(size_px), "fontfamily": FONT, "parse_math": False}
    style = {"color": MUTED, "ha": "left", "va": "top", **font, **style}
    drawn = figure.text(left / figure.bbox.width, 1 - top / figure.bbox.height, drawable_text(text), **style)
    whole_text = drawn.get_text()
    while max_width is not None and drawn.get_window_extent().width > max_width and len(whole_text) > 1:
        whole_text = whole_text[:-1]
        drawn.set_text(whole_text.rstrip() + "…")
    return drawn


def figure_png(figure: Figure) -> bytes:
    """The figure as PNG. Equal figures give equal bytes: the file names no matplotlib version and no date."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor=figure.get_facecolor(), metadata={"Software": None})
    return buffer.getvalue()

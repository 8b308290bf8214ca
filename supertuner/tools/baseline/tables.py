"""Tables and figures as text that is valid Markdown and lines up in a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from supertuner.core.types import bytes_text
from supertuner.sinks.phase_counters import rate_text


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table with aligned columns; columns of numbers, except the first, are aligned to the right."""
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(len(header))]
    right = [at > 0 and all(_is_number(row[at]) for row in rows) for at in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        return f"| {' | '.join(padded)} |".rstrip()

    rule = "|".join(f"{'-' * (w + 1)}{':' if r else '-'}" for w, r in zip(widths, right, strict=True))
    return [line(header), f"|{rule}|", *(line(row) for row in rows)]


def format_amount(value: float, unit: str) -> str:
    """`30.9 ms`, `511 MiB`, `1.23 ×`, `0.25 samples/s`."""
    if unit == "bytes":
        return bytes_text(value)
    if unit == "s" or unit.startswith("s/"):
        for name, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if abs(value) >= factor or name == "µs":
                return f"{value / factor:.3g} {name}{unit[1:]}"
    return f"{rate_text(value)} {unit}".rstrip()


def format_change(ratio: float) -> str:
    """A ratio as a relative change: `+3.1 %`."""
    return f"{100 * (ratio - 1):+.1f} %"


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "+-−0123456789" or cell == "–"

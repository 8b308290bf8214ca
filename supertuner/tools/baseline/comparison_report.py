"""The result of a comparison as Markdown, which is also what the console shows, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from supertuner.core.types import JSON
from supertuner.tools.baseline.loss_comparison import LossAgreement
from supertuner.tools.baseline.regression import ComparedFigure, ComparisonResult, RegressionVerdict
from supertuner.tools.baseline.tables import format_amount, format_change, markdown_table

FORMAT: Final = "supertuner baseline comparison"
VERSION: Final = 1
TABLE_HEADER: Final = ("figure", "before", "now", "change", "95 % between", "limit", "verdict")


def as_markdown(title: str, result: ComparisonResult) -> str:
    return "\n".join(_lines(title, result)) + "\n"


def as_json(title: str, result: ComparisonResult) -> dict[str, JSON]:
    figures = [
        {
            "name": figure.name,
            "unit": figure.unit,
            "before": figure.old,
            "now": figure.new,
            "ratio": figure.interval.ratio,
            "low": figure.interval.bounds[0],
            "high": figure.interval.bounds[1],
            "limit": 1 + figure.limit,
            "verdict": figure.verdict.value,
        }
        for figure in result.figures
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "verdict": result.verdict.value,
        "slower_or_larger": [figure.name for figure in result.worse],
        "undecided": [figure.name for figure in result.undecided],
        "learns_otherwise": result.losses_differ,
        "losses": asdict(result.losses),
        "hints": result.hints,
        "figures": figures,
        "rounds": result.rounds,
        "how": result.method,
        "times_compared": result.times_comparable,
        "notes": list(result.notes),
    }


def headline(result: ComparisonResult) -> list[str]:
    """The verdict, one line per finding: times and memory, losses, hints."""
    lines = []
    if result.worse:
        lines.append(f"WORSE: {'; '.join(map(_finding, result.worse))}.")
    if result.losses_differ:
        lines.append(f"LOSSES DIFFER: {result.losses.words}.")
    if result.hints is not None:
        lines.append(f"MORE HINTS FAIL: {result.hints}.")
    if not result.times_comparable:
        lines.append("UNDECIDED: times cannot be compared; the notes below give the reason.")
    elif result.undecided:
        names = ", ".join(figure.name for figure in result.undecided)
        lines.append(f"UNDECIDED: {names}: too much noise; use more repeats, or a quieter machine.")
    better = [figure for figure in result.figures if figure.verdict is RegressionVerdict.BETTER]
    if better:
        lines.append(f"better: {'; '.join(map(_finding, better))}.")
    return lines or ["no worse."]


def _lines(title: str, result: ComparisonResult) -> Iterator[str]:
    yield from [f"# {title}", "", *headline(result), ""]
    yield from markdown_table(TABLE_HEADER, [_row(figure) for figure in result.figures])
    yield ""
    if result.losses.likeness is not LossAgreement.DIFFERENT:
        yield f"- losses: {result.losses.likeness}; {result.losses.words}"
    else:
        yield f"- losses: {result.losses.words}"
    rounds = f"{result.rounds} round{'s' if result.rounds != 1 else ''}"
    yield f"- measured: {result.method}; {rounds}"
    if result.rounds == 1:
        yield "- one round only: the intervals do not include the variation between processes"
    yield from (f"- {figure.name}: {figure.note}" for figure in result.figures if figure.note)
    yield from (f"- {note}" for note in result.notes)


def _row(figure: ComparedFigure) -> list[str]:
    low, high = figure.interval.bounds
    return [
        figure.name,
        format_amount(figure.old, figure.unit),
        format_amount(figure.new, figure.unit),
        format_change(figure.interval.ratio),
        f"{format_change(low)} to {format_change(high)}",
        format_change(1 + figure.limit),
        figure.verdict.value.upper()
        if figure.verdict in (RegressionVerdict.WORSE, RegressionVerdict.UNDECIDED)
        else figure.verdict.value,
    ]


def _finding(figure: ComparedFigure) -> str:
    low, high = figure.interval.bounds
    interval = f"95 % between {format_change(low)} and {format_change(high)}"
    return f"{figure.name} {format_change(figure.interval.ratio)} ({interval})"

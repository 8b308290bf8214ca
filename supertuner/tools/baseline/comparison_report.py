"""The result of a comparison as Markdown, which is also what the console shows, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from supertuner.core.durable import write_json, write_text
from supertuner.core.types import JSON
from supertuner.tools.baseline.regression import ComparedFigure, ComparisonResult, RegressionVerdict
from supertuner.tools.baseline.tables import format_amount, format_change, markdown_table

FORMAT: Final = "supertuner baseline comparison"
VERSION: Final = 1
TABLE_HEADER: Final = ("figure", "before", "now", "change", "95 % between", "limit", "verdict")


def as_markdown(title: str, result: ComparisonResult) -> str:
    return "\n".join(_lines(title, result)) + "\n"


def as_json(title: str, result: ComparisonResult) -> dict[str, JSON]:
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
        "figures": [_figure_to_json(figure) for figure in result.figures],
        "rounds": result.rounds,
        "how": result.method,
        "times_compared": result.times_comparable,
        "notes": list(result.notes),
    }


def _figure_to_json(figure: ComparedFigure) -> JSON:
    low, ratio, high = figure.interval.bounds
    return {
        "name": figure.name,
        "unit": figure.unit,
        "before": figure.old,
        "now": figure.new,
        "ratio": ratio,
        "low": low,
        "high": high,
        "limit": 1 + figure.limit,
        "verdict": figure.verdict.value,
    }


def store_report(stem: Path, document: Mapping[str, JSON], text: str) -> str | None:
    """Write both forms as `stem`.json and `stem`.md. Returns the problem if that fails: the result is still valid, and
    took long to measure."""
    try:
        write_json(stem.with_name(f"{stem.name}.json"), document)
        write_text(stem.with_name(f"{stem.name}.md"), text)
    except OSError as error:
        return f"the report is not stored: {stem.parent} cannot be written ({error.strerror})"
    return None


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
    if result.better:
        lines.append(f"better: {'; '.join(map(_finding, result.better))}.")
    return lines or ["no worse."]


def _lines(title: str, result: ComparisonResult) -> Iterator[str]:
    yield from [f"# {title}", "", *headline(result), ""]
    yield from markdown_table(TABLE_HEADER, [_row(figure) for figure in result.figures])
    yield ""
    likeness = "" if result.losses_differ else f"{result.losses.likeness}; "
    yield f"- losses: {likeness}{result.losses.words}"
    rounds = f"{result.rounds} round{'s' if result.rounds != 1 else ''}"
    yield f"- measured: {result.method}; {rounds}"
    if result.rounds == 1:
        yield "- one round only: the intervals do not include the variation between processes"
    yield from (f"- {figure.name}: {figure.note}" for figure in result.figures if figure.note)
    yield from (f"- {note}" for note in result.notes)


def _row(figure: ComparedFigure) -> list[str]:
    low, ratio, high, limit = map(format_change, (*figure.interval.bounds, 1 + figure.limit))
    before, now = (format_amount(value, figure.unit) for value in (figure.old, figure.new))
    is_loud = figure.verdict in (RegressionVerdict.WORSE, RegressionVerdict.UNDECIDED)
    verdict = figure.verdict.upper() if is_loud else figure.verdict.value
    return [figure.name, before, now, ratio, f"{low} to {high}", limit, verdict]


def _finding(figure: ComparedFigure) -> str:
    low, ratio, high = map(format_change, figure.interval.bounds)
    return f"{figure.name} {ratio} (95 % between {low} and {high})"

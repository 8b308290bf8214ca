"""What a comparison found: as Markdown, which reads well on a screen too, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from supertuner.core.types import JSON
from supertuner.tools.baseline.judging import Figure, Judged, Verdict
from supertuner.tools.baseline.losses import Likeness
from supertuner.tools.baseline.tables import amount, percent, table

FORMAT: Final = "supertuner baseline comparison"
VERSION: Final = 1
HEADS: Final = ("figure", "before", "now", "change", "95 % between", "limit", "verdict")


def as_markdown(title: str, judged: Judged) -> str:
    return "\n".join(_lines(title, judged)) + "\n"


def as_json(title: str, judged: Judged) -> dict[str, JSON]:
    figures = [
        {
            "name": one.name,
            "unit": one.unit,
            "before": one.old,
            "now": one.new,
            "ratio": one.found.ratio,
            "low": one.found.between[0],
            "high": one.found.between[1],
            "limit": 1 + one.limit,
            "verdict": one.verdict.value,
        }
        for one in judged.figures
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "verdict": judged.verdict.value,
        "slower_or_larger": [one.name for one in judged.worse],
        "undecided": [one.name for one in judged.undecided],
        "learns_otherwise": judged.learns_otherwise,
        "losses": asdict(judged.losses),
        "hints": judged.hints,
        "figures": figures,
        "rounds": judged.rounds,
        "how": judged.how,
        "times_compared": judged.times,
        "notes": list(judged.notes),
    }


def headline(judged: Judged) -> list[str]:
    """The answer, a line for each finding: times, what is learnt, hints."""
    found = []
    if judged.worse:
        found.append(f"WORSE: {'; '.join(map(_finding, judged.worse))}.")
    if judged.learns_otherwise:
        found.append(f"LEARNS SOMETHING ELSE: {judged.losses.words}.")
    if judged.hints is not None:
        found.append(f"MORE HINTS FAIL: {judged.hints}.")
    if not judged.times:
        found.append("UNDECIDED: times cannot be compared; see below.")
    elif judged.undecided:
        names = ", ".join(one.name for one in judged.undecided)
        found.append(f"UNDECIDED: {names}: the noise is too large to tell; more repeats, or a quieter machine.")
    better = [one for one in judged.figures if one.verdict is Verdict.BETTER]
    if better:
        found.append(f"better: {'; '.join(map(_finding, better))}.")
    return found or ["no worse."]


def _lines(title: str, judged: Judged) -> Iterator[str]:
    yield from [f"# {title}", "", *headline(judged), ""]
    yield from table(HEADS, [_row(one) for one in judged.figures])
    yield ""
    if judged.losses.likeness is not Likeness.DIFFERENT:
        yield f"- losses: {judged.losses.likeness}; {judged.losses.words}"
    else:
        yield f"- losses: {judged.losses.words}"
    rounds = f"{judged.rounds} round{'s' if judged.rounds != 1 else ''}"
    yield f"- measured: {judged.how}; {rounds}"
    if judged.rounds == 1:
        yield "- one round: how much one process differs from the next is not in these intervals"
    yield from (f"- {one.name}: {one.note}" for one in judged.figures if one.note)
    yield from (f"- {note}" for note in judged.notes)


def _row(one: Figure) -> list[str]:
    low, high = one.found.between
    return [
        one.name,
        amount(one.old, one.unit),
        amount(one.new, one.unit),
        percent(one.found.ratio),
        f"{percent(low)} to {percent(high)}",
        percent(1 + one.limit),
        one.verdict.value.upper() if one.verdict in (Verdict.WORSE, Verdict.UNDECIDED) else one.verdict.value,
    ]


def _finding(one: Figure) -> str:
    low, high = one.found.between
    return f"{one.name} {percent(one.found.ratio)} (95 % between {percent(low)} and {percent(high)})"

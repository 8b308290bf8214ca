"""The doctor's findings for people: one line per check, folded to a terminal's width, never folded in a pipe."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from supertuner.core.types import on_screen
from supertuner.tools.doctor.check import Check, Mark

SIGNS: Final[Mapping[Mark, str]] = {Mark.GOOD: "✓", Mark.WARNING: "!", Mark.BAD: "✗", Mark.ABSENT: "–"}
PLAIN_SIGNS: Final[Mapping[Mark, str]] = {Mark.GOOD: "+", Mark.WARNING: "!", Mark.BAD: "x", Mark.ABSENT: "-"}
"""For a terminal or a file that knows only ASCII."""
COUSINS: Final[Mapping[str, str]] = {"→": "->", "×": "x", "…": "...", "–": "-"}
NAME_COLUMN: Final = 22
NARROWEST: Final = 60
HARD: Final = "\u00a0"
"""A space that no line ends at."""


def shown(checks: Iterable[Check]) -> list[Check]:
    """Without those that need a GPU where there is none: one line has said so."""
    return [
        check for check in checks if not (check.needs_gpu and check.mark is Mark.ABSENT and check.finding == "no GPU")
    ]


def check_lines(check: Check, width: int | None, signs: Mapping[Mark, str] = SIGNS) -> list[str]:
    """A check as lines of at most `width` signs; None: as one line, however long."""
    finding, remedy = on_screen(check.finding), on_screen(check.remedy)
    head = f"{signs[check.mark]} {check.name:<{NAME_COLUMN - 3}} "
    if width is None:
        return [head + finding + (f"  → {remedy}" if remedy else "")]
    indent = " " * NAME_COLUMN
    lines = folded(finding, width, head, indent)
    if remedy:
        lines += folded(remedy, width, f"{indent}→ ", indent + "  ")
    return lines


def folded(text: str, width: int, first: str, rest: str) -> list[str]:
    """A command stays on one line where it fits, and no word of it is ever broken, so that it can be copied."""
    room = max(width, NARROWEST) - len(rest)
    whole = re.sub(r"`[^`]+`", lambda found: found[0].replace(" ", HARD) if len(found[0]) <= room else found[0], text)
    lines = textwrap.wrap(
        whole,
        max(width, NARROWEST),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(HARD, " ") for line in lines]


def page(
    checks: Iterable[Check], width: int | None, signs: Mapping[Mark, str] = SIGNS
) -> Iterator[tuple[str, Mark | None]]:
    """Every line with the mark of its check (None: a heading). Headings stand on a terminal only."""
    group = ""
    for check in shown(checks):
        if check.group != group and width is not None:
            yield "", None
            yield check.group, None
        group = check.group
        for line in check_lines(check, width, signs):
            yield line, check.mark


def summary(checks: Iterable[Check], signs: Mapping[Mark, str] = SIGNS) -> str:
    """`31 checks: 20 ✓, 2 !, 1 ✗, 8 –`."""
    marks = [check.mark for check in shown(checks)]
    counts = ", ".join(f"{marks.count(mark)} {signs[mark]}" for mark in Mark if mark in marks)
    return f"{len(marks)} checks: {counts}"


def encodable(encoding: str) -> bool:
    """Whether our signs can be written in this encoding."""
    try:
        "".join((*SIGNS.values(), *COUSINS)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plain(line: str) -> str:
    """A line in ASCII, for where nothing else can be written."""
    for sign, cousin in COUSINS.items():
        line = line.replace(sign, cousin)
    return line.encode("ascii", "replace").decode()

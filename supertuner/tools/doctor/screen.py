"""The doctor's findings as text: one line per check, wrapped to the width of a terminal, not wrapped in a pipe."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from supertuner.core.types import escape_for_terminal
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus

SIGNS: Final[Mapping[CheckStatus, str]] = {status: sign for status, sign in zip(CheckStatus, "✓!✗–", strict=True)}
PLAIN_SIGNS: Final[Mapping[CheckStatus, str]] = {status: sign for status, sign in zip(CheckStatus, "+!x-", strict=True)}
"""For output in an encoding without the other signs, such as ASCII."""
ASCII_REPLACEMENTS: Final[Mapping[str, str]] = {"→": "->", "×": "x", "…": "...", "–": "-"}
NAME_COLUMN: Final = 22
MIN_WIDTH: Final = 60
NO_BREAK_SPACE: Final = "\u00a0"
"""textwrap does not break a line at this space."""


def visible_checks(checks: Iterable[CheckResult]) -> list[CheckResult]:
    """The checks without those that need a GPU, if there is none."""
    return [check for check in checks if not (check.needs_gpu and check.finding == "no GPU")]


def check_lines(check: CheckResult, width: int | None, signs: Mapping[CheckStatus, str] = SIGNS) -> list[str]:
    """A check as lines of at most `width` characters; with None as one line."""
    finding, remedy = escape_for_terminal(check.finding), escape_for_terminal(check.remedy)
    head = f"{signs[check.status]} {check.name:<{NAME_COLUMN - 3}} "
    if width is None:
        return [head + finding + (f"  → {remedy}" if remedy else "")]
    indent = " " * NAME_COLUMN
    lines = fold_text(finding, width, head, indent)
    if remedy:
        lines += fold_text(remedy, width, f"{indent}→ ", indent + "  ")
    return lines


def fold_text(text: str, width: int, first: str, rest: str) -> list[str]:
    """Wrap text. A command in backquotes stays on one line if it fits, and no word is broken, so it can be copied."""
    available = max(width, MIN_WIDTH) - len(rest)
    unbroken = re.sub(
        r"`[^`]+`",
        lambda command: command[0].replace(" ", NO_BREAK_SPACE) if len(command[0]) <= available else command[0],
        text,
    )
    lines = textwrap.wrap(
        unbroken,
        max(width, MIN_WIDTH),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines]


def render_lines(
    checks: Iterable[CheckResult], width: int | None, signs: Mapping[CheckStatus, str] = SIGNS
) -> Iterator[tuple[str, CheckStatus | None]]:
    """(line, status of its check) of every line; None marks a heading. Only terminals get headings."""
    group = ""
    for check in visible_checks(checks):
        if check.group != group and width is not None:
            yield "", None
            yield check.group, None
        group = check.group
        for line in check_lines(check, width, signs):
            yield line, check.status


def summary(checks: Iterable[CheckResult], signs: Mapping[CheckStatus, str] = SIGNS) -> str:
    """`31 checks: 20 ✓, 2 !, 1 ✗, 8 –`."""
    marks = [check.status for check in visible_checks(checks)]
    counts = ", ".join(f"{marks.count(mark)} {signs[mark]}" for mark in CheckStatus if mark in marks)
    return f"{len(marks)} checks: {counts}"


def can_encode_signs(encoding: str) -> bool:
    """Whether this encoding contains the signs."""
    try:
        "".join((*SIGNS.values(), *ASCII_REPLACEMENTS)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def to_ascii(line: str) -> str:
    """The line in ASCII; a character without a replacement becomes `?`."""
    for sign, replacement in ASCII_REPLACEMENTS.items():
        line = line.replace(sign, replacement)
    return line.encode("ascii", "replace").decode()

"""Prints the results of checks, of the doctor and of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supertuner.tools.doctor.check_result import CheckResult

STYLES = {"good": "", "warning": "yellow", "bad": "bold red", "absent": "dim"}


class CheckPage:
    """Prints the checks to standard output: wrapped and coloured on a terminal, else one plain line per check."""

    def __init__(self) -> None:
        from rich.console import Console

        from supertuner.tools.doctor import screen

        self._screen = screen
        self._console = Console(highlight=False)
        self._width = self._console.width if self._console.is_terminal else None
        self._plain = not screen.can_encode_signs(self._console.encoding)
        self._signs = screen.PLAIN_SIGNS if self._plain else screen.SIGNS

    def show(self, checks: Sequence[CheckResult]) -> None:
        for line, mark in self._screen.render_lines(checks, self._width, self._signs):
            self._print(line, "bold" if mark is None else STYLES[mark.value])

    def end(self, checks: Sequence[CheckResult], remark: str) -> None:
        self._print("")
        self._print(self._screen.summary(checks, self._signs) + (f"; {remark}" if remark else ""))

    def _print(self, line: str, style: str = "") -> None:
        from rich.text import Text

        text = Text(self._screen.to_ascii(line) if self._plain else line, style=style)
        self._console.print(text, soft_wrap=True)  # `screen` has wrapped it, without breaking commands that users copy

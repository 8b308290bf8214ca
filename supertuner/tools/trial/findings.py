"""Findings of a trial as check results: an error that a check raised, and warnings that it emitted."""

from __future__ import annotations

from collections.abc import Sequence

from supertuner.core.errors import SuperTunerError
from supertuner.core.events import Event, WarningEvent
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus

NAMES_SHOWN = 3


def from_error(group: str, name: str, error: SuperTunerError, status: CheckStatus = CheckStatus.BAD) -> CheckResult:
    """The result of a check that raised an error, whose message ends with the remedy after a semicolon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    finding, separator, remedy = "; ".join(lines).rpartition("; ")
    return CheckResult(group, name, status, finding if separator else remedy, remedy if separator else "")


def first_names(names: Sequence[str]) -> str:
    """`a, b, c and 7 more`."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


class WarningCollector:
    """A sink that keeps warnings as check results, and drops everything else."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.warnings: list[CheckResult] = []

    def emit(self, event: Event, /) -> None:
        if isinstance(event, WarningEvent):
            self.warnings.append(CheckResult(self._group, event.what, CheckStatus.WARNING, event.message))

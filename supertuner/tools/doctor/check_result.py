"""One line of the doctor's findings, as data: a mark, what was looked at, what was found, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    """The value stands in the JSON report; the sign is for people."""

    GOOD = "good"
    WARNING = "warning"
    """It works, and something about it costs speed or memory, or will surprise."""
    BAD = "bad"
    """It does not work, or it breaks what it was set for."""
    ABSENT = "absent"
    """Not there, not known, or of no meaning on this machine: no fault by itself."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`remedy` names a command wherever the mark is a warning or bad, and is empty where there is nothing to do."""

    group: str
    name: str
    status: CheckStatus
    finding: str
    remedy: str = ""
    needs_gpu: bool = False
    """Of no meaning without a GPU: not shown then, since one line says that there is none."""


def good(group: str, name: str, finding: str) -> CheckResult:
    return CheckResult(group, name, CheckStatus.GOOD, finding)


def absent(group: str, name: str, finding: str, remedy: str = "") -> CheckResult:
    return CheckResult(group, name, CheckStatus.ABSENT, finding, remedy)


def warning(group: str, name: str, finding: str, remedy: str) -> CheckResult:
    return CheckResult(group, name, CheckStatus.WARNING, finding, remedy)


def bad(group: str, name: str, finding: str, remedy: str) -> CheckResult:
    return CheckResult(group, name, CheckStatus.BAD, finding, remedy)

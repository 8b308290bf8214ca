"""One finding of the doctor as data: what was checked, its status, the finding, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    """The values are written to the JSON report."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but costs speed or memory, or behaves unexpectedly."""
    BAD = "bad"
    """It does not work, or prevents training from working."""
    ABSENT = "absent"
    """Missing, unknown, or meaningless on this machine; not a fault by itself."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`remedy` names a command if the status is WARNING or BAD, and is empty if there is nothing to do."""

    group: str
    name: str
    status: CheckStatus
    finding: str
    remedy: str = ""
    needs_gpu: bool = False
    """Meaningless without a GPU; then it is not shown, because one line already reports the missing GPU."""


def good(group: str, name: str, finding: str) -> CheckResult:
    return CheckResult(group, name, CheckStatus.GOOD, finding)


def absent(group: str, name: str, finding: str, remedy: str = "") -> CheckResult:
    return CheckResult(group, name, CheckStatus.ABSENT, finding, remedy)


def warning(group: str, name: str, finding: str, remedy: str) -> CheckResult:
    return CheckResult(group, name, CheckStatus.WARNING, finding, remedy)


def bad(group: str, name: str, finding: str, remedy: str) -> CheckResult:
    return CheckResult(group, name, CheckStatus.BAD, finding, remedy)

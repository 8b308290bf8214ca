"""Who of many processes is gone, stopped or hanging, from what each says of itself. Pure: reports in, a verdict out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

MAX_RANKS_NAMED = 4


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a process says of itself, at every beat."""

    rank: int
    local_rank: int
    host: str
    """For people."""
    node: str
    """What processes that see each other's numbers have in common."""
    pid: int
    born: int
    """When it was begun: numbers are given again."""
    beat: int = 0
    doing: str = ""
    step: int = 0
    idle_s: float = 0.0
    """Since its last sign of life."""
    waits: bool = False
    """It is inside a collective, or waits for other processes in another way."""
    where: str = ""
    """In our code."""
    left: bool = False
    """It is done and may go."""

    def label(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def last_activity(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.doing} after step {self.step}{place}" if self.step else f"{self.doing}{place}"


class ProcessState(StrEnum):
    """A process as its own node sees it."""

    ALIVE = "alive"
    GONE = "gone"
    STOPPED = "stopped"
    ON_ANOTHER_NODE = "on another node"


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """A process as another one sees it."""

    rank: int
    report: RankReport | None
    """The last that it said; None: nothing yet."""
    silent_s: float
    """Since anything new came from it."""
    state: ProcessState


@dataclass(frozen=True, slots=True)
class WatchdogVerdict:
    """Why the job ends."""

    rank: int
    local_rank: int
    node: str
    text: str
    """Who, and what became of it."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, content: bytes) -> WatchdogVerdict:
        fields = json.loads(content)
        return cls(int(fields["rank"]), int(fields["local_rank"]), str(fields["node"]), str(fields["text"]))


def report_to_text(report: RankReport) -> str:
    return json.dumps(asdict(report))


def report_from_bytes(content: bytes) -> RankReport:
    return RankReport(**json.loads(content))


def diagnose(
    observed: Iterable[ObservedRank], timeout_s: float, *, silent_s: float | None = None
) -> WatchdogVerdict | None:
    """What ends the job, if anything does. One that is gone is gone at once; all else has `timeout_s`, but for being
    silent, `silent_s` where that is given."""
    all_ranks = list(observed)
    active_ranks = [rank for rank in all_ranks if rank.report is None or not rank.report.left]
    for one in active_ranks:
        if one.report is not None and one.state is ProcessState.GONE:
            return verdict_about(one.report, f"is gone: it was killed while {one.report.last_activity()}")
    for one in active_ranks:
        if one.silent_s >= (timeout_s if silent_s is None else silent_s):
            return _silence_verdict(one)
    reports = [one.report for one in active_ranks if one.report is not None]
    hanging = [r for r in reports if r.idle_s >= timeout_s and not r.waits]
    if hanging:
        return _stall_verdict(hanging, "hangs", "hang", "no sign of life")
    stuck = [r for r in reports if r.idle_s >= timeout_s and r.waits]
    # One that is done counts: what it did last may just have ended a long wait of the others.
    if stuck and all(one.report is not None and one.report.idle_s >= timeout_s for one in all_ranks):
        return _stall_verdict(stuck, "waits for the others", "wait for each other", "nothing came")
    return None


def verdict_about(report: RankReport, text: str) -> WatchdogVerdict:
    return WatchdogVerdict(report.rank, report.local_rank, report.node, f"{report.label()} {text}")


def _silence_verdict(observed: ObservedRank) -> WatchdogVerdict:
    since = f"nothing was heard from it for {observed.silent_s:.0f} s"
    if observed.report is None:
        text = f"rank {observed.rank} has not come: {since}; see that it was started"
        return WatchdogVerdict(observed.rank, observed.rank, "", text)
    state_text = {
        ProcessState.STOPPED: "is stopped (SIGSTOP, or a debugger)",
        ProcessState.ALIVE: "hangs outside of Python",
        ProcessState.ON_ANOTHER_NODE: "is gone, stopped, or cut off with its node",
        ProcessState.GONE: "is gone",
    }[observed.state]
    return verdict_about(observed.report, f"{state_text}: {since}; it was last {observed.report.last_activity()}")


def _stall_verdict(reports: Sequence[RankReport], singular: str, plural: str, symptom: str) -> WatchdogVerdict:
    """Those that are furthest behind: the others wait for them."""
    least_step = min(report.step for report in reports)
    furthest_behind = [report for report in reports if report.step == least_step]
    first, since = furthest_behind[0], f"{symptom} for {furthest_behind[0].idle_s:.0f} s"
    if len(furthest_behind) == 1:
        return verdict_about(first, f"{singular}: {since}, while {first.last_activity()}")
    descriptions = "; ".join(
        f"{report.label()} while {report.last_activity()}" for report in furthest_behind[:MAX_RANKS_NAMED]
    )
    more = f"; and {len(furthest_behind) - MAX_RANKS_NAMED} more" if len(furthest_behind) > MAX_RANKS_NAMED else ""
    text = f"{len(furthest_behind)} processes {plural}: {since}: {descriptions}{more}"
    return WatchdogVerdict(first.rank, first.local_rank, first.node, text)

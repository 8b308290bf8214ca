"""Who of many processes is gone, stopped or hanging, from what each says of itself. Pure: reports in, a verdict out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Report:
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

    def named(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def last(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"{self.doing} after step {self.step}{at}" if self.step else f"{self.doing}{at}"


class State(StrEnum):
    """A process as its own node sees it."""

    ALIVE = "alive"
    GONE = "gone"
    STOPPED = "stopped"
    ELSEWHERE = "on another node"


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as another one sees it."""

    rank: int
    report: Report | None
    """The last that it said; None: nothing yet."""
    silent_s: float
    """Since anything new came from it."""
    state: State


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job ends."""

    rank: int
    local_rank: int
    node: str
    text: str
    """Who, and what became of it."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, content: bytes) -> Verdict:
        fields = json.loads(content)
        return cls(int(fields["rank"]), int(fields["local_rank"]), str(fields["node"]), str(fields["text"]))


def report_to_text(report: Report) -> str:
    return json.dumps(asdict(report))


def report_from_bytes(content: bytes) -> Report:
    return Report(**json.loads(content))


def judged(seen: Iterable[Seen], timeout_s: float, *, silent_s: float | None = None) -> Verdict | None:
    """What ends the job, if anything does. One that is gone is gone at once; all else has `timeout_s`, but for being
    silent, `silent_s` where that is given."""
    everybody = list(seen)
    here = [one for one in everybody if one.report is None or not one.report.left]
    for one in here:
        if one.report is not None and one.state is State.GONE:
            return of(one.report, f"is gone: it was killed while {one.report.last()}")
    for one in here:
        if one.silent_s >= (timeout_s if silent_s is None else silent_s):
            return _silent(one)
    reports = [one.report for one in here if one.report is not None]
    hanging = [r for r in reports if r.idle_s >= timeout_s and not r.waits]
    if hanging:
        return _together(hanging, "hangs", "hang", "no sign of life")
    stuck = [r for r in reports if r.idle_s >= timeout_s and r.waits]
    # One that is done counts: what it did last may just have ended a long wait of the others.
    if stuck and all(one.report is not None and one.report.idle_s >= timeout_s for one in everybody):
        return _together(stuck, "waits for the others", "wait for each other", "nothing came")
    return None


def of(report: Report, text: str) -> Verdict:
    return Verdict(report.rank, report.local_rank, report.node, f"{report.named()} {text}")


def _silent(one: Seen) -> Verdict:
    since = f"nothing was heard from it for {one.silent_s:.0f} s"
    if one.report is None:
        text = f"rank {one.rank} has not come: {since}; see that it was started"
        return Verdict(one.rank, one.rank, "", text)
    what = {
        State.STOPPED: "is stopped (SIGSTOP, or a debugger)",
        State.ALIVE: "hangs outside of Python",
        State.ELSEWHERE: "is gone, stopped, or cut off with its node",
        State.GONE: "is gone",
    }[one.state]
    return of(one.report, f"{what}: {since}; it was last {one.report.last()}")


def _together(found: Sequence[Report], one: str, several: str, what: str) -> Verdict:
    """Those that are furthest behind: the others wait for them."""
    behind = min(report.step for report in found)
    guilty = [report for report in found if report.step == behind]
    first, since = guilty[0], f"{what} for {guilty[0].idle_s:.0f} s"
    if len(guilty) == 1:
        return of(first, f"{one}: {since}, while {first.last()}")
    each = "; ".join(f"{report.named()} while {report.last()}" for report in guilty[:MOST_NAMED])
    more = f"; and {len(guilty) - MOST_NAMED} more" if len(guilty) > MOST_NAMED else ""
    text = f"{len(guilty)} processes {several}: {since}: {each}{more}"
    return Verdict(first.rank, first.local_rank, first.node, text)

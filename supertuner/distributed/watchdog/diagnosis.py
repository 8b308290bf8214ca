"""Which rank is gone, stopped or hanging, decided from the ranks' own reports. Pure: reports in, a verdict out.

A collective stops all ranks when one of them does not arrive, so from outside all of them look stuck. The reports tell
them apart: each rank says how long it has been idle and whether it waits for other ranks.

    gone       its process has ended: known at once to the ranks of its node
    silent     no new report: stopped, stuck outside of Python, or its node is cut off
    hanging    it reports that it is idle and does not wait for other ranks: the others wait for it
    deadlock   every rank is idle and waits: each entered a collective that the others do not

Of several hanging or deadlocked ranks, those with the fewest finished steps are named: the others are ahead of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

MAX_RANKS_NAMED = 4


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a process reports about itself at every beat."""

    rank: int
    local_rank: int
    host: str
    """Host name, for messages."""
    node: str
    """Identifies the PID namespace: ranks with equal values can look each other up by PID."""
    pid: int
    born: int
    """Start time of the process in clock ticks: PIDs are reused."""
    error_file: str = ""
    """Where its launcher expects the reason if it fails; "" if the launcher expects none."""
    beat: int = 0
    doing: str = ""
    step: int = 0
    idle_s: float = 0.0
    """Seconds since its last sign of life."""
    waits: bool = False
    """It is inside a collective, or waits for other ranks in another way."""
    where: str = ""
    """Innermost line of this package on the stack."""
    left: bool = False
    """It has finished its work and may exit."""

    def label(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def verdict(self, text: str) -> WatchdogVerdict:
        """This rank is at fault."""
        return WatchdogVerdict(self.rank, self.local_rank, self.node, f"{self.label()} {text}")

    def last_activity(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.doing} after step {self.step}{place}" if self.step else f"{self.doing}{place}"


class ProcessState(StrEnum):
    """The state of a process, as another process of the same node sees it."""

    ALIVE = "alive"
    GONE = "gone"
    STOPPED = "stopped"
    ON_ANOTHER_NODE = "on another node"


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """A rank as another rank sees it."""

    rank: int
    report: RankReport | None
    """Its last report; None if there was none yet."""
    silent_s: float
    """Seconds since its last new report."""
    state: ProcessState


@dataclass(frozen=True, slots=True)
class WatchdogVerdict:
    """Why the job ends."""

    rank: int
    local_rank: int
    node: str
    text: str
    """Names the rank at fault and what happened to it."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, content: bytes) -> WatchdogVerdict:
        fields = json.loads(content)
        return cls(int(fields["rank"]), int(fields["local_rank"]), str(fields["node"]), str(fields["text"]))


def diagnose(ranks: Sequence[ObservedRank], timeout_s: float, silent_s: float | None = None) -> WatchdogVerdict | None:
    """The verdict that ends the job, or None if the job is fine.

    A rank that is gone is reported at once. Everything else must last `timeout_s`; for silence, `silent_s` if given.
    """
    active_ranks = [rank for rank in ranks if rank.report is None or not rank.report.left]
    # In order of certainty: a missing process is a fact, silence is nearly one, idle times need all reports.
    for rank in active_ranks:
        if rank.report is not None and rank.state is ProcessState.GONE:
            return rank.report.verdict(f"is gone: it was killed while {rank.report.last_activity()}")
    for rank in active_ranks:
        if rank.silent_s >= (timeout_s if silent_s is None else silent_s):
            return _silence_verdict(rank)
    # A rank that has been silent for long is the cause, although others may have been idle for longer, since they
    # finished their part of the window before it: wait until it reports again or is named itself.
    if any(rank.silent_s >= timeout_s / 2 for rank in active_ranks):
        return None
    reports = [rank.report for rank in active_ranks if rank.report is not None]
    hanging = [r for r in reports if r.idle_s >= timeout_s and not r.waits]
    if hanging:
        return _stall_verdict(hanging, "hangs", "hang", "no sign of life")
    stuck = [r for r in reports if r.idle_s >= timeout_s and r.waits]
    # Ranks that have finished count here: their last action may just have ended a long wait of the others, whose
    # reports are older than that.
    if stuck and all(rank.report is not None and rank.report.idle_s >= timeout_s for rank in ranks):
        return _stall_verdict(stuck, "waits for the others", "wait for each other", "nothing arrived")
    return None


def _silence_verdict(observed: ObservedRank) -> WatchdogVerdict:
    since = f"no report for {observed.silent_s:.0f} s"
    if observed.report is None:
        text = f"rank {observed.rank} did not join: {since}; check that it was started"
        return WatchdogVerdict(observed.rank, observed.rank, "", text)
    state_text = {
        ProcessState.STOPPED: "is stopped (SIGSTOP, or a debugger)",
        ProcessState.ALIVE: "hangs outside of Python",
        ProcessState.ON_ANOTHER_NODE: "is gone, stopped, or its node is cut off",
        ProcessState.GONE: "is gone",
    }[observed.state]
    return observed.report.verdict(f"{state_text}: {since}; it was last {observed.report.last_activity()}")


def _stall_verdict(reports: Sequence[RankReport], singular: str, plural: str, symptom: str) -> WatchdogVerdict:
    """Names the ranks with the fewest finished steps: the others wait for them."""
    least_step = min(report.step for report in reports)
    behind = [report for report in reports if report.step == least_step]
    first, since = behind[0], f"{symptom} for {behind[0].idle_s:.0f} s"
    if len(behind) == 1:
        return first.verdict(f"{singular}: {since}, while {first.last_activity()}")
    descriptions = "; ".join(f"{report.label()} while {report.last_activity()}" for report in behind[:MAX_RANKS_NAMED])
    more = f"; and {len(behind) - MAX_RANKS_NAMED} more" if len(behind) > MAX_RANKS_NAMED else ""
    text = f"{len(behind)} processes {plural}: {since}: {descriptions}{more}"
    return WatchdogVerdict(first.rank, first.local_rank, first.node, text)

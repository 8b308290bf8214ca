"""What this process knows of the others, from their reports in the store and from the system."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from supertuner.core import processes
from supertuner.distributed.watchdog.diagnosis import Report, Seen, State, Verdict, report_from_bytes

MOST_LOOKED_AT = 16
"""Others that each process looks at; in larger jobs, the next ones by rank."""


class Others:
    """What is known of the others."""

    def __init__(self, store: Store, own: Report, ranks: int) -> None:
        self._store, self._own, self._ranks = store, own, ranks
        self._reports: dict[int, Report] = {}
        self._silent_s = dict.fromkeys(range(ranks), 0.0)

    def beat(self, elapsed_s: float) -> None:
        for rank in self._silent_s:
            self._silent_s[rank] += elapsed_s

    def seen(self, *, everybody: bool) -> list[Seen]:
        looked_at = self._ranks - 1 if everybody else min(self._ranks - 1, MOST_LOOKED_AT)
        ranks = [(self._own.rank + distance) % self._ranks for distance in range(1, looked_at + 1)]
        for rank in ranks:
            self._look(rank)
        return [Seen(rank, self._reports.get(rank), self._silent_s[rank], self._state(rank)) for rank in ranks]

    def end(self, verdict: Verdict) -> None:
        """One of this node that cannot end itself is ended: launchers wait long for a process that is stopped."""
        report = self._reports.get(verdict.rank)
        if report is not None and self._state(verdict.rank) is State.STOPPED and not report.left:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(report.pid, signal.SIGKILL)

    def _look(self, rank: int) -> None:
        name = f"watch/{rank}"
        if rank in self._reports or self._store.check([name]):
            report = report_from_bytes(self._store.get(name))
            if rank not in self._reports or self._reports[rank].beat != report.beat:
                self._silent_s[rank] = 0.0
            self._reports[rank] = report

    def _state(self, rank: int) -> State:
        report = self._reports.get(rank)
        if report is None or report.node != self._own.node:
            return State.ELSEWHERE
        return State(processes.state_of(report.pid, report.born))

"""What this process knows of the others, from their reports in the store and from the system."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from supertuner.core import processes
from supertuner.distributed.watchdog.diagnosis import (
    ObservedRank,
    ProcessState,
    RankReport,
    WatchdogVerdict,
    report_from_bytes,
)

MAX_WATCHED_RANKS = 16
"""Others that each process looks at; in larger jobs, the next ones by rank."""


class PeerReports:
    """What is known of the others."""

    def __init__(self, store: Store, own_report: RankReport, world_size: int) -> None:
        self._store, self._own_report, self._world_size = store, own_report, world_size
        self._reports: dict[int, RankReport] = {}
        self._silent_s = dict.fromkeys(range(world_size), 0.0)

    def add_elapsed(self, elapsed_s: float) -> None:
        for rank in self._silent_s:
            self._silent_s[rank] += elapsed_s

    def observe(self, *, all_ranks: bool) -> list[ObservedRank]:
        count = self._world_size - 1 if all_ranks else min(self._world_size - 1, MAX_WATCHED_RANKS)
        ranks = [(self._own_report.rank + distance) % self._world_size for distance in range(1, count + 1)]
        for rank in ranks:
            self._read_report(rank)
        return [ObservedRank(rank, self._reports.get(rank), self._silent_s[rank], self._state(rank)) for rank in ranks]

    def kill_if_stopped(self, verdict: WatchdogVerdict) -> None:
        """One of this node that cannot end itself is ended: launchers wait long for a process that is stopped."""
        report = self._reports.get(verdict.rank)
        if report is not None and self._state(verdict.rank) is ProcessState.STOPPED and not report.left:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(report.pid, signal.SIGKILL)

    def _read_report(self, rank: int) -> None:
        key = f"watch/{rank}"
        if rank in self._reports or self._store.check([key]):
            report = report_from_bytes(self._store.get(key))
            if rank not in self._reports or self._reports[rank].beat != report.beat:
                self._silent_s[rank] = 0.0
            self._reports[rank] = report

    def _state(self, rank: int) -> ProcessState:
        report = self._reports.get(rank)
        if report is None or report.node != self._own_report.node:
            return ProcessState.ON_ANOTHER_NODE
        return ProcessState(processes.process_state(report.pid, report.born))

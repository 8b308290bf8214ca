"""A thread beside training that observes the other ranks, and ends this process when the job cannot go on.

Twice a second each process writes a report into the store that all ranks share, and reads the reports of others. A rank
that is gone, stopped or hanging leads to one verdict, the same for all ranks (`diagnosis.py` decides). If the main
thread is stuck in a collective that will never end, this thread ends the process: after a verdict no process lives
longer than a few seconds.

The store belongs to the launcher, and a call to a stopped launcher never returns. Therefore a second thread, the guard,
which never calls the store, checks that the first one still beats.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Self

from torch.distributed.distributed_c10d import Store

from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core import processes
from supertuner.core.errors import PeerError
from supertuner.core.interrupts import forget_interrupts, interrupts_win, raise_interrupt
from supertuner.distributed.watchdog.collective_errors import is_collective_failure
from supertuner.distributed.watchdog.diagnosis import ObservedRank, ProcessState, RankReport, WatchdogVerdict, diagnose
from supertuner.distributed.watchdog.heartbeat import Heartbeat
from supertuner.distributed.watchdog.liveness import LivenessMonitor
from supertuner.distributed.watchdog.timeout import call_with_timeout

HEARTBEAT_S = 0.5
GRACE_S = 3.0
"""After a verdict: time for the main thread to end by itself, with the error of a broken connection."""
CLEANUP_S = 6.0
"""After an error of the main thread: time to close everything."""
DIAGNOSIS_S = 5.0
"""After a broken connection: time to find out which rank is gone."""
SILENCE_S = 3.0
"""After a broken connection, a rank that was silent for this long counts as gone."""
MAX_WATCHED_RANKS = 16
"""How many other ranks each process observes; in larger jobs, the next ones by rank."""
RESUME_HINT = "the next start goes on from the last checkpoint"
STANDARD_ERROR = 2
STOPPED_NOTE_S = 10.0
"""A rank that has been stopped for this long is reported, so that it can be continued before the job ends."""
VERDICT_KEY = "watch/verdict"
NO_RANK = -1
"""In place of a rank in a verdict: no rank is at fault."""
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that launchers pass on to all processes when one has failed; SIGHUP: their terminal was closed."""
_NAME_BY_EXIT_CODE = {128 + number: number.name for number in TERMINATION_SIGNALS}


class RankWatchdog:
    """The watchdog of one process. The main thread calls `start`, and at the end `finish` or `handle_error`."""

    def __init__(self, store: Store, env: LauncherEnvironment, heartbeat: Heartbeat, *, timeout_s: float) -> None:
        self._store, self._launch_env, self._heartbeat = store, env, heartbeat
        # Shorter than `timeout_s` by what the end itself takes, so that the job is over within `timeout_s`.
        self._stall_timeout_s = max(timeout_s / 2, timeout_s - GRACE_S - CLEANUP_S - 2 * HEARTBEAT_S)
        self._heartbeat_s = min(HEARTBEAT_S, timeout_s / 8)
        pid, node = os.getpid(), processes.pid_namespace_id()
        born = processes.process_start_ticks(pid)
        error_file = "" if env.error_file is None else str(env.error_file)
        self._identity = RankReport(env.rank, env.local_rank, platform.node(), node, pid, born, error_file)
        self._peers = PeerReports(store, self._identity, env.world_size)
        self._liveness = LivenessMonitor(heartbeat, chunk_s=self._stall_timeout_s / 10)
        self._beat_count = 0
        self._noted_stops: set[str] = set()
        self._verdict: WatchdogVerdict | None = None
        self._verdict_reached, self._connection_lost, self._exit_reached = Event(), Event(), Event()
        self._work_done, self._all_ranks_done, self._stopping = Event(), Event(), Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._guard_thread = threading.Thread(target=self._run_guard, name="watch guard", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._guard_thread.start()

    def finish(self) -> BaseException | None:
        """Wait until all ranks are done. Returns the error to raise if one of them failed.

        No rank leaves early: a launcher ends the others when the first one exits with anything but 0, and the store
        may live in rank 0.
        """
        self._work_done.set()
        while not self._all_ranks_done.wait(self._heartbeat_s / 4):
            if self._verdict_reached.is_set():
                break
        self._stopping.set()
        verdict = self._verdict
        if verdict is not None and verdict.rank != NO_RANK and not self._all_ranks_done.is_set():
            return self._peer_failure(verdict)
        self._thread.join(HEARTBEAT_S)  # a daemon: if it is in a call that never returns, it ends with the process
        return None

    def handle_error(self, error: BaseException) -> BaseException | None:
        """The main thread ends with `error`: report it to the other ranks, or find out which of them caused it.

        Returns the error to raise instead: if another rank is at fault or has reported the same failure, or if the
        connection was lost for an unknown reason; else None. After the return this process ends within CLEANUP_S,
        whatever the main thread does.
        """
        signal_name = termination_signal(error)
        replacement: BaseException | None = None
        if signal_name or isinstance(error, PeerError) or is_collective_failure(error):
            self._connection_lost.set()
            self._verdict_reached.wait(SILENCE_S / 2 if signal_name else DIAGNOSIS_S)
            replacement = self._explain_lost_connection(error, signal_name)
            if replacement is not None:  # who made it has called _exit_soon with the cause
                self._stopping.set()
                return replacement
        else:
            self._publish_own_failure(failure := f"failed: {_first_lines(error)}")
            if self._reported_by_other_rank(failure):
                replacement = SystemExit(getattr(error, "exit_code", 1))
        self._stopping.set()
        self._exit_soon(_first_lines(error))
        return replacement

    def _explain_lost_connection(self, error: BaseException, signal_name: str | None) -> BaseException | None:
        verdict = self._verdict
        if verdict is not None and verdict.rank != self._launch_env.rank:
            return self._peer_failure(verdict)
        if signal_name:
            self._publish_own_failure(f"was ended by {signal_name}")
            return None
        if isinstance(error, PeerError):
            self._publish_own_failure(f"failed: {_first_lines(error)}")
            return None
        reason = f"lost its connection to the other ranks, and no rank reported why: {_first_lines(error)}"
        self._publish_own_failure(reason)
        self._exit_soon(message := f"{self._identity.label()} {reason}; {RESUME_HINT}")
        return PeerError(message)

    def _reported_by_other_rank(self, failure: str) -> bool:
        """Whether another rank has reported the same failure already. Local rank 0 prints it in any case."""
        verdict = self._verdict
        same_failure = verdict is not None and verdict.rank != self._launch_env.rank and verdict.text.endswith(failure)
        return same_failure and self._launch_env.local_rank > 0

    # ── the watchdog's thread and its guard ──────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while True:
                self._beat()
                if self._verdict_reached.is_set():
                    break
                if self._stopping.wait(self._heartbeat_s / 4 if self._work_done.is_set() else self._heartbeat_s):
                    return
        except RuntimeError as error:  # torch raises it when the store's server is gone
            if not self._stopping.is_set() and not self._verdict_reached.is_set():
                self._handle_lost_store(f"is gone: {_first_lines(error)}", self._stall_timeout_s)
            return
        assert self._verdict is not None
        if self._verdict.rank == NO_RANK or self._stopping.wait(GRACE_S):
            return
        self._exit(self._verdict_message(self._verdict), visible=self._claims_report(self._verdict))

    def _run_guard(self) -> None:
        """End the run if the watchdog's thread hangs in a call to the store.

        Half of the timeout is for the launcher to answer, the other half for saving.
        """
        limit_s = left_s = self._stall_timeout_s / 2
        beat_count = 0
        while not self._stopping.wait(self._heartbeat_s) and not self._verdict_reached.is_set():
            if self._beat_count != beat_count:
                left_s, beat_count = limit_s, self._beat_count
                continue
            left_s -= self._heartbeat_s  # not the clock's time: this process itself may have been stopped meanwhile
            if left_s <= 0:
                problem = f"has not answered for {limit_s:.0f} s: it is stopped, or the network is down"
                self._handle_lost_store(problem, limit_s)
                return

    def _beat(self) -> None:
        """Publish this rank's report, read those of others, and act on a verdict."""
        done = self._work_done.is_set()  # read once: a rank may leave only after a report that says so
        self._liveness.beat()
        self._peers.add_elapsed(self._liveness.elapsed_s)
        report = self._build_report(left=done)
        self._store.set(f"watch/{report.rank}", json.dumps(asdict(report)))
        if self._store.check([VERDICT_KEY]):
            self._accept_verdict(WatchdogVerdict.from_bytes(self._store.get(VERDICT_KEY)))
            return
        broken = self._connection_lost.is_set()
        idle = self._liveness.idle_s >= self._stall_timeout_s
        observed = self._peers.observe(all_ranks=broken or done or idle)
        observed.append(ObservedRank(report.rank, report, 0.0, ProcessState.ALIVE))
        if done and all(rank.report is not None and rank.report.left for rank in observed):
            self._all_ranks_done.set()
            return
        self._note_stopped_ranks(observed)
        silent_s = min(SILENCE_S, self._stall_timeout_s) if broken else None
        verdict = diagnose(observed, self._stall_timeout_s, silent_s)
        if verdict is not None:
            self._accept_verdict(self._publish_verdict(verdict))

    def _build_report(self, *, left: bool) -> RankReport:
        self._beat_count += 1
        location = self._liveness.location
        return replace(
            self._identity,
            beat=self._beat_count,
            doing=self._heartbeat.activity,
            step=self._heartbeat.step,
            idle_s=self._liveness.idle_s,
            waits=location.waits_for_ranks,
            where=location.where,
            left=left,
        )

    def _note_stopped_ranks(self, observed: Sequence[ObservedRank]) -> None:
        """Print which ranks of this node are stopped, long before that ends the job; one rank prints for all."""
        for rank in observed:
            if rank.state is not ProcessState.STOPPED or rank.silent_s < STOPPED_NOTE_S or rank.report is None:
                continue
            stop = f"watch/stopped/{rank.rank}/{rank.report.beat}"  # a rank that continues may be stopped again
            if stop not in self._noted_stops and self._claim(stop):
                problem = f"{rank.report.label()} is stopped (SIGSTOP, or a debugger), and the others wait for it"
                remedy = f"continue it with `kill -CONT {rank.report.pid}`"
                _print(f"{problem}; {remedy}, or the job ends in {self._stall_timeout_s - rank.silent_s:.0f} s")
            self._noted_stops.add(stop)

    def _publish_verdict(self, verdict: WatchdogVerdict) -> WatchdogVerdict:
        """Returns the verdict that counts for all ranks: the first that any of them published."""
        stored = self._store.compare_set(VERDICT_KEY, "", verdict.to_text())
        return WatchdogVerdict.from_bytes(stored)

    def _accept_verdict(self, verdict: WatchdogVerdict) -> None:
        self._verdict = verdict
        self._peers.kill_if_stopped(verdict)
        self._verdict_reached.set()

    def _publish_own_failure(self, text: str) -> None:
        """Publish, from the main thread, that this rank is at fault."""
        verdict = self._identity.verdict(text)
        with suppress(RuntimeError, TimeoutError):  # without a store there is no rank left to report to
            self._verdict = self._verdict or call_with_timeout(DIAGNOSIS_S, lambda: self._publish_verdict(verdict))
            self._verdict_reached.set()

    def _handle_lost_store(self, problem: str, limit_s: float) -> None:
        """The launcher of the first node ended without ending its processes, or is stopped, or its node is gone.

        This process then saves and stops, as if the launcher had passed on SIGTERM. If it cannot, because ranks of the
        lost node are missing, its next collective fails by itself.
        """
        if self._work_done.is_set():
            self._all_ranks_done.set()  # the store ended with its owner, which was done as well
            return
        self._verdict = WatchdogVerdict(NO_RANK, NO_RANK, "", f"the launcher of the first node {problem}")
        self._verdict_reached.set()
        _print(f"{self._verdict.text}; saving and stopping")  # each rank: without a store they cannot agree on one
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stopping.wait(limit_s):
            self._exit(self._verdict_message(self._verdict))

    # ── the end of the process ───────────────────────────────────────────────────────────────────────────────────

    def _verdict_message(self, verdict: WatchdogVerdict) -> str:
        return f"{verdict.text}; rank {self._launch_env.rank} ends with it, and {RESUME_HINT}"

    def _claims_report(self, verdict: WatchdogVerdict) -> bool:
        """Whether this rank prints the verdict for its node: the first one that asks, but not the rank at fault, unless
        it is alone there."""
        if verdict.rank == NO_RANK:
            return self._launch_env.local_rank == 0
        if verdict.rank == self._launch_env.rank and self._launch_env.local_world_size > 1:
            return False
        key = f"watch/reported/{self._identity.node}"
        with suppress(RuntimeError, TimeoutError):  # without a store the ranks cannot agree, and each prints it
            return call_with_timeout(DIAGNOSIS_S, lambda: self._claim(key))
        return True

    def _claim(self, key: str) -> bool:
        """Whether this rank is the first one to claim the key."""
        name = str(self._launch_env.rank)
        return self._store.compare_set(key, "", name) == name.encode()

    def _peer_failure(self, verdict: WatchdogVerdict) -> BaseException:
        """The error that ends this process when another rank is at fault."""
        message, claimed = self._verdict_message(verdict), self._claims_report(verdict)
        self._exit_soon(message, visible=claimed)
        return PeerError(message) if claimed else SystemExit(1)

    def _exit_soon(self, message: str, *, visible: bool = True) -> None:
        """Write the reason for torchrun, and end this process after CLEANUP_S if it has not ended by itself."""
        self._write_own_error_file(message)
        atexit.register(self._exit_reached.set)
        arguments = (message, visible)
        threading.Thread(target=self._exit_after_cleanup_time, args=arguments, name="end", daemon=True).start()

    def _exit_after_cleanup_time(self, message: str, visible: bool) -> None:
        time.sleep(CLEANUP_S)
        self._exit(message, visible=visible and not self._exit_reached.is_set())

    def _exit(self, message: str, *, visible: bool = True) -> None:
        if visible:
            _print(message)
        self._write_own_error_file(message)
        os._exit(1)

    def _write_own_error_file(self, message: str) -> None:
        if self._launch_env.error_file is not None:
            write_error_file(self._launch_env.error_file, message, time.time())


class PeerReports:
    """The last report of each other rank, how long it has been silent, and the state of its process on this node."""

    def __init__(self, store: Store, own_report: RankReport, world_size: int) -> None:
        self._store, self._own_report, self._world_size = store, own_report, world_size
        self._reports: dict[int, RankReport] = {}
        self._silent_s = dict.fromkeys(range(world_size), 0.0)

    def add_elapsed(self, elapsed_s: float) -> None:
        """Count this time as silence of every rank, until its next report is read."""
        for rank in self._silent_s:
            self._silent_s[rank] += elapsed_s

    def observe(self, *, all_ranks: bool) -> list[ObservedRank]:
        """Read the reports of the observed ranks, or of all."""
        count = self._world_size - 1 if all_ranks else min(self._world_size - 1, MAX_WATCHED_RANKS)
        ranks = [(self._own_report.rank + distance) % self._world_size for distance in range(1, count + 1)]
        for rank in ranks:
            self._read_report(rank)
        return [ObservedRank(rank, self._reports.get(rank), self._silent_s[rank], self._state(rank)) for rank in ranks]

    def kill_if_stopped(self, verdict: WatchdogVerdict) -> None:
        """Kill the rank at fault if it is a stopped process of this node: launchers wait long for a stopped process.

        Its error file then says that it was stopped: the launcher itself only sees that SIGKILL ended it.
        """
        report = self._reports.get(verdict.rank)
        if report is not None and self._state(verdict.rank) is ProcessState.STOPPED and not report.left:
            if report.error_file:
                write_error_file(Path(report.error_file), verdict.text, time.time() - self._silent_s[verdict.rank])
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(report.pid, signal.SIGKILL)

    def _read_report(self, rank: int) -> None:
        key = f"watch/{rank}"
        if rank in self._reports or self._store.check([key]):
            report = RankReport(**json.loads(self._store.get(key)))
            if rank not in self._reports or self._reports[rank].beat != report.beat:
                self._silent_s[rank] = 0.0
            self._reports[rank] = report

    def _state(self, rank: int) -> ProcessState:
        report = self._reports.get(rank)
        if report is None or report.node != self._own_report.node:
            return ProcessState.ON_ANOTHER_NODE
        return ProcessState(processes.process_state(report.pid, report.born))


@contextmanager
def watch_ranks(store: Store, env: LauncherEnvironment, heartbeat: Heartbeat, *, timeout_s: float) -> Iterator[None]:
    """Inside the block, this process observes the other ranks and they observe it."""
    watchdog = RankWatchdog(_clone_store(store, timeout_s), env, heartbeat, timeout_s=timeout_s)
    with TerminationSignals() as signals:
        watchdog.start()
        try:
            with interrupts_win():
                yield
            failure = watchdog.finish()
        except BaseException as error:
            forget_interrupts()  # `error` is one of them, or there was none; from here on the watchdog decides
            signals.ignore()  # a launcher sends SIGTERM next: the error must stay the reason
            replacement = watchdog.handle_error(error)
            if replacement is None:
                raise
            raise replacement from error
        if failure is not None:
            signals.ignore()
            raise failure


def _clone_store(store: Store, timeout_s: float) -> Store:
    """A second connection to the store: calls on one connection wait for each other."""
    try:
        clone: Store = call_with_timeout(timeout_s, store.clone)  # type: ignore[attr-defined]  # missing in torch's stubs
    except TimeoutError as error:
        problem = f"the launcher of the first node has not answered for {timeout_s:g} s"
        raise PeerError(f"{problem}; check that it is running") from error
    clone.set_timeout(timedelta(seconds=timeout_s))  # a shorter one would end a job whose launcher is slow once
    return clone


def write_error_file(path: Path, message: str, timestamp_s: float) -> None:
    """Write why a process ended, unless its file exists. torchrun prints the message with the earliest time first."""
    error_report = {"message": {"message": message, "extraInfo": {"timestamp": str(int(timestamp_s))}}}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    with suppress(OSError):  # the message is on the screen already; the file improves the launcher's summary
        if path.exists():
            return
        temporary.write_text(json.dumps(error_report))
        os.replace(temporary, path)  # torchrun may read it at any moment


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:8]) or type(error).__name__


def _print(text: str) -> None:
    """Write to the descriptor itself: the main thread may hold the lock of sys.stderr."""
    with suppress(OSError):  # stderr may be closed
        os.write(STANDARD_ERROR, f"{text}\n".encode())


class TerminationSignals:
    """Inside the block, SIGTERM and SIGHUP raise SystemExit in the main thread, unless they already have a handler.

    Once they are ignored they stay so: the process is about to end, and must not be ended before it has said why.
    """

    def __enter__(self) -> Self:
        signals = TERMINATION_SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._handled = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
        self._set_handler(_raise_system_exit)
        return self

    def ignore(self) -> None:
        self._set_handler(signal.SIG_IGN)
        self._handled.clear()

    def __exit__(self, *error: object) -> None:
        self._set_handler(signal.SIG_DFL)

    def _set_handler(self, handler: object) -> None:
        for number in self._handled:
            signal.signal(number, handler)  # type: ignore[arg-type]


def termination_signal(error: BaseException) -> str | None:
    """The name of the signal whose handler raised this error; None for any other error."""
    return _NAME_BY_EXIT_CODE.get(error.code) if isinstance(error, SystemExit) and isinstance(error.code, int) else None


def _raise_system_exit(number: int, frame: FrameType | None) -> None:
    raise_interrupt(SystemExit(128 + number))

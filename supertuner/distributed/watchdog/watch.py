"""A thread beside training that knows how the other processes are, and ends this one when the job cannot go on.

Each process writes a report into the store that all of them meet at, twice a second, and reads those of others. Who is
gone, stopped or hanging becomes one verdict, the same for all (`verdict.py` decides). A process whose main thread
cannot be reached, in a collective that will never end, is ended here: after a verdict none outlives a few seconds.

The store is the launcher's, and a launcher that is stopped is asked for ever. So a second thread, that asks nobody,
looks at the first.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core import processes
from supertuner.core.errors import PeerError
from supertuner.distributed.watchdog.collective_errors import is_collective_failure
from supertuner.distributed.watchdog.diagnosis import (
    ObservedRank,
    ProcessState,
    RankReport,
    WatchdogVerdict,
    diagnose,
    report_to_text,
    verdict_about,
)
from supertuner.distributed.watchdog.heartbeat import Heartbeat
from supertuner.distributed.watchdog.liveness import LivenessMonitor
from supertuner.distributed.watchdog.peer_reports import PeerReports
from supertuner.distributed.watchdog.signals import TerminationSignals, termination_signal
from supertuner.distributed.watchdog.timeout import call_with_timeout

HEARTBEAT_S = 0.5
GRACE_S = 3.0
"""After a verdict: for the main thread to end by itself, by the error of a broken connection."""
CLEANUP_S = 6.0
"""After an error of the main thread: for everything to be closed."""
DIAGNOSIS_S = 5.0
"""After a broken connection: to find out who is gone."""
SILENCE_S = 3.0
"""And then, who has not been heard for so long is."""
RESUME_HINT = "the next start goes on from the last checkpoint"
STANDARD_ERROR = 2
VERDICT_KEY = "watch/verdict"
NO_RANK = -1
"""Of the processes is to blame."""


class RankWatchdog:
    """Of one process. `start`, and then `leave` or `failed`, by the main thread."""

    def __init__(
        self, store: Store, launch_env: LauncherEnvironment, heartbeat: Heartbeat, *, timeout_s: float
    ) -> None:
        self._store, self._launch_env, self._heartbeat = store, launch_env, heartbeat
        self._stall_timeout_s = max(
            timeout_s / 2, timeout_s - GRACE_S - CLEANUP_S - 2 * HEARTBEAT_S
        )  # the end is within the time
        self._heartbeat_s = min(HEARTBEAT_S, timeout_s / 8)
        pid = os.getpid()
        self._identity = RankReport(
            launch_env.rank,
            launch_env.local_rank,
            platform.node(),
            processes.pid_namespace_id(),
            pid,
            processes.process_start_ticks(pid),
        )
        self._peers = PeerReports(store, self._identity, launch_env.world_size)
        self._liveness = LivenessMonitor(heartbeat, chunk_s=self._stall_timeout_s / 10)
        self._beat_count = 0
        self._verdict: WatchdogVerdict | None = None
        self._verdict_reached, self._connection_lost, self._exit_reached = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._work_done, self._all_ranks_done, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._guard_thread = threading.Thread(target=self._run_guard, name="watch's guard", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._guard_thread.start()

    def finish(self) -> None:
        """All is done here. Nobody goes before all are done: a launcher ends the others when the first one goes with
        anything but 0, and the store may be the first process's own."""
        self._work_done.set()
        while not self._all_ranks_done.wait(self._heartbeat_s / 4):
            if self._verdict_reached.is_set():
                break
        self._stopping.set()
        verdict = self._verdict
        if verdict is not None and verdict.rank != NO_RANK and not self._all_ranks_done.is_set():
            raise self._peer_failure(verdict)
        self._thread.join(HEARTBEAT_S)  # it may be in a call that never returns, and ends with the process then

    def handle_error(self, error: BaseException) -> BaseException | None:
        """The main thread ends with an error: tell the others, or learn from them why. What to raise instead, if it is
        another process's fault. Whatever happens from here on, this process ends soon."""
        signal_name = termination_signal(error)
        replacement: BaseException | None = None
        if signal_name or isinstance(error, PeerError) or is_collective_failure(error):
            self._connection_lost.set()
            self._verdict_reached.wait(SILENCE_S / 2 if signal_name else DIAGNOSIS_S)
            replacement = self._explain_lost_connection(error, signal_name)
        else:
            self._publish_from_main_thread(
                verdict_about(self._build_report(), failure := f"failed: {_first_lines(error)}")
            )
            if self._reported_by_other_rank(failure):
                replacement = SystemExit(getattr(error, "exit_code", 1))
        self._stopping.set()
        if not isinstance(replacement, PeerError | SystemExit):
            self._exit_soon(_first_lines(error))
        return replacement

    def _explain_lost_connection(self, error: BaseException, signal_name: str | None) -> BaseException | None:
        verdict = self._verdict
        if verdict is not None and verdict.rank != self._launch_env.rank:
            return self._peer_failure(verdict)
        if signal_name:
            self._publish_from_main_thread(verdict_about(self._build_report(), f"was ended by {signal_name}"))
            return None
        if isinstance(error, PeerError):
            self._publish_from_main_thread(verdict_about(self._build_report(), f"failed: {_first_lines(error)}"))
            return None
        reason = f"lost its connection to the others, and nobody said why: {_first_lines(error)}"
        self._publish_from_main_thread(verdict_about(self._build_report(), reason))
        self._exit_soon(message := f"{self._identity.label()} {reason}; {RESUME_HINT}")
        return PeerError(message)

    def _reported_by_other_rank(self, failure: str) -> bool:
        """What is wrong for all, another process has said; this one need not, if it is not its node's first."""
        verdict = self._verdict
        same_failure = verdict is not None and verdict.rank != self._launch_env.rank and verdict.text.endswith(failure)
        return same_failure and self._launch_env.local_rank > 0

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while True:
                self._beat()
                if self._verdict_reached.is_set():
                    break
                if self._stopping.wait(self._heartbeat_s / 4 if self._work_done.is_set() else self._heartbeat_s):
                    return
        except RuntimeError as error:  # torch's, of a store that is not there
            if not self._stopping.is_set() and not self._verdict_reached.is_set():
                self._handle_lost_store(f"is gone: {_first_lines(error)}", self._stall_timeout_s)
            return
        assert self._verdict is not None
        if self._verdict.rank == NO_RANK or self._stopping.wait(GRACE_S):
            return
        self._exit(self._verdict_message(self._verdict))

    def _run_guard(self) -> None:
        """Half of the time is for the launcher to answer, the other half for saving."""
        limit_s = left_s = self._stall_timeout_s / 2
        beat_count = 0
        while not self._stopping.wait(self._heartbeat_s) and not self._verdict_reached.is_set():
            if self._beat_count != beat_count:
                left_s, beat_count = limit_s, self._beat_count
                continue
            left_s -= self._heartbeat_s  # however long that was: this process may have been stopped itself
            if left_s <= 0:
                self._handle_lost_store(f"has not answered for {limit_s:.0f} s: it is stopped, or cut off", limit_s)
                return

    def _beat(self) -> None:
        done = self._work_done.is_set()  # looked at once: nobody goes who has not told the others that it may
        self._liveness.beat()
        self._peers.add_elapsed(self._liveness.elapsed_s)
        report = self._build_report(left=done)
        self._publish_report(report)
        if self._store.check([VERDICT_KEY]):
            self._accept_verdict(WatchdogVerdict.from_bytes(self._store.get(VERDICT_KEY)))
            return
        broken = self._connection_lost.is_set()
        idle = self._liveness.idle_s >= self._stall_timeout_s
        observed = [
            *self._peers.observe(all_ranks=broken or done or idle),
            ObservedRank(report.rank, report, 0.0, ProcessState.ALIVE),
        ]
        if done and all(one.report is not None and one.report.left for one in observed):
            self._all_ranks_done.set()
            return
        silent_s = min(SILENCE_S, self._stall_timeout_s) if broken else None
        verdict = diagnose(observed, self._stall_timeout_s, silent_s=silent_s)
        if verdict is not None:
            self._accept_verdict(self._publish_verdict(verdict))

    def _publish_report(self, report: RankReport) -> None:
        self._store.set(f"watch/{report.rank}", report_to_text(report))

    def _build_report(self, *, left: bool = False) -> RankReport:
        self._beat_count += 1
        identity, location = self._identity, self._liveness.location
        return RankReport(
            identity.rank,
            identity.local_rank,
            identity.host,
            identity.node,
            identity.pid,
            identity.born,
            beat=self._beat_count,
            doing=self._heartbeat.activity,
            step=self._heartbeat.step,
            idle_s=self._liveness.idle_s,
            waits=location.waits_for_ranks,
            where=location.where,
            left=left,
        )

    def _publish_verdict(self, verdict: WatchdogVerdict) -> WatchdogVerdict:
        """What counts: the first verdict of all."""
        stored = self._store.compare_set(VERDICT_KEY, "", verdict.to_text())
        return WatchdogVerdict.from_bytes(stored)

    def _accept_verdict(self, verdict: WatchdogVerdict) -> None:
        self._verdict = verdict
        self._peers.kill_if_stopped(verdict)
        self._verdict_reached.set()

    def _publish_from_main_thread(self, verdict: WatchdogVerdict) -> None:
        """By the main thread."""
        with suppress(RuntimeError, TimeoutError):  # a store that is gone has nobody left to tell
            self._verdict = self._verdict or call_with_timeout(DIAGNOSIS_S, lambda: self._publish_verdict(verdict))
            self._verdict_reached.set()

    def _handle_lost_store(self, problem: str, limit_s: float) -> None:
        """The launcher of the first node ended without ending us, or is stopped, or that node is gone. Processes that
        are whole save and stop, as if the launcher had passed on a signal; where they are not, the error of it comes by
        itself."""
        if self._work_done.is_set():
            self._all_ranks_done.set()  # nobody can be asked any more: it went with its owner, who was done as well
            return
        self._verdict = WatchdogVerdict(NO_RANK, NO_RANK, "", f"the launcher of the first node {problem}")
        self._verdict_reached.set()
        _print(f"{self._verdict.text}; saving and stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stopping.wait(limit_s):
            self._exit(self._verdict_message(self._verdict))

    # ------------------------------------------------------------------ the end

    def _verdict_message(self, verdict: WatchdogVerdict) -> str:
        return f"{verdict.text}; rank {self._launch_env.rank} ends with it, and {RESUME_HINT}"

    def _speaks_for_node(self, verdict: WatchdogVerdict) -> bool:
        """One process of each node does: the first that is not the one it is about."""
        about_first = verdict.node == self._identity.node and verdict.local_rank == 0
        return self._launch_env.local_rank == (1 if about_first else 0)

    def _peer_failure(self, verdict: WatchdogVerdict) -> BaseException:
        """What ends this process for another one's fault."""
        self._exit_soon(message := self._verdict_message(verdict))
        return PeerError(message) if self._speaks_for_node(verdict) else SystemExit(1)

    def _exit_soon(self, message: str) -> None:
        """From here on this process has so long to close everything by itself, and to say why it ends."""
        self._write_error_file(message)
        atexit.register(self._exit_reached.set)
        threading.Thread(target=self._exit_after_cleanup_time, args=(message,), name="end", daemon=True).start()

    def _exit_after_cleanup_time(self, message: str) -> None:
        time.sleep(CLEANUP_S)
        if self._exit_reached.is_set():
            os._exit(1)
        self._exit(message)

    def _exit(self, message: str) -> None:
        _print(message)
        self._write_error_file(message)
        os._exit(1)

    def _write_error_file(self, message: str) -> None:
        """Where torchrun looks for the reason of a failure; it tells the first of them."""
        path = self._launch_env.error_file
        if path is not None and not path.exists():
            error_report = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
            with suppress(OSError):  # it was said on screen; the launcher's own report is only kinder with it
                path.write_text(json.dumps(error_report))


@contextmanager
def watch_ranks(
    store: Store, launch_env: LauncherEnvironment, heartbeat: Heartbeat, *, timeout_s: float
) -> Iterator[None]:
    """While inside, the others are watched, and this process is watched by them."""
    own_store = _clone_store(store, timeout_s)
    watchdog = RankWatchdog(own_store, launch_env, heartbeat, timeout_s=timeout_s)
    with TerminationSignals() as signals:
        watchdog.start()
        try:
            yield
        except BaseException as error:
            signals.ignore()  # it ends anyway, and not for a signal that follows
            replacement = watchdog.handle_error(error)
            if replacement is None:
                raise
            raise replacement from error
        watchdog.finish()


def _clone_store(store: Store, timeout_s: float) -> Store:
    """The same store; its calls wait, and must not make those of others wait."""
    try:
        clone: Store = call_with_timeout(timeout_s, store.clone)  # type: ignore[attr-defined]  # torch's stubs do not know it
    except TimeoutError as error:
        raise PeerError(
            f"the launcher of the first node has not answered for {timeout_s:g} s; see that it runs"
        ) from error
    clone.set_timeout(timedelta(seconds=timeout_s))  # less would end a job whose launcher is slow once
    return clone


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:8]) or type(error).__name__


def _print(text: str) -> None:
    """Straight to the descriptor: the main thread may hold any lock."""
    with suppress(OSError):  # nobody may be listening there
        os.write(STANDARD_ERROR, f"{text}\n".encode())

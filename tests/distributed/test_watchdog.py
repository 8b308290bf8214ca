"""A rank that is gone, stopped or hanging ends the job, and is named with its activity; one that works does not."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from supertuner.distributed.watchdog.diagnosis import ObservedRank, ProcessState, RankReport, WatchdogVerdict, diagnose
from supertuner.distributed.watchdog.heartbeat import Heartbeat
from supertuner.distributed.watchdog.liveness import LivenessMonitor
from tests.distributed.ranks import RankOutcome, RankProcesses, all_messages, launched_ranks, rank_log
from tests.distributed.watched import signalled_after_a_death, stopped_for_a_while, together

SHORT_S = 2.0
LONG_S = 600.0


def _report(rank: int, **fields: object) -> RankReport:
    whole = RankReport(rank, rank, "node", "one", 100 + rank, 1, doing="training", step=5)
    return dataclasses.replace(whole, **fields)  # type: ignore[arg-type]


def _seen(report: RankReport, silent_s: float = 0.0, state: ProcessState = ProcessState.ALIVE) -> ObservedRank:
    return ObservedRank(report.rank, report, silent_s, state)


def _words(*seen: ObservedRank) -> str:
    verdict = diagnose(seen, 10.0)
    assert verdict is not None
    return verdict.text


def test_ranks_that_make_progress_cause_no_verdict():
    assert diagnose([_seen(_report(0)), _seen(_report(1, idle_s=9.9), 9.9)], 10.0) is None


def test_a_waiting_rank_is_not_at_fault_while_another_works():
    """Rank 0 may validate for an hour."""
    assert diagnose([_seen(_report(0)), _seen(_report(1, idle_s=3600, waits=True))], 10.0) is None


def test_a_rank_that_waited_long_is_not_at_fault_when_the_other_has_finished():
    """Its last report is older than the end of its wait."""
    waiting = _seen(_report(0, idle_s=3600, waits=True))
    assert diagnose([waiting, _seen(_report(1, left=True, idle_s=1))], 10.0) is None
    assert "waits for the others" in _words(waiting, _seen(_report(1, left=True, idle_s=11)))


def test_a_rank_that_is_gone_is_named_at_once():
    assert _words(_seen(_report(0)), _seen(_report(1, where="a.py:3, f"), state=ProcessState.GONE)) == (
        "rank 1 (node, pid 101) is gone: it was killed while training after step 5 at a.py:3, f"
    )


def test_a_finished_rank_may_exit():
    assert diagnose([_seen(_report(0)), _seen(_report(1, left=True), 99.0, ProcessState.GONE)], 10.0) is None


def test_a_rank_that_never_joined_is_named():
    assert "rank 1 did not join" in _words(_seen(_report(0)), ObservedRank(1, None, 10.0, ProcessState.ON_ANOTHER_NODE))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (ProcessState.STOPPED, "is stopped (SIGSTOP, or a debugger): no report for 11 s"),
        (ProcessState.ALIVE, "hangs outside of Python"),
        (ProcessState.ON_ANOTHER_NODE, "is gone, stopped, or its node is cut off"),
    ],
)
def test_a_silent_rank_is_named_with_the_state_of_its_process(state, words):
    assert words in _words(_seen(_report(0)), _seen(_report(1), 11.0, state))


def test_a_rank_that_is_idle_because_another_one_is_silent_is_not_at_fault():
    """Its GPU waits for the silent rank, which looks like a hang; it was idle before the other one was stopped."""
    idle, stopped = _seen(_report(0, idle_s=12)), _report(1)
    assert diagnose([idle, _seen(stopped, 9.0, ProcessState.STOPPED)], 10.0) is None
    assert "rank 1 (node, pid 101) is stopped" in _words(idle, _seen(stopped, 10.0, ProcessState.STOPPED))
    assert "rank 0 (node, pid 100) hangs" in _words(idle, _seen(stopped, 1.0))


def test_of_idle_ranks_the_one_that_does_not_wait_hangs():
    waiting = _seen(_report(0, idle_s=20, waits=True))
    assert _words(waiting, _seen(_report(1, idle_s=12, doing="painting"))) == (
        "rank 1 (node, pid 101) hangs: no sign of life for 12 s, while painting after step 5"
    )


def test_of_hanging_ranks_the_one_furthest_behind_is_at_fault():
    """The GPUs of the others wait for it, which looks the same from outside."""
    ahead = [_seen(_report(rank, idle_s=20, step=6)) for rank in (0, 1)]
    assert "rank 2 (node, pid 102) hangs" in _words(*ahead, _seen(_report(2, idle_s=20, step=5)))


def test_ranks_that_all_wait_are_named_together():
    text = _words(*(_seen(_report(rank, idle_s=20, waits=True)) for rank in range(6)))
    assert text.startswith("6 processes wait for each other: nothing arrived for 20 s: rank 0 (node, pid 100) while")
    assert text.endswith("rank 3 (node, pid 103) while training after step 5; and 2 more")


def test_a_verdict_survives_serialisation():
    verdict = WatchdogVerdict(1, 0, "a node", "rank 1 is gone — «quoted»")
    assert WatchdogVerdict.from_bytes(verdict.to_text().encode()) == verdict


def _ended(
    fault: str, logs: Path, count: int = 2, timeout_s: float = LONG_S
) -> tuple[RankProcesses, list[RankOutcome]]:
    with launched_ranks(count, together, logs, fault, timeout_s) as ranks:
        return ranks, ranks.ended()


@pytest.mark.parametrize("count", [2, 3])
def test_a_killed_rank_is_named_by_one_of_the_others(tmp_path, count):
    ranks, outcomes = _ended("killed", tmp_path, count)
    guilty = outcomes.pop(1)
    assert guilty.exitcode == -9
    who = f"PeerError: rank 1 ({os.uname().nodename}, pid {ranks.pids[1]}) is gone: it was killed while "
    errors = [outcome.error or "" for outcome in outcomes]
    assert sum(who in error for error in errors) == 1, "one rank of a node prints the message"
    assert sum(error.endswith("SystemExit: 1\n") for error in errors) == count - 2
    assert "the next start goes on from the last checkpoint" in "".join(errors)


def test_of_two_ranks_killed_at_once_one_is_named_by_the_third(tmp_path):
    _, (*killed, third) = _ended("two killed", tmp_path, count=3)
    assert [outcome.exitcode for outcome in killed] == [-9, -9]
    assert "PeerError: rank " in (third.error or "") and "is gone: it was killed" in (third.error or "")


def test_a_rank_that_exits_early_is_gone(tmp_path):
    _, (first, _) = _ended("leaving", tmp_path)
    assert "is gone" in (first.error or "")


def test_the_other_ranks_report_the_error_of_one(tmp_path):
    _, (first, guilty) = _ended("failing", tmp_path)
    assert "StageError: the disk is full; free some" in (guilty.error or "")
    assert "failed: the disk is full; free some; rank 0 ends with it" in (first.error or "")


def test_a_failure_of_all_ranks_is_not_printed_by_all(tmp_path):
    _, outcomes = _ended("failing together", tmp_path, count=3)
    last = [(outcome.error or "").splitlines()[-1] for outcome in outcomes]
    assert any("StageError: the disk is full; free some" in words for words in last)
    assert any(words == "SystemExit: 1" for words in last), "another rank printed it"
    assert not any(outcome.ended_well for outcome in outcomes)


def test_a_stopped_rank_is_named_and_killed(tmp_path):
    _, outcomes = _ended("stopped", tmp_path, timeout_s=SHORT_S)
    assert "is stopped (SIGSTOP, or a debugger)" in all_messages(tmp_path, outcomes)
    assert outcomes[1].exitcode == -9


def test_a_stopped_rank_is_reported_long_before_the_limit_and_may_continue(tmp_path):
    with launched_ranks(3, stopped_for_a_while, tmp_path, LONG_S) as ranks:
        while not any("is stopped" in log.read_text() for log in tmp_path.glob("rank-*.txt")):
            time.sleep(0.05)
        time.sleep(1.0)  # so that another rank would report it, too
        ranks.signal(1, signal.SIGCONT)
        outcomes = ranks.ended()
    assert [outcome.value for outcome in outcomes] == [2, 2, 2]
    (line,) = [line for line in all_messages(tmp_path, outcomes).splitlines() if "is stopped" in line]
    assert f"continue it with `kill -CONT {ranks.pids[1]}`" in line


def test_a_hanging_rank_reports_where_it_is_and_all_ranks_end(tmp_path):
    _, outcomes = _ended("hanging", tmp_path, count=3, timeout_s=SHORT_S)
    assert [outcome.ended_well for outcome in outcomes] == [False] * 3
    words = all_messages(tmp_path, outcomes)
    assert words.count("hangs: no sign of life for") == 1, "one rank of a node prints the message"
    assert "while painting" in words


def test_a_rank_that_ends_with_another_one_is_not_ended_by_a_signal_before_it_has_said_why(tmp_path):
    """A launcher sends SIGTERM at any moment after a death."""
    with launched_ranks(2, signalled_after_a_death, tmp_path) as ranks:
        first, _ = ranks.ended()
    assert "rank 1 (" in first.value


def test_ranks_in_different_collectives_do_not_wait_for_ever(tmp_path):
    _, outcomes = _ended("out of step", tmp_path, timeout_s=SHORT_S)
    assert not any(outcome.ended_well for outcome in outcomes)


def test_a_rank_ended_by_a_signal_is_named(tmp_path):
    _, (first, _) = _ended("terminated", tmp_path)
    assert "was ended by SIGTERM" in (first.error or "")


def test_a_signal_after_an_error_does_not_replace_the_error(tmp_path):
    _, (_, guilty) = _ended("terminated late", tmp_path)
    assert (guilty.error or "").splitlines()[-1].endswith("PeerError: process 0 of this node is gone")


def _idle_after(action: Callable[[], None], *, in_pass: bool = False) -> float:
    heartbeat = Heartbeat()
    heartbeat.mark(in_window=in_pass)
    life = LivenessMonitor(heartbeat, chunk_s=0.05)
    life.beat()
    worker = threading.Thread(target=action)  # the watchdog's own CPU time is left out
    worker.start()
    worker.join()
    life.beat()
    return life.idle_s


def _work() -> None:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass


def _download() -> None:
    time.sleep(0.1)
    Path("/dev/null").write_bytes(bytes(1 << 20))


def test_a_rank_that_works_silently_does_not_hang():
    """A compiler, a download: no events for long, but the machine is used."""
    assert _idle_after(_work) == 0
    assert _idle_after(_download) == 0
    assert _idle_after(lambda: time.sleep(0.2)) >= 0.2


def test_inside_a_window_the_use_of_the_cpu_is_no_sign_of_life():
    """Each micro-batch is one; an endless loop uses the CPU as well."""
    assert _idle_after(_work, in_pass=True) >= 0.3


def test_all_ranks_leave_together_when_nothing_is_wrong(tmp_path):
    _, outcomes = _ended("nothing", tmp_path, count=3)
    assert [outcome.value for outcome in outcomes] == [2, 2, 2]
    assert not any(rank_log(tmp_path, rank) for rank in range(3))

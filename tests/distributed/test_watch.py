"""A process that is gone, stopped or hanging ends the job, and is named with what it did; one that works does not."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from supertuner.distributed.watchdog.diagnosis import ObservedRank, ProcessState, RankReport, WatchdogVerdict, diagnose
from supertuner.distributed.watchdog.heartbeat import Heartbeat
from supertuner.distributed.watchdog.liveness import LivenessMonitor
from tests.distributed.ranks import RankOutcome, RankProcesses, launched_ranks, rank_log
from tests.distributed.watched import together

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


def test_processes_that_come_on_are_left_alone():
    assert diagnose([_seen(_report(0)), _seen(_report(1, idle_s=9.9), 9.9)], 10.0) is None


def test_one_that_waits_is_not_to_blame_while_another_works():
    """Rank 0 may validate for an hour."""
    assert diagnose([_seen(_report(0)), _seen(_report(1, idle_s=3600, waits=True))], 10.0) is None


def test_one_that_waited_long_for_another_is_not_to_blame_when_that_one_is_done():
    """What it said last is older than the end of its wait."""
    waiting = _seen(_report(0, idle_s=3600, waits=True))
    assert diagnose([waiting, _seen(_report(1, left=True, idle_s=1))], 10.0) is None
    assert "waits for the others" in _words(waiting, _seen(_report(1, left=True, idle_s=11)))


def test_one_that_is_gone_is_named_at_once():
    assert _words(_seen(_report(0)), _seen(_report(1, where="a.py:3, f"), state=ProcessState.GONE)) == (
        "rank 1 (node, pid 101) is gone: it was killed while training after step 5 at a.py:3, f"
    )


def test_one_that_is_done_may_go():
    assert diagnose([_seen(_report(0)), _seen(_report(1, left=True), 99.0, ProcessState.GONE)], 10.0) is None


def test_one_that_never_came_is_named():
    assert "rank 1 has not come" in _words(_seen(_report(0)), ObservedRank(1, None, 10.0, ProcessState.ON_ANOTHER_NODE))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (ProcessState.STOPPED, "is stopped (SIGSTOP, or a debugger): nothing was heard from it for 11 s"),
        (ProcessState.ALIVE, "hangs outside of Python"),
        (ProcessState.ON_ANOTHER_NODE, "is gone, stopped, or cut off with its node"),
    ],
)
def test_one_that_is_silent_is_named_with_what_is_known_of_it(state, words):
    assert words in _words(_seen(_report(0)), _seen(_report(1), 11.0, state))


def test_of_those_that_do_not_come_on_the_one_that_does_not_wait_hangs():
    waiting = _seen(_report(0, idle_s=20, waits=True))
    assert _words(waiting, _seen(_report(1, idle_s=12, doing="painting"))) == (
        "rank 1 (node, pid 101) hangs: no sign of life for 12 s, while painting after step 5"
    )


def test_of_those_that_hang_the_furthest_behind_is_to_blame():
    """The GPU of the others waits for it, which looks the same from outside."""
    ahead = [_seen(_report(rank, idle_s=20, step=6)) for rank in (0, 1)]
    assert "rank 2 (node, pid 102) hangs" in _words(*ahead, _seen(_report(2, idle_s=20, step=5)))


def test_processes_that_all_wait_are_named_together():
    text = _words(*(_seen(_report(rank, idle_s=20, waits=True)) for rank in range(6)))
    assert text.startswith("6 processes wait for each other: nothing came for 20 s: rank 0 (node, pid 100) while")
    assert text.endswith("rank 3 (node, pid 103) while training after step 5; and 2 more")


def test_a_verdict_can_be_passed_on():
    verdict = WatchdogVerdict(1, 0, "a node", "rank 1 is gone — «quoted»")
    assert WatchdogVerdict.from_bytes(verdict.to_text().encode()) == verdict


def _ended(
    fault: str, logs: Path, count: int = 2, timeout_s: float = LONG_S
) -> tuple[RankProcesses, list[RankOutcome]]:
    with launched_ranks(count, together, logs, fault, timeout_s) as ranks:
        return ranks, ranks.ended()


@pytest.mark.parametrize("count", [2, 3])
def test_who_was_killed_is_named_by_one_of_the_others(tmp_path, count):
    ranks, (first, guilty, *others) = _ended("killed", tmp_path, count)
    assert guilty.exitcode == -9
    assert first.error is not None
    who = f"PeerError: rank 1 ({os.uname().nodename}, pid {ranks.pids[1]}) is gone: it was killed while "
    assert who in first.error
    assert "the next start goes on from the last checkpoint" in first.error
    assert all("SystemExit: 1" in (other.error or "") for other in others), "one of a node speaks"


def test_one_that_ends_without_a_word_is_gone(tmp_path):
    _, (first, _) = _ended("leaving", tmp_path)
    assert "is gone" in (first.error or "")


def test_an_error_of_one_is_told_by_the_others(tmp_path):
    _, (first, guilty) = _ended("failing", tmp_path)
    assert "StageError: the disk is full; free some" in (guilty.error or "")
    assert "failed: the disk is full; free some; rank 0 ends with it" in (first.error or "")


def test_what_fails_for_all_is_not_said_by_all(tmp_path):
    _, outcomes = _ended("failing together", tmp_path, count=3)
    last = [(outcome.error or "").splitlines()[-1] for outcome in outcomes]
    assert any("StageError: the disk is full; free some" in words for words in last)
    assert any(words == "SystemExit: 1" for words in last), "it was said already"
    assert not any(outcome.ended_well for outcome in outcomes)


def test_one_that_is_stopped_is_named_and_ended(tmp_path):
    _, (first, guilty) = _ended("stopped", tmp_path, timeout_s=SHORT_S)
    assert "is stopped (SIGSTOP, or a debugger)" in (rank_log(tmp_path, 0) + (first.error or ""))
    assert guilty.exitcode == -9


def test_one_that_hangs_says_where_and_all_end(tmp_path):
    _, outcomes = _ended("hanging", tmp_path, timeout_s=SHORT_S)
    assert [outcome.ended_well for outcome in outcomes] == [False, False]
    words = rank_log(tmp_path, 1)
    assert "hangs: no sign of life for" in words
    assert "while painting" in words


def test_processes_out_of_step_do_not_wait_for_ever(tmp_path):
    _, outcomes = _ended("out of step", tmp_path, timeout_s=SHORT_S)
    assert not any(outcome.ended_well for outcome in outcomes)


def test_one_that_is_ended_by_a_signal_is_named(tmp_path):
    _, (first, _) = _ended("terminated", tmp_path)
    assert "was ended by SIGTERM" in (first.error or "")


def test_a_signal_that_comes_after_an_error_does_not_take_its_place(tmp_path):
    _, (_, guilty) = _ended("terminated late", tmp_path)
    assert (guilty.error or "").splitlines()[-1].endswith("PeerError: process 0 of this node is gone")


def _idle_after(deed: Callable[[], None], *, in_pass: bool = False) -> float:
    pulse = Heartbeat()
    pulse.mark(in_window=in_pass)
    life = LivenessMonitor(pulse, chunk_s=0.05)
    life.beat()
    worker = threading.Thread(target=deed)  # what the watch takes itself is left out
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


def test_one_that_works_in_silence_does_not_hang():
    """A compiler, a download: nothing is told for long, and something is done."""
    assert _idle_after(_work) == 0
    assert _idle_after(_download) == 0
    assert _idle_after(lambda: time.sleep(0.2)) >= 0.2


def test_in_the_passes_of_a_window_work_is_no_sign_of_life():
    """Each micro-batch is one; a loop that never ends works as well."""
    assert _idle_after(_work, in_pass=True) >= 0.3


def test_all_leave_together_when_nothing_is_wrong(tmp_path):
    _, outcomes = _ended("nothing", tmp_path, count=3)
    assert [outcome.value for outcome in outcomes] == [2, 2, 2]
    assert not any(rank_log(tmp_path, rank) for rank in range(3))

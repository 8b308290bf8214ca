"""A launcher that is gone or does not answer takes what all processes meet at with it: they notice, save and stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.errors import TrainError
from supertuner.distributed.rendezvous import open_rendezvous_store
from tests.distributed.ranks import RankOutcome, a_launcher, launched_ranks, rank_log
from tests.distributed.watched import Lost, until_asked

TIMEOUT_S = 16.0
LONG_S = 600.0
STOPPED = "the launcher of the first node has not answered for"
GONE = "the launcher of the first node is gone"


def _lost(logs: Path, number: int, then: Lost, timeout_s: float = TIMEOUT_S) -> list[RankOutcome]:
    """What became of two ranks whose launcher got a signal while they worked."""
    with (
        a_launcher() as launcher,
        launched_ranks(2, until_asked, logs, then, timeout_s, launcher=launcher) as ranks,
    ):
        for rank in range(2):
            ranks.wait_for(logs / f"works-{rank}")
        launcher.signal(number)
        (logs / "lost").touch()
        return ranks.ended()


@pytest.mark.parametrize(("number", "timeout_s"), [(signal.SIGSTOP, TIMEOUT_S), (signal.SIGKILL, LONG_S)])
def test_processes_that_are_whole_save_and_stop(tmp_path, number, timeout_s):
    outcomes = _lost(tmp_path, number, "goes on", timeout_s)
    assert [outcome.value for outcome in outcomes] == ["saved after SIGTERM"] * 2
    words = STOPPED if number == signal.SIGSTOP else GONE
    assert all(words in rank_log(tmp_path, rank) for rank in range(2))
    assert all("saving and stopping" in rank_log(tmp_path, rank) for rank in range(2))


def test_before_there_is_anything_to_save_they_end_and_say_why(tmp_path):
    first, _ = _lost(tmp_path, signal.SIGSTOP, "prepares")
    assert f"PeerError: {STOPPED}" in (first.error or "")


def test_one_that_cannot_save_is_ended_all_the_same(tmp_path):
    outcomes = _lost(tmp_path, signal.SIGSTOP, "hangs")
    assert not any(outcome.ended_well for outcome in outcomes)
    assert STOPPED in rank_log(tmp_path, 1), "it was in a call that no signal ends"


def test_an_error_is_told_though_nobody_can_be_told_of_it(tmp_path):
    _, guilty = _lost(tmp_path, signal.SIGSTOP, "fails", LONG_S)
    assert "StageError: the disk is full; free some" in (guilty.error or "")


def test_processes_that_are_done_do_not_wait_for_it(tmp_path):
    assert [outcome.value for outcome in _lost(tmp_path, signal.SIGSTOP, "is done")] == ["done"] * 2


def test_one_that_answers_again_was_only_slow(tmp_path):
    with (
        a_launcher() as launcher,
        launched_ranks(2, until_asked, tmp_path, "is done", LONG_S, launcher=launcher) as ranks,
    ):
        ranks.wait_for(tmp_path / "works-0")
        launcher.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            ranks.wait_for(tmp_path / "nothing", 2.0)
        launcher.signal(signal.SIGCONT)
        (tmp_path / "lost").touch()
        assert [outcome.value for outcome in ranks.ended()] == ["done"] * 2


def _meet(place: LauncherEnvironment) -> str:
    try:
        open_rendezvous_store(place, timeout_s=2.0)
    except TrainError as error:
        return str(error)
    return "met"


def test_nobody_waits_for_ever_to_meet_at_one_that_does_not_answer():
    with a_launcher() as launcher:
        launcher.signal(signal.SIGSTOP)
        with launched_ranks(1, _meet, launcher=launcher) as ranks:
            (told,) = ranks.values()
    assert "did not meet the others within 2 s" in told
    assert "the launcher does not answer" in told

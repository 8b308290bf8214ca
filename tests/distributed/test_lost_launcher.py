"""A launcher that is gone or does not answer takes the store with it: the ranks notice, save and stop."""

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
    """The outcomes of two ranks whose launcher received a signal while they worked."""
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
def test_ranks_that_lost_their_launcher_save_and_stop(tmp_path, number, timeout_s):
    outcomes = _lost(tmp_path, number, "goes on", timeout_s)
    assert [outcome.value for outcome in outcomes] == ["saved after SIGTERM"] * 2
    words = STOPPED if number == signal.SIGSTOP else GONE
    assert all(words in rank_log(tmp_path, rank) for rank in range(2))
    assert all("saving and stopping" in rank_log(tmp_path, rank) for rank in range(2))


def test_before_there_is_anything_to_save_they_end_with_the_reason(tmp_path):
    first, _ = _lost(tmp_path, signal.SIGSTOP, "prepares")
    assert f"PeerError: {STOPPED}" in (first.error or "")


def test_a_rank_that_cannot_save_is_ended_anyway(tmp_path):
    outcomes = _lost(tmp_path, signal.SIGSTOP, "hangs")
    assert not any(outcome.ended_well for outcome in outcomes)
    assert STOPPED in rank_log(tmp_path, 1), "it was in a call that no signal ends"


def test_an_error_is_printed_even_if_it_cannot_be_published(tmp_path):
    _, guilty = _lost(tmp_path, signal.SIGSTOP, "fails", LONG_S)
    assert "StageError: the disk is full; free some" in (guilty.error or "")


def test_finished_ranks_do_not_wait_for_the_launcher(tmp_path):
    assert [outcome.value for outcome in _lost(tmp_path, signal.SIGSTOP, "is done")] == ["done"] * 2


def test_a_launcher_that_answers_again_was_only_slow(tmp_path):
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


def test_no_rank_waits_for_ever_for_a_launcher_that_does_not_answer():
    with a_launcher() as launcher:
        launcher.signal(signal.SIGSTOP)
        with launched_ranks(1, _meet, launcher=launcher) as ranks:
            (message,) = ranks.values()
    assert "did not meet the other ranks within 2 s" in message
    assert "the launcher does not answer" in message

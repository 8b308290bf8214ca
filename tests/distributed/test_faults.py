"""A rank that dies or fails ends the run on all ranks, which name it; the next start resumes to the bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.distributed.faults import LASTING, check_same, failing, interrupted_in_sum, killed_at, signalled_in_callback
from tests.distributed.ranks import launched_ranks, run_launched
from tests.distributed.runs import STEPS, a_run, run_folder, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the undisturbed run `whole` on two ranks."""
    made = tmp_path_factory.mktemp("faults")
    assert [done.step for done in run_launched(2, train, a_run(made, "whole", 2, checkpoints=LASTING))] == [STEPS] * 2
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_the_next_start_resumes_to_the_bit(folder, rank):
    path = a_run(folder, f"killed-{rank}", 2, checkpoints=LASTING)
    outcomes = killed_at(path, 2, rank, step=5)
    assert outcomes[rank].exitcode == -9
    assert f"PeerError: rank {rank} (" in (outcomes[1 - rank].error or "")
    assert "is gone: it was killed while" in (outcomes[1 - rank].error or "")
    assert [done.step for done in run_launched(2, train, path)] == [STEPS, STEPS]
    check_same(folder, f"killed-{rank}")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all_ranks_with_its_message(folder, rank):
    path = a_run(folder, f"failing-{rank}", 2, checkpoints=LASTING)
    with launched_ranks(2, failing, path, rank, 3) as ranks:
        outcomes = ranks.ended()
    assert "StageError: the disk is full; free some" in (outcomes[rank].error or "")
    other = outcomes[1 - rank].error or ""
    assert f"PeerError: rank {rank} (" in other
    assert "failed: the disk is full; free some" in other
    assert [done.step for done in run_launched(2, train, path)] == [STEPS, STEPS]
    check_same(folder, f"failing-{rank}")


@pytest.mark.parametrize(("ranks", "rank", "bucket"), [(2, 0, 0), (2, 1, 1), (2, 1, 6), (3, 2, 4)])
def test_a_rank_killed_in_the_gradient_sum_is_named(folder, ranks, rank, bucket):
    path = a_run(folder, f"in-sum-{ranks}-{rank}-{bucket}", ranks, checkpoints=LASTING)
    with launched_ranks(ranks, interrupted_in_sum, path, rank, bucket, signal.SIGKILL) as begun:
        outcomes = begun.ended()
    errors = [outcomes[other].error or "" for other in range(ranks) if other != rank]
    (named,) = [error for error in errors if f"PeerError: rank {rank} (" in error]
    assert "is gone: it was killed" in named
    others = [error for error in errors if error is not named]
    assert all(error.endswith("SystemExit: 1\n") for error in others), "one rank of a node prints the message"
    assert [done.step for done in run_launched(ranks, train, path)] == [STEPS] * ranks


def test_a_sigterm_in_a_weak_reference_callback_saves_and_stops_all_ranks(folder):
    path = a_run(folder, "callback", 2, checkpoints=LASTING)
    assert run_launched(2, signalled_in_callback, path, 1, 3) == ["SIGTERM", "SIGTERM"]
    assert (run_folder(path) / "checkpoints" / "step-00000003").is_dir()
    assert [done.step for done in run_launched(2, train, path)] == [STEPS, STEPS]
    check_same(folder, "callback")

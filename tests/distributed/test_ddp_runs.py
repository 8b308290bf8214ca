"""Runs on several ranks equal those on one, and may resume on another number of ranks at the same sample."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.distributed.ranks import command, rank_log, run_launched, run_ranks
from tests.distributed.runs import (
    STEPS,
    RankRunResult,
    a_run,
    losses,
    other,
    request,
    run_folder,
    train,
    train_on_nan_sample,
)
from tests.train.runs import artefacts

CLOSE = 1e-5
"""Of losses after a few steps on other numbers of processes (see test_ddp_weights.py)."""


def exported(run: Path) -> dict[str, Any]:
    found = {}
    for path in sorted((run / "exports").rglob("*.safetensors")):
        found |= {f"{path.name}: {name}": tensor for name, tensor in load_file(path).items()}
    assert found
    return found


def assert_alike(run: Path, other: Path) -> None:
    """Equal windows and samples; losses and weights are close."""
    mine, theirs = losses(run), losses(other)
    for field in ("step", "samples", "window", "expert"):
        assert [line[field] for line in mine] == [line[field] for line in theirs]
    for field in ("loss", "grad_norm"):
        assert [line[field] for line in mine] == pytest.approx([line[field] for line in theirs], rel=CLOSE)
    left, right = exported(run), exported(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert np.abs(tensor - right[name]).max() <= CLOSE * max(1.0, float(np.abs(right[name]).max())), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The folder of an undisturbed run on two ranks."""
    path = a_run(folder, "whole", 2)
    assert [done.step for done in run_launched(2, train, path)] == [STEPS, STEPS]
    return run_folder(path)


@pytest.fixture(scope="module")
def stopped(folder: Path) -> Path:
    """The configuration of a run that rank 1 of two stopped after step 3."""
    path = a_run(folder, "stopped", 2)
    for done in run_launched(2, train, path, 1, 3, signal.SIGTERM):
        assert (done.step, done.samples, done.stopped_by) == (3, 12, "SIGTERM")
    return path


def again(stopped: Path) -> Path:
    """The folder of the stopped run, restored to its state when it stopped."""
    run, kept = run_folder(stopped), stopped.with_suffix(".kept")
    if not kept.exists():
        shutil.copytree(run, kept)
    shutil.rmtree(run)
    shutil.copytree(kept, run)
    return run


def test_one_rank_and_two_ranks_train_the_same(folder: Path, whole: Path) -> None:
    path = a_run(folder, "alone", 1)
    run_launched(1, train, path)
    assert_alike(whole, run_folder(path))


def test_a_run_stopped_on_two_ranks_resumes_on_two_to_the_bit(stopped: Path, whole: Path) -> None:
    run = again(stopped)
    assert [done.step for done in run_launched(2, train, stopped)] == [STEPS, STEPS]
    mine, theirs = artefacts(run), artefacts(whole)
    same = [name for name in theirs if not name.startswith("checkpoints/")]
    assert {name: mine[name] for name in same} == {name: theirs[name] for name in same}
    last = {name for name in theirs if f"{STEPS}" in name and name.endswith(".safetensors")}
    assert last and all(mine[name] == theirs[name] for name in last)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_stopped_on_two_ranks_resumes_on_another_number_at_the_same_sample(
    stopped: Path, whole: Path, ranks: int
) -> None:
    run = again(stopped)
    ended = run_launched(ranks, train, stopped)
    assert [done.samples for done in ended] == [4 * STEPS] * ranks
    assert any("going on after step 3" in line for line in ended[0].messages)
    assert_alike(run, whole)


def test_only_rank_0_reports(folder: Path, tmp_path: Path) -> None:
    path = a_run(folder, "spoken", 2, train={"max_steps": 1})
    assert run_launched(2, command, tmp_path, "train", str(path)) == [0, 0]
    assert "trained 1 steps, 4 samples" in rank_log(tmp_path, 0)
    assert rank_log(tmp_path, 1).strip() == ""


def test_ctrl_c_on_any_rank_stops_all_ranks_with_a_checkpoint(folder: Path) -> None:
    """(The run above was stopped by SIGTERM.)"""
    path = a_run(folder, "interrupted", 2)
    for done in run_launched(2, train, path, 1, 2, signal.SIGINT):
        assert (done.step, done.stopped_by) == (2, "SIGINT")
    assert [place.name for place in (run_folder(path) / "checkpoints").iterdir()] == ["step-00000002"]


def test_sigusr1_to_any_rank_makes_rank_0_validate(folder: Path) -> None:
    path = a_run(folder, "asked-by-signal", 2, train={"max_steps": 3})
    run_launched(2, train, path, 1, 2, signal.SIGUSR1)
    asked = list((run_folder(path) / "samples" / "asked").iterdir())
    assert len(asked) == 1 and "2" in asked[0].name
    assert len(losses(run_folder(path))) == 3


def test_requests_are_carried_out_once_and_answered(folder: Path) -> None:
    path = a_run(folder, "asked", 2, train={"max_steps": 4})
    assert [done.step for done in run_launched(2, request, path, 2, ("checkpoint", "validate"))] == [4, 4]
    answers = {place.name: place.read_text() for place in (run_folder(path) / "requests" / "answers").iterdir()}
    assert set(answers) == {"ask-checkpoint.json", "ask-validate.json"}
    assert all('"done"' in text for text in answers.values())
    assert len(losses(run_folder(path))) == 4


def test_a_sample_with_nan_is_named_by_all_ranks_and_changes_no_weight(folder: Path) -> None:
    """Positions 4 and 5 belong to rank 0, 6 and 7 to rank 1."""
    path = a_run(folder, "spoilt", 2, train={"max_nonfinite": 1})
    found: list[RankRunResult] = run_ranks(2, train_on_nan_sample, path, 7)
    for done in found:
        name, *_ = done.messages
        assert done.step == 2 and done.error is not None
        assert f"samples: {name};" in done.error, "only the one at fault"
    first, second = found
    assert first.error == second.error
    assert all(np.array_equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert all(np.isfinite(tensor).all() for tensor in first.weights.values())


@pytest.mark.parametrize("setting", ["", "adapter.rank=3"])
def test_ranks_with_different_weights_do_not_start(folder: Path, setting: str) -> None:
    path = a_run(folder, f"alike-{bool(setting)}", 2)
    for message in run_ranks(2, other, path, setting):
        if setting:
            assert message.startswith("rank 1 starts differently from rank 0: weights of high_noise (")
            assert "weights of low_noise (" in message and "step" not in message
        else:
            assert message == "begun"

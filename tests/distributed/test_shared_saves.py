"""Sharded saves: all ranks name the one that cannot write its shard, and an incomplete checkpoint is never visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from supertuner.train.checkpoint.load import find_checkpoints
from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR
from supertuner.train.checkpoint.resume import load_latest
from tests.distributed.ranks import launched_ranks, run_launched
from tests.distributed.runs import a_run, run_folder
from tests.distributed.shared_saves import failing, killed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def a_config(folder: Path, name: str) -> Path:
    parallel = {"strategy": "fsdp", "timeout_s": 20}
    experts = {"experts": "high_noise"}
    return a_run(folder, name, 2, adapter={"type": "full"}, parallel=parallel, model=experts)


@pytest.mark.parametrize("bad", [0, 1])
def test_all_ranks_name_the_rank_that_cannot_write_its_shard_and_the_last_checkpoint_stays(
    folder: Path, bad: int
) -> None:
    found = run_launched(2, failing, a_config(folder, f"full-{bad}"), bad)
    for rank, one in enumerate(found):
        assert one.steps == [[0], [0], [0]], "only the first save succeeded"
        assert len(one.errors) == 1 and "checkpoint of step 2 cannot be saved" in one.errors[0], one.errors
        assert "File too large" in one.errors[0] and "/checkpoints/.saving-step-00000002/" in one.errors[0]
        assert rank == bad or f"rank {bad}: " in one.errors[0]
        assert one.messages[-1] == "step-00000000"
    ((made, why),) = found[0].answers
    assert made is None and ("File too large" in why if bad == 0 else "another rank could not write its shard" in why)
    assert found[1].answers == []
    assert any("request checkpoint" in line and "File too large" in line for line in found[0].messages)


def test_a_save_in_which_a_rank_is_killed_is_never_visible(folder: Path) -> None:
    path = a_config(folder, "killed")
    with launched_ranks(2, killed, path, 1) as ranks:
        first, second = ranks.ended()
    assert second.exitcode == -9 and not first.ended_well
    checkpoints = run_folder(path) / CHECKPOINTS_DIR
    assert [(one.step, one.problem) for one in find_checkpoints(checkpoints)] == [(0, None)]
    loaded = load_latest(checkpoints)
    assert loaded is not None and loaded.step == 0
    assert [place.name for place in checkpoints.iterdir()] == ["step-00000000"], "and what was left of it is gone"

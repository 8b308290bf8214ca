"""`open_run`, `send_request`, `checkpoints` and `arenas`: what the commands of these names call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import supertuner as st
from supertuner.core.errors import ArenaError, CheckpointError, RunFolderError
from supertuner.core.host import HostFacts
from tests.arena.arena_helpers import build, units
from tests.train.checkpoints import save_parts

WEIGHTS = {f"blocks.0.attn1.to_q.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one checkpoint."""
    folder = tmp_path / "run"
    save_parts(folder / "checkpoints", 4, {"adapter.low_noise": WEIGHTS}, {}, keep=2, host=HostFacts())
    (folder / "run.json").write_text(json.dumps({"name": "run", "begun": "2026-01-01", "config_file": "config.json"}))
    return folder


def test_a_run_is_opened_by_its_path(run: Path) -> None:
    assert st.open_run(str(run)).name == "run"
    with pytest.raises(RunFolderError, match="is not a run folder"):
        st.open_run(run.parent)


def test_a_request_without_a_job_is_refused(run: Path) -> None:
    with pytest.raises(RunFolderError, match="no job is running"):
        st.send_request(str(run), "checkpoint")


def test_checkpoints_are_listed_and_verified(run: Path) -> None:
    [found] = st.checkpoints.find(str(run))
    assert (found.step, found.problem) == (4, None)
    assert json.loads(json.dumps(found.to_dict()))["path"] == str(found.path)
    for place in (run, run / "checkpoints", found.path):
        [verified] = st.checkpoints.verify(place)
        assert (verified.path, verified.step, verified.problems) == (found.path, 4, ())
        assert verified.trained_parts == {"adapter.low_noise": "2 of 2 keys matched, 1 layers of wan2.2"}
    assert json.loads(json.dumps(verified.to_dict()))["nbytes"] == found.nbytes


def test_a_damaged_checkpoint_is_a_result_and_a_missing_one_an_error(run: Path) -> None:
    [found] = st.checkpoints.find(run)
    part = found.path / "adapter.low_noise.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    [verified] = st.checkpoints.verify(run)
    assert verified.step is None and "adapter.low_noise" in verified.problems[0]
    with pytest.raises(CheckpointError, match="is not a folder"):
        st.checkpoints.verify(run / "nowhere")


def test_arenas_are_listed_verified_and_removed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    home = st.arenas.open_home(str(tmp_path / "home"))
    for name in ("cats", "dogs"):
        build(home, name, units(9))
    with (home.path / "dogs" / "0000.data").open("r+b") as data:
        data.seek(5000)
        data.write(b"!")
    assert [arena.name for arena in home.list_arenas()] == ["cats", "dogs"]
    cats, dogs = st.arenas.verify(home)
    assert cats.to_dict() == {"name": "cats", "units": 9, "problem": None}
    assert dogs.units is None and dogs.problem is not None and "dogs" in dogs.problem
    assert list(st.arenas.verify(home, ["cats"])) == [cats]
    home.remove("dogs")
    assert [arena.name for arena in home.list_arenas()] == ["cats"]
    with pytest.raises(ArenaError, match=r"is not a folder; give the folder that arena\.home names"):
        st.arenas.open_home(tmp_path / "typo")

"""Runs with sharded weights write what one process writes, and resume on any number of ranks."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from tests.distributed.ranks import command, rank_log, run_launched
from tests.distributed.runs import STEPS, a_run, run_folder, train
from tests.train.checkpoints import forge_shard
from tests.train.runs import artefacts

CLOSE = 1e-6
"""Of losses: those of all steps here."""
FSDP = {"strategy": "fsdp"}
LOOKS: dict[str, Any] = {
    "train": {"ema_decay": 0.9},
    "validation": {"at_start": True, "at_end": True, "prompts": ["a red square"], "held_out_samples": 2},
}


def exported(run: Path) -> dict[str, Any]:
    found = {}
    for path in sorted((run / "exports").rglob("*.safetensors")):
        found |= {f"{path.relative_to(run)}: {name}": tensor for name, tensor in load_file(path).items()}
    assert found
    return found


def assert_alike(run: Path, other: Path) -> None:
    """Equal windows and files; losses and weights are close."""
    for log, fields in (("losses.jsonl", ("loss", "grad_norm")), ("validation.jsonl", ("loss",))):
        mine, theirs = ([json.loads(line) for line in (place / log).read_text().splitlines()] for place in (run, other))
        for field in fields:
            numbers = [line.pop(field) for line in theirs]
            assert [line.pop(field) for line in mine] == pytest.approx(numbers, rel=CLOSE), log
        assert mine == theirs
    left, right = exported(run), exported(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert np.abs(tensor - right[name]).max() <= 1e-4, name  # a tenth of one step
    written = [
        sorted(place.relative_to(one).as_posix() for sub in ("samples", "exports") for place in (one / sub).rglob("*"))
        for one in (run, other)
    ]
    assert written[0] == written[1] != []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def trained(folder: Path, name: str, ranks: int, **changed: Any) -> Path:
    path = a_run(folder, name, ranks, **{**LOOKS, **changed})
    assert [done.step for done in run_launched(ranks, train, path)] == [STEPS] * ranks
    return run_folder(path)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The folder of an undisturbed full run with weights sharded over two ranks."""
    return trained(folder, "whole", 2, adapter={"type": "full"}, parallel=FSDP)


def test_a_full_run_with_sharded_weights_equals_one_on_one_process(folder: Path, whole: Path) -> None:
    """Also held-out losses, samples and exports, which use the average."""
    assert_alike(whole, trained(folder, "alone", 1, adapter={"type": "full"}))


def test_an_adapter_run_on_a_sharded_base_equals_one_on_whole_bases_to_the_bit(folder: Path) -> None:
    """Some samples keep the prior: all ranks then run a second forward pass if any of them has such a sample."""
    runs = []
    for name, parallel in (("adapter", FSDP), ("adapter-ddp", {})):
        path = a_run(folder, name, 2, **LOOKS, adapter={"type": "lokr"}, parallel=parallel)
        tree = json.loads(path.read_text())
        tree["datasets"][1] |= {"held_out": False, "prior": True}
        path.write_text(json.dumps(tree))
        run_launched(2, train, path)
        runs.append(artefacts(run_folder(path)))
    mine, theirs = runs
    same = [name for name in theirs if not name.endswith(".json")]
    assert mine.keys() == theirs.keys() and any("exports" in name for name in same)
    assert [name for name in same if mine[name] != theirs[name]] == []


@pytest.fixture(scope="module")
def stopped(folder: Path) -> Path:
    """The configuration of a run that rank 1 stopped after step 3."""
    path = a_run(folder, "stopped", 2, **LOOKS, adapter={"type": "full"}, parallel=FSDP)
    for done in run_launched(2, train, path, 1, 3, signal.SIGTERM):
        assert (done.step, done.stopped_by) == (3, "SIGTERM")
    shutil.copytree(run_folder(path), path.with_suffix(".kept"))
    return path


def again(stopped: Path) -> Path:
    """The folder of the stopped run, restored to its state when it stopped."""
    run = run_folder(stopped)
    shutil.rmtree(run)
    shutil.copytree(stopped.with_suffix(".kept"), run)
    return run


def test_a_sharded_run_stopped_on_two_ranks_resumes_on_two_to_the_bit(stopped: Path, whole: Path) -> None:
    run = again(stopped)
    run_launched(2, train, stopped)
    mine, theirs = artefacts(run), artefacts(whole)
    same = [name for name in theirs if not name.startswith("checkpoints/") or name.endswith(".safetensors")]
    assert any("shard" in name for name in same)
    assert {name: mine.get(name) for name in same if "step-00000008" in name or "checkpoints" not in name} == {
        name: theirs[name] for name in same
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_sharded_run_stopped_on_two_ranks_resumes_on_another_number(stopped: Path, whole: Path, ranks: int) -> None:
    run = again(stopped)
    ended = run_launched(ranks, train, stopped)
    assert any("going on after step 3" in line for line in ended[0].messages)
    assert_alike(run, whole)


@pytest.mark.parametrize(("part", "ranks"), [("adapter", 1), ("adapter", 2), ("optimizer", 2)])
def test_all_ranks_refuse_a_checkpoint_that_lost_half_of_a_tensor(
    stopped: Path, tmp_path: Path, part: str, ranks: int
) -> None:
    """Rank 1's rows of one tensor are gone, and the manifest matches that."""
    made = again(stopped) / "checkpoints" / "step-00000003"
    file = f"{part}.high_noise.shard-00001-of-00002.safetensors"
    tensors = load_torch(made / file)
    with safe_open(made / file, "pt") as opened:
        sharding = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
    begins = {name: sharding[name]["saved_offsets"][0] for name in tensors}
    lost = next(name for name in tensors if begins[name] == len(tensors[name]))  # two equal halves
    del tensors[lost]
    forge_shard(made, file, tensors, begins)
    assert run_launched(ranks, command, tmp_path, "train", str(stopped)) == [1] * ranks
    refusal = f"{file.replace('00001-of', '00000-of')}: {lost} of {part}.high_noise has the shape"
    words = " ".join(rank_log(tmp_path, 0).split())
    assert refusal in words and "resume from another one" in words
    assert all(refusal in (there := rank_log(tmp_path, rank)) or not there for rank in range(1, ranks))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": {"base_weights": "int8"}}, "8-bit tensors cannot be sharded"),
        ({"adapter": {"type": "full"}, "optimizer": {"name": "automagic"}}, "needs whole tensors"),
        ({"plan": {"weights": "streamed"}}, "asks for an offload plan"),
    ],
)
def test_all_ranks_refuse_settings_that_fsdp_cannot_do(
    folder: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    name = f"refused-{words.split()[0]}"
    path = a_run(folder, name, 2, parallel=FSDP, **changed)
    assert run_launched(2, command, tmp_path, "train", str(path)) == [1, 1]
    assert words in " ".join(rank_log(tmp_path, 0).split())

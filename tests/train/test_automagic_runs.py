"""Complete runs with Automagic: the settings of the GH200 fork unchanged, on both experts, resumed to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from supertuner.runs.loss_files import read_losses
from tests.train.runs import ROOT, TrainingForkServer, artefacts, config, pictures
from tests.train.test_runs import del_intermediate, trained, whole_and_again

SEED = {
    "name": "automagic",
    "learning_rate": None,
    "high_noise_lr_bump": 1e-6,
    "low_noise_lr_bump": 5e-7,
    "high_noise_max_lr": 1e-3,
    "low_noise_max_lr": 5e-4,
}
PLAIN: dict[str, Any] = {"validation": {"at_start": False, "every_steps": None, "at_end": False}}


def rates(run: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["figures"] for event in events if event.get("what") == "train/rates"]


def test_a_run_stopped_and_resumed_ends_with_the_same_bits(parent: TrainingForkServer, tmp_path: Path) -> None:
    whole, again = whole_and_again(parent, tmp_path, optimizer=SEED, **PLAIN)
    expected, found = artefacts(whole), artefacts(again)
    del_intermediate(expected), del_intermediate(found)
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if expected[name] != found[name]] == []


def test_each_expert_moves_by_its_own_bump_and_reports_it(parent: TrainingForkServer, tmp_path: Path) -> None:
    """With wide limits, all rates are within as many bumps of their start as the expert made steps."""
    run = trained(parent, tmp_path, "a", optimizer={**SEED, "lr_scheduler": "constant", "lr_warmup_steps": 0}, **PLAIN)
    last = rates(run)[-1]
    steps = {
        name: sum(line.expert == name for line in read_losses(run / "losses.jsonl"))
        for name in ("high_noise", "low_noise")
    }
    assert last["step"] == 12 and [row["expert"] for row in last["rows"]] == ["high_noise", "low_noise"]
    for row, bump in zip(last["rows"], (1e-6, 5e-7), strict=True):
        furthest = 1e-6 + (steps[row["expert"]] - 1) * bump
        assert row["lowest"] <= row["q10"] <= row["q50"] <= row["q90"] <= row["highest"]
        assert 1e-6 < row["highest"] <= furthest + 1e-7
        assert row["highest"] == pytest.approx(furthest, abs=2 * bump + 1e-7), "some weight agreed all the time"
        assert row["lowest"] == pytest.approx(1e-7, rel=0.01)
    state = load_file(next((run / "checkpoints").glob("*12*/optimizer.low_noise.safetensors")))
    assert {name.rsplit("/", 1)[1] for name in state} == {"row", "column", "low", "high", "signs"}


def test_the_yaml_of_the_gh200_fork_runs_unchanged(parent: TrainingForkServer, tmp_path: Path) -> None:
    """Missing settings (model, data, output folder) are added beside it; none of its lines is changed."""
    pictures(tmp_path / "data" / "train", 2)  # few: at that resolution each takes a second to encode
    pictures(tmp_path / "data" / "held_out", 1, first=6)
    tree = json.loads(config(tmp_path, "seed", **PLAIN).read_text())
    written = re.findall(r"```yaml\n(.*?)```", (ROOT / "tests/config/fork_documents/003.md").read_text(), re.S)[0]
    text = written.replace("dataset:\n", f"dataset:\n  folder_path: {tree['datasets'][0]['instance_data_dir']}\n")
    for block in ("run", "model", "adapter", "arena", "checkpoints", "validation"):
        text += f"{block}: {json.dumps(tree[block])}\n"
    text += 'train: {"max_steps": 4, "mixed_precision": "bf16"}\n'
    file = tmp_path / "seed.yaml"
    file.write_text(text)
    assert parent.train(file) == 0, parent.output()
    (last,) = rates(tmp_path / "seed" / "run")
    high, low = last["rows"]
    assert (high["highest"], low["highest"]) == (pytest.approx(2e-6), pytest.approx(1.5e-6))

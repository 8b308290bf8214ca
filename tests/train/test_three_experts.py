"""A model with three experts of other names needs no new code: it is planned, trained, resumed, exported and merged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from supertuner.runs.loss_files import read_losses
from tests.train.runs import TrainingForkServer, artefacts, config, exported_file
from tests.train.test_runs import interrupted, whole_and_again

EXPERTS = ("early", "middle", "late")
CHANGED: dict[str, Any] = {
    "model": {"family": "three-stages", "path": "tiny", "switch_boundary_every": 1},
    "adapter": {"rank": 2, "dropout": 0.1, "middle": {"rank": 3}},
    "optimizer": {"learning_rate": 0.001, "lr_scheduler": "constant", "lr_warmup_steps": 0, "late_lr": 0.0005},
    "train": {"max_steps": 9},
}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingForkServer]:
    made = TrainingForkServer(tmp_path_factory.mktemp("three") / "log", module="tests.train.three_experts")
    yield made
    made.close()


@pytest.fixture(scope="module")
def runs(three: TrainingForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An uninterrupted run, and one that was stopped and resumed."""
    return whole_and_again(three, tmp_path_factory.mktemp("runs"), **CHANGED)


def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(runs: tuple[Path, Path]) -> None:
    whole, again = map(artefacts, runs)
    assert whole.keys() == again.keys()
    assert [name for name in whole if whole[name] != again[name]] == []


def test_every_expert_is_trained_by_its_own_settings(runs: tuple[Path, Path]) -> None:
    lines = [json.loads(line) for line in (runs[0] / "losses.jsonl").read_text().splitlines()]
    assert [line["expert"] for line in lines] == [*EXPERTS] * 3
    assert {line["expert"]: line["rate"] for line in lines} == {"early": 0.001, "middle": 0.001, "late": 0.0005}
    held_out = [json.loads(line) for line in (runs[0] / "validation.jsonl").read_text().splitlines()]
    assert {line["expert"] for line in held_out} >= {*EXPERTS}
    assert list((runs[0] / "samples").rglob("*.png"))


def test_each_expert_is_exported_and_converted_for_comfyui(three: TrainingForkServer, runs: tuple[Path, Path]) -> None:
    ranks = {}
    for expert in EXPERTS:
        file = exported_file(runs[0], expert)
        ranks[expert] = {len(tensor) for key, tensor in load_file(file).items() if "lora_A" in key}
        three.printed("adapter", "export", str(file), "--for", "comfyui", cwd=runs[0])
        converted = load_file(file.with_name(f"{file.stem}.comfyui.safetensors"))
        assert all(key.startswith("diffusion_model.blocks.") for key in converted)
    assert ranks == {"early": {2}, "middle": {3}, "late": {2}}


def test_each_adapter_is_merged_into_its_own_expert(three: TrainingForkServer, runs: tuple[Path, Path]) -> None:
    base = runs[0] / "tiny-three-stages"
    files = [str(exported_file(runs[0], expert)) for expert in EXPERTS]
    three.printed("adapter", "merge", *files, "--base", str(base), "--out", str(runs[0] / "merged"), cwd=runs[0])
    weights = "diffusion_pytorch_model.safetensors"
    for part in ("transformer", "transformer_2", "transformer_3"):
        before, after = load_file(base / part / weights), load_file(runs[0] / "merged" / part / weights)
        assert any((before[key] != after[key]).any() for key in before)


def test_a_plan_that_offloads_computes_the_same(three: TrainingForkServer, tmp_path: Path) -> None:
    planned = {**CHANGED, "adapter": {**CHANGED["adapter"], "dropout": 0.0}}
    streamed = {"plan": {"weights": "streamed", "activations": "send", "optimizer": "host"}}
    files = [config(tmp_path, "resident", **planned), config(tmp_path, "streamed", **planned, **streamed)]
    assert three.train_together(*files) == [0, 0], three.output()
    losses = [
        [row.loss for row in read_losses(tmp_path / name / "run" / "losses.jsonl")] for name in ("resident", "streamed")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 9


def test_the_forecast_names_the_three_experts(three: TrainingForkServer, tmp_path: Path) -> None:
    file = config(tmp_path, "forecast", **CHANGED)
    printed = three.printed("estimate", str(file), "--machine", "gh200-96", "--no-advice", cwd=tmp_path)
    assert all(f"train {expert} " in printed for expert in EXPERTS)


def test_settings_of_experts_that_the_family_lacks_are_refused(three: TrainingForkServer, tmp_path: Path) -> None:
    file = config(tmp_path, "wrong", **{**CHANGED, "adapter": {"high_noise": {"rank": 8}}})
    assert three.train(file) == 2
    assert 'the experts of family "three-stages" are early and middle and late' in three.output()


def test_one_of_three_experts_is_trained_alone(three: TrainingForkServer, tmp_path: Path) -> None:
    changed = {**CHANGED, "model": {**CHANGED["model"], "experts": "middle"}, "optimizer": {"learning_rate": 0.001}}
    run = interrupted(three, tmp_path, "one", **changed)
    assert {path.name.partition("_")[2] for path in (run / "exports").rglob("*.*")} == {"middle.safetensors"}

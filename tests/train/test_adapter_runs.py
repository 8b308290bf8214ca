"""Runs with each adapter type, on both experts: resuming from a checkpoint changes no bit of the result."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.train.runs import TrainingForkServer, artefacts, config, exported_file

SHORT: dict[str, Any] = {
    "train": {"max_steps": 4, "ema_decay": 0.9},
    "model": {"switch_boundary_every": 1},
    "validation": {"at_start": False, "every_steps": None},
}
BF16 = {"train": {**SHORT["train"], "mixed_precision": "bf16", "gradient_checkpointing": True}}
KINDS: dict[str, dict[str, Any]] = {
    "dora in bf16": {"adapter": {"dora": True}, **BF16},
    "rslora with several ranks": {"adapter": {"rslora": True, "modules": [{"match": "attn2.*", "rank": 3}]}},
    "locon": {"adapter": {"type": "locon", "targets": "all_linear"}},
    "loha in bf16": {"adapter": {"type": "loha"}, **BF16},
    "lokr in bf16 by automagic": {
        "adapter": {"type": "lokr", "rank": 1},
        "optimizer": {"name": "automagic", "learning_rate": 1e-5, "high_noise_lr_bump": 2e-6},
        **BF16,
    },
    "lokr on an 8-bit base": {
        "adapter": {"type": "lokr", "lokr_factor": 4},
        "model": {**SHORT["model"], "base_weights": "int8"},
        **BF16,
    },
    "diff in bf16": {"adapter": {"type": "diff", "dropout": 0.0}, **BF16},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_resumed_run_ends_with_the_same_bits(
    parent: TrainingForkServer, tmp_path: Path, changes: dict[str, Any]
) -> None:
    file = config(tmp_path, "whole", **{**SHORT, **changes})
    assert parent.train(file) == 0, parent.output()
    run = tmp_path / "whole" / "run"
    before = artefacts(run)
    older = sorted((run / "checkpoints").iterdir())[0]
    assert older.name.endswith("2")
    assert parent.train(file, "--resume", str(older)) == 0, parent.output()
    found = artefacts(run)
    assert [name for name in before if found[name] != before[name]] == []
    assert any(name.startswith("exports/") for name in before)


def test_each_expert_is_trained_and_exported_with_its_own_rank_alpha_and_targets(
    parent: TrainingForkServer, tmp_path: Path
) -> None:
    adapter = {"rank": 2, "high_noise": {"rank": 5, "targets": ["to_q"]}, "low_noise": {"alpha": 1.0}}
    file = config(tmp_path, "own", **{**SHORT, "adapter": adapter})
    assert parent.train(file) == 0, parent.output()
    ranks = {}
    for name in ("high_noise", "low_noise"):
        with safe_open(exported_file(tmp_path / "own" / "run", name), "pt") as opened:
            keys = [key for key in opened.keys() if ".lora_A." in key]  # noqa: SIM118
            ranks[name] = {opened.get_slice(key).get_shape()[0] for key in keys}
            assert all(".to_q." in key for key in keys) is (name == "high_noise")
            assert f'"alpha": {5.0 if name == "high_noise" else 1.0}' in opened.metadata()["supertuner"]
    assert ranks == {"high_noise": {5}, "low_noise": {2}}


def test_a_run_starts_from_one_file_and_trains_on_top_of_another(parent: TrainingForkServer, tmp_path: Path) -> None:
    """high_noise starts from a file; low_noise trains on top of a frozen one. Resuming changes no bit."""
    file = config(tmp_path, "first", **{**SHORT, "adapter": {"rank": 2}})
    assert parent.train(file) == 0, parent.output()
    high, low = (str(exported_file(tmp_path / "first" / "run", name)) for name in ("high_noise", "low_noise"))
    adapter = {"rank": 2, "high_noise": {"start_from": high}, "low_noise": {"frozen": low}}
    file = config(tmp_path, "second", **{**SHORT, "adapter": adapter})
    assert parent.train(file) == 0, parent.output()
    run = tmp_path / "second" / "run"
    before = artefacts(run)
    assert parent.train(file, "--resume", str(sorted((run / "checkpoints").iterdir())[0])) == 0, parent.output()
    assert [name for name, content in artefacts(run).items() if before.get(name, content) != content] == []
    text = (run / "events.jsonl").read_text()
    assert "16 of 16 layers start from the values of" in text and "is merged into the frozen weights of" in text
    swapped = {"rank": 2, "high_noise": {"start_from": low}}
    assert parent.train(config(tmp_path, "swapped", **{**SHORT, "adapter": swapped})) == 1
    assert "is for low_noise by its metadata or its name, not for high_noise" in " ".join(parent.output().split())
    assert not (tmp_path / "cache-swapped").exists(), "refused before anything is encoded"


def test_a_changed_frozen_adapter_is_found_on_resume(parent: TrainingForkServer, tmp_path: Path) -> None:
    file = config(tmp_path, "first", **{**SHORT, "adapter": {"rank": 2}})
    assert parent.train(file) == 0, parent.output()
    below, other = (tmp_path / name for name in ("below.safetensors", "other.safetensors"))
    shutil.copy(exported_file(tmp_path / "first/run", "low_noise"), below)
    adapter = {"rank": 2, "low_noise": {"frozen": str(below)}}
    file = config(tmp_path, "above", **{**SHORT, "adapter": adapter})
    assert parent.train(file) == 0, parent.output()
    run = tmp_path / "above" / "run"
    before, older = artefacts(run), str(sorted((run / "checkpoints").iterdir())[0])
    tensors = load_file(below)
    save_file({key: tensor * 2 for key, tensor in tensors.items()}, other)
    os.replace(other, below)
    assert parent.train(file, "--resume", older) == 1
    text = " ".join(parent.output().split())
    assert (
        "low_noise was trained with other tensors in the adapter file that adapter.low_noise.frozen names; restore"
        in text
    )
    assert artefacts(run) == before, "a refusal changes nothing"
    moved = config(tmp_path, "moved", **{**SHORT, "adapter": adapter})
    assert parent.train(moved, "--resume", older) == 0, parent.output()
    assert "other tensors (or none) in the file of" in (tmp_path / "moved/run/events.jsonl").read_text()
    save_file(tensors, below)  # equal tensors in other bytes: without metadata
    assert parent.train(file, "--resume", older) == 0, parent.output()
    assert {name: content for name, content in artefacts(run).items() if name in before} == before


def test_a_file_that_does_not_fit_ends_the_run_before_encoding(parent: TrainingForkServer, tmp_path: Path) -> None:
    file = config(tmp_path, "first", **{**SHORT, "adapter": {"rank": 2}})
    assert parent.train(file) == 0, parent.output()
    given = str(exported_file(tmp_path / "first/run", "low_noise"))
    refused = {
        "rank": ({"rank": 4, "low_noise": {"start_from": given}}, "needs lora_down.weight [4, 24]"),
        "kind": ({"type": "diff", "low_noise": {"start_from": given}}, "does not fit the adapter"),
        "half": (
            {"low_noise": {"frozen": str(tmp_path / "half_low_noise.safetensors")}},
            "has lora_B (transformer.blocks.0.attn1.to_k.lora_B.weight) but no lora_A",
        ),
    }
    tensors = load_file(given)
    tensors.pop(min(key for key in tensors if "lora_A" in key))
    save_file(tensors, tmp_path / "half_low_noise.safetensors")
    for name, (adapter, reason) in refused.items():
        wrong = config(tmp_path, name, **{**SHORT, "adapter": {"dropout": 0.0, **adapter}})
        assert parent.train(wrong) == 1, name
        setting = "frozen" if name == "half" else "start_from"
        text = " ".join(parent.output().split())
        assert f"adapter.low_noise.{setting}: " in text and reason in text, text
        assert not (tmp_path / f"cache-{name}").exists()


def test_a_pattern_without_matches_ends_the_run_before_encoding(parent: TrainingForkServer, tmp_path: Path) -> None:
    file = config(tmp_path, "wrong", **{**SHORT, "adapter": {"modules": [{"match": "ffn.*", "rank": 4}]}})
    assert parent.train(file) == 1
    assert "adapter.modules[0].match is 'ffn.*', which matches no adapted layer of high_noise" in " ".join(
        parent.output().split()
    )
    assert not (tmp_path / "cache-wrong").exists()

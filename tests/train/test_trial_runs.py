"""`supertuner train --try`: a shipped example, a full fine-tune and an editing model are tried from end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from supertuner.arena.home import ArenaHome
from tests.train.runs import ROOT, TrainingForkServer, config
from tests.train.test_edit_runs import pairs


def examples(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("cache"))
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_shipped_example_is_tried_twice_in_folders_of_its_own(parent: TrainingForkServer, tmp_path: Path) -> None:
    folder, sets = examples(tmp_path), ("--set", f"arena.home={tmp_path / 'arenas'}")
    arguments = ("train", "examples/gh200_in_memory_example.json", "--try", *sets)
    text = parent.printed(*arguments, cwd=folder)
    assert "\nnext: supertuner train examples/gh200_in_memory_example.json --set arena.home=" in text
    assert "✓ datasets[train_images] 16 image files" in text and "✗" not in text and "Traceback" not in text
    staged = [arena.name for arena in ArenaHome(tmp_path / "arenas").list_arenas()]
    assert len(staged) == 1  # the whole dataset, for the run itself; the trial's own arenas are gone
    parent.printed(*arguments, cwd=folder)
    assert names(folder / "runs") == {"gh200-in-memory-try", "gh200-in-memory-try-2"}
    run = folder / "runs/gh200-in-memory-try"
    assert len(list((run / "exports").glob("step-*/*.safetensors"))) == 4  # two experts at two checkpoints
    assert list((run / "samples").glob("step-00000004/*.png")) and not (folder / "examples/cache").exists()


@pytest.mark.parametrize("name", ["wan22_lycoris_pictures.yaml", "sdxl_pictures.yaml", "qwen_image_pictures.yaml"])
def test_without_gpu_and_weights_the_model_is_a_problem_and_the_trial_runs(
    parent: TrainingForkServer, tmp_path: Path, name: str
) -> None:
    sets = {"datasets[0].instance_data_dir": "examples/example_images", "arena.home": str(tmp_path / "arenas")}
    sets |= {"model.offline": "true", "model.revision": "not-here", "forecast.before_training": "never"}
    sets |= {"exports.formats": '["comfyui"]', "run.output_dir": str(tmp_path / "runs")}
    words = [word for pair in sets.items() for word in ("--set", "=".join(pair))]
    code, text = parent.code_and_output("train", f"examples/{name}", "--try", *words, cwd=examples(tmp_path))
    assert code == 2, text
    assert "✗ model.path" in text and "1 ✗" in text and "Traceback" not in text
    assert "from the built-in table" in text and "comfyui have a name for every trained layer" in text
    assert "✓ training            4 steps" in text
    (run,) = (tmp_path / "runs").glob("*-try")
    for file in (run / "exports/step-00000004").iterdir():
        with safe_open(file, framework="np") as tensors:
            assert len(list(tensors.keys())) > 10


def test_a_full_fine_tune_with_held_out_data_is_tried(parent: TrainingForkServer, tmp_path: Path) -> None:
    text = parent.printed("train", str(config(tmp_path, "full", adapter={"type": "full"})), "--try")
    assert "all 69 weights of transformer_2" in text and "transformer_2 reads back: 69 tensors" in text
    losses = (tmp_path / "full/run-try/validation.jsonl").read_text().splitlines()
    assert any(json.loads(line)["loss"] for line in losses)


def test_an_editing_model_is_tried_with_its_reference_images(parent: TrainingForkServer, tmp_path: Path) -> None:
    file = config(tmp_path, "edit", **pairs(tmp_path))
    assert "✓ training" in parent.printed("train", str(file), "--try")
    next((tmp_path / "data/train_before").glob("*.jpg")).unlink()
    code, text = parent.code_and_output("train", str(file), "--try")
    assert code == 2 and "✗ datasets[train]" in text


def test_a_trial_cannot_resume(parent: TrainingForkServer, tmp_path: Path) -> None:
    code, text = parent.code_and_output("train", str(config(tmp_path, "a")), "--try", "--resume", "latest")
    assert code == 2 and "--resume cannot be combined with --try" in text

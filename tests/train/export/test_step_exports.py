"""Exports with every checkpoint: which files there are, that a checkpoint gives the same, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from supertuner.api import adapters
from supertuner.cli import app
from supertuner.core.errors import ModelError, RunFolderError
from supertuner.models.adapters.merge import merged_weight
from supertuner.train.export.run_adapters import open_run_adapter
from tests.train.runs import TrainingForkServer, config

SHORT: dict[str, Any] = {
    "train": {"max_steps": 6},
    "model": {"switch_boundary_every": 1},
    "checkpoints": {"every_steps": 2, "keep": 1},
    "validation": {"at_start": False, "at_end": False, "every_steps": None},
}
EXPERTS = ("high_noise", "low_noise")


def trained(parent: TrainingForkServer, folder: Path, **changes: Any) -> Path:
    file = config(folder, "a", **{**SHORT, **changes})
    assert parent.train(file) == 0, parent.output()
    return folder / "a" / "run"


def test_every_checkpoint_comes_with_files_for_each_program_and_exports_have_their_own_keep(
    parent: TrainingForkServer, tmp_path: Path
) -> None:
    exports = {"formats": ["diffusers", "comfyui", "kohya"], "keep": 2, "weights": "both"}
    run = trained(parent, tmp_path, exports=exports)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000006"]
    assert sorted(path.name for path in (run / "exports").iterdir()) == ["step-00000004", "step-00000006"]
    for step in (4, 6):
        expected = [
            f"run-step0000000{step}{mark}_{expert}{program}.safetensors"
            for mark in ("", "-trained")
            for expert in EXPERTS
            for program in ("", ".comfyui", ".kohya")
        ]
        folder = run / "exports" / f"step-0000000{step}"
        assert sorted(path.name for path in folder.iterdir()) == sorted(expected)
    for expert in EXPERTS:
        stem = f"run-step00000006_{expert}"
        averaged, last = (
            load_file(folder / f"{name}.safetensors") for name in (stem, f"run-step00000006-trained_{expert}")
        )
        assert averaged.keys() == last.keys() and any(not torch.equal(averaged[key], last[key]) for key in last)
        (done,) = adapters.export(folder / f"{stem}.safetensors", "comfyui", tmp_path / f"{expert}.safetensors")
        assert done.path.read_bytes() == (folder / f"{stem}.comfyui.safetensors").read_bytes()


KINDS: dict[str, dict[str, Any]] = {
    "lora with an average": {},
    "lora by schedule_free": {"train": {"max_steps": 6, "ema_decay": None}, "optimizer": {"name": "schedule_free"}},
    "dora": {"adapter": {"dora": True}, "train": {"max_steps": 6, "ema_decay": None}},
    "lokr": {"adapter": {"type": "lokr", "dropout": 0.0, "rank": 1}},
    "loha": {"adapter": {"type": "loha", "alpha": 1.0}},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_checkpoint_gives_the_bytes_that_the_run_exported(
    parent: TrainingForkServer, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = trained(parent, tmp_path, **changes)
    exported = sorted((run / "exports" / "step-00000006").iterdir())
    with open_run_adapter(str(run / "checkpoints" / "step-00000006")) as adapter:
        assert [path.name for path in adapter.files] == [path.name for path in exported]
        for made, path in zip(adapter.files, exported, strict=True):
            assert made.read_bytes() == path.read_bytes()
        assert not list(run.rglob(".*tmp*"))
    assert not any(path.exists() for path in adapter.files)


def comfyui_weight(weight: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What ComfyUI computes of a weight and a DoRA whose magnitudes are one per output, at strength 1."""
    up, down, magnitudes = (tensors[name].float() for name in ("lora_up.weight", "lora_down.weight", "dora_scale"))
    changed = weight + up @ down * (tensors["alpha"].item() / down.shape[0])
    norms = weight.norm(dim=1, keepdim=True) + torch.finfo(torch.float32).eps
    return changed * (magnitudes / norms)


def test_a_dora_for_comfyui_gives_the_trained_weights_in_its_arithmetic(
    parent: TrainingForkServer, tmp_path: Path
) -> None:
    changes = {"adapter": {"dora": True, "rank": 4, "alpha": 6.0}, "optimizer": {"learning_rate": 0.05}}
    run = trained(parent, tmp_path, exports={"formats": ["diffusers", "comfyui"]}, **changes)
    folder = run / "exports" / "step-00000006"
    by_command = adapters.export(run / "checkpoints" / "step-00000006", "comfyui", tmp_path)
    for expert, part in zip(EXPERTS, ("transformer", "transformer_2"), strict=True):
        base = load_file(run / "tiny-wan2.2" / part / "diffusion_pytorch_model.safetensors")
        original = load_file(folder / f"run-step00000006_{expert}.safetensors")
        for_comfyui = load_file(folder / f"run-step00000006_{expert}.comfyui.safetensors")
        weight = base["blocks.0.attn1.to_q.weight"].float()
        names = {
            "lora_A.weight": "lora_down.weight",
            "lora_B.weight": "lora_up.weight",
            "lora_magnitude_vector": "dora_scale",
        }
        ours = {new: original[f"transformer.blocks.0.attn1.to_q.{old}"] for old, new in names.items()}
        prefix = "diffusion_model.blocks.0.self_attn.q."
        theirs = {key.removeprefix(prefix): value for key, value in for_comfyui.items() if key.startswith(prefix)}
        wanted = merged_weight(weight, ours, "to_q")
        assert (wanted - weight).norm() > 0.01 * weight.norm(), "training changed the weight"
        assert torch.allclose(comfyui_weight(weight, theirs), wanted, rtol=1e-5, atol=1e-6)
        uncorrected = {**theirs, "dora_scale": ours["dora_scale"].reshape(-1, 1)}
        assert not torch.allclose(comfyui_weight(weight, uncorrected), wanted, rtol=1e-3, atol=1e-4)
        (made,) = [done.path for done in by_command if expert in done.path.name]
        assert all(torch.allclose(load_file(made)[key], for_comfyui[key], rtol=1e-5) for key in for_comfyui)
    file = folder / "run-step00000006_high_noise.safetensors"
    with pytest.raises(ModelError, match=r"ComfyUI divides by the norm of the base weight.*set `base`"):
        adapters.export(file, "comfyui", tmp_path / "x.safetensors")
    (done,) = adapters.export(file, "comfyui", tmp_path / "x.safetensors", base=run / "tiny-wan2.2")
    assert load_file(done.path).keys() == load_file(folder / f"{file.stem}.comfyui.safetensors").keys()


def test_nothing_is_exported_on_request_and_whole_models_only_at_the_end(
    parent: TrainingForkServer, tmp_path: Path
) -> None:
    run = trained(parent, tmp_path / "never", exports={"when": "never"})
    assert not (run / "exports").exists()
    run = trained(parent, tmp_path / "full", adapter={"type": "full", "dropout": 0.0})
    assert [path.name for path in (run / "exports").iterdir()] == ["step-00000006"]
    assert sorted(path.name for path in (run / "exports/step-00000006").iterdir()) == ["transformer", "transformer_2"]
    decisions = {row["what"]: row for row in json.loads((run / "decisions.json").read_text())}
    assert decisions["exports.when"]["value"] == "end" and "large" in decisions["exports.when"]["reason"]


def test_formats_that_cannot_express_the_adapter_are_refused_before_anything_is_staged(
    parent: TrainingForkServer, tmp_path: Path
) -> None:
    model = {"family": "sd3.5", "path": "tiny"}
    changes = {**SHORT, "model": model, "adapter": {"targets": "all_linear"}, "exports": {"formats": ["kohya"]}}
    file = config(tmp_path, "a", **changes)
    assert parent.train(file) == 1
    assert 'exports.formats: the adapter cannot be written for "kohya"' in parent.output()
    assert not list((tmp_path / "arenas").glob("*"))


def test_one_command_exports_both_experts_of_a_run_or_of_a_step(parent: TrainingForkServer, tmp_path: Path) -> None:
    run = trained(parent, tmp_path, checkpoints={"every_steps": 2, "keep": 2}, exports={"when": "end"})
    newest = CliRunner().invoke(app, ["adapter", "export", str(run), "--for", "comfyui"])
    assert newest.exit_code == 0, newest.output
    for expert in EXPERTS:
        assert (run / f"exports/comfyui/run-step00000006_{expert}.comfyui.safetensors").is_file()
    assert "LoraLoaderModelOnly" in newest.output and newest.output.count("tensors for comfyui") == 2
    earlier = CliRunner().invoke(app, ["adapter", "export", f"{run}@4", "--for", "diffusers", "--out", str(tmp_path)])
    assert earlier.exit_code == 0, earlier.output
    assert "load_into_transformer_2=True" in earlier.output
    assert (tmp_path / "run-step00000004_low_noise.diffusers.safetensors").is_file()
    again = CliRunner().invoke(app, ["adapter", "export", str(run), "--for", "comfyui"])
    assert isinstance(again.exception, ModelError) and "exists; choose another path" in str(again.exception)


def test_what_is_not_there_is_named(parent: TrainingForkServer, tmp_path: Path) -> None:
    run = trained(parent, tmp_path)
    with pytest.raises(ModelError, match=r"no export and no checkpoint of step 5; it has 2, 4, 6"):
        adapters.export(f"{run}@5", "comfyui")
    shutil.copytree(run / "checkpoints" / "step-00000006", tmp_path / "elsewhere" / "step-00000006")
    with pytest.raises(ModelError, match="is a checkpoint outside of a run folder"):
        adapters.export(tmp_path / "elsewhere" / "step-00000006", "comfyui")
    with pytest.raises(RunFolderError, match="is not a run folder"):
        adapters.export(tmp_path / "data", "comfyui")

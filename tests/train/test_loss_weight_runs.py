"""Complete runs with masks, sample weights, prior preservation and SNR weighting: reported, refused, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from tests.train.runs import TrainingForkServer, config, pictures

SHORT: dict[str, Any] = {
    "train": {"max_steps": 4, "batch_size": 2, "mixed_precision": "fp32"},
    "gh200_optimizations": {"enable_batch_size_rampup": False, "initial_effective_batch_size": None},
    "validation": {"at_start": False, "at_end": False, "every_steps": None, "prompts": []},
}


BRIEF = {**SHORT, "train": {**SHORT["train"], "max_steps": 2}}


def datasets(folder: Path, **counted: Any) -> list[dict[str, Any]]:
    """A dataset of squares with these loss settings, and one that keeps the prior."""
    if not (folder / "data").exists():
        pictures(folder / "data" / "train", 6)
        pictures(folder / "data" / "class", 3, first=6)
        (folder / "masks").mkdir()
        for number in range(6):
            mask = Image.new("L", (32, 32), 0)
            mask.paste(255, (4, 4, 20, 20))
            mask.save(folder / "masks" / f"{number:03d}.png")
        rows = [{"file_name": f"{number:03d}.png", "weight": number / 2} for number in range(6)]
        (folder / "weights.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {"resolution": 32, "bucket_step": 16}
    return [
        {"id": "squares", "instance_data_dir": str(folder / "data" / "train"), **common, **counted},
        {"id": "class", "instance_data_dir": str(folder / "data" / "class"), "prior": bool(counted), **common},
    ]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "run" / "losses.jsonl").read_text().splitlines()]


def everything(folder: Path) -> dict[str, Any]:
    return {
        "mask_dir": str(folder / "masks"),
        "mask_floor": 0.1,
        "loss_weights_file": str(folder / "weights.jsonl"),
        "loss_weight": 2.0,
        "augment": {"flip": 0.5},
        "variations": 2,
        "augmentations_cache_mode": "static",
    }


def test_a_run_with_all_loss_weights_trains_and_resumes_to_the_bit(parent: TrainingForkServer, tmp_path: Path) -> None:
    data = datasets(tmp_path, **everything(tmp_path))
    in_turn = {"switch_boundary_every": 1}  # so that both experts are trained before and after
    whole = config(tmp_path, "whole", **SHORT, datasets=data, model=in_turn, objective={"loss": "huber"})
    assert parent.train(whole) == 0, parent.output()
    rest = config(tmp_path, "rest", **SHORT, datasets=data, model=in_turn, objective={"loss": "huber"})
    half = tmp_path / "whole" / "run" / "checkpoints" / "step-00000002"
    assert parent.train(rest, "--resume", str(half)) == 0, parent.output()
    assert len(losses(tmp_path / "whole")) == 4
    assert losses(tmp_path / "rest")[-2:] == losses(tmp_path / "whole")[-2:]


def test_min_snr_on_a_flow_model_has_no_effect_with_one_report_unless_flow_snr_is_set(
    parent: TrainingForkServer, tmp_path: Path
) -> None:
    data = datasets(tmp_path)
    objectives: dict[str, dict[str, Any]] = {
        "plain": {},
        "even": {"weighting": "min_snr"},
        "path": {"weighting": "min_snr", "flow_snr": "path"},
    }
    files = [config(tmp_path, name, **BRIEF, datasets=data, objective=one) for name, one in objectives.items()]
    assert parent.train_together(*files) == [0, 0, 0], parent.output()
    found = {name: losses(tmp_path / name) for name in objectives}
    assert found["even"] == found["plain"]
    assert found["path"] != found["plain"]
    decisions = json.loads((tmp_path / "even" / "run" / "decisions.json").read_text())
    (decision,) = [one for one in decisions if one["what"] == "objective.weighting"]
    assert decision["value"] == "none" and "flow matching" in decision["reason"]


def test_min_snr_on_a_model_that_predicts_noise_uses_its_noise_schedule(
    parent: TrainingForkServer, tmp_path: Path
) -> None:
    data, model = datasets(tmp_path), {"family": "sdxl"}
    files = [
        config(tmp_path, name, **BRIEF, datasets=data, model=model, objective=objective)
        for name, objective in {"plain": {}, "weighed": {"weighting": "min_snr", "snr_gamma": 0.01}}.items()
    ]
    assert parent.train_together(*files) == [0, 0], parent.output()
    plain, weighed = losses(tmp_path / "plain"), losses(tmp_path / "weighed")
    assert weighed[0] < plain[0] and len(weighed) == 2
    assert "objective.weighting" not in (tmp_path / "weighed" / "run" / "decisions.json").read_text()


def test_masks_without_samples_end_the_run_before_encoding(parent: TrainingForkServer, tmp_path: Path) -> None:
    data = datasets(tmp_path, mask_dir=str(tmp_path / "data" / "class"))
    assert parent.train(config(tmp_path, "a", **SHORT, datasets=data)) == 1
    assert "has the name of a sample" in " ".join(parent.output().split())
    assert not (tmp_path / "a" / "run" / "losses.jsonl").exists()


def test_masks_weights_and_captions_that_changed_since_the_checkpoint_cause_warnings(
    parent: TrainingForkServer, tmp_path: Path
) -> None:
    data = datasets(tmp_path, **everything(tmp_path))
    file = config(tmp_path, "changed", **{**BRIEF, "datasets": data, "checkpoints": {"every_steps": 1}})
    assert parent.train(file) == 0, parent.output()
    run = tmp_path / "changed" / "run"
    first = str(sorted((run / "checkpoints").iterdir())[0])
    assert parent.train(file, "--resume", first) == 0, parent.output()
    assert "was saved with other" not in (run / "events.jsonl").read_text()
    Image.new("L", (32, 32), 200).save(tmp_path / "masks" / "003.png")
    weights = tmp_path / "weights.jsonl"
    weights.write_text(weights.read_text().replace("2.5", "2.0"))
    (tmp_path / "data" / "class" / "007.txt").write_text("something else")
    assert parent.train(file, "--resume", first) == 0, parent.output()
    said = (run / "events.jsonl").read_text()
    changed = "datasets[class].captions, datasets[squares].loss_weights_file, datasets[squares].mask_dir"
    assert f"was saved with another content of {changed}: from here on the current content counts" in said

"""Runs of an image-editing model: trained on pairs of images, resumed to the bit, sampled and exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.train.runs import TrainingForkServer, artefacts, config, pictures
from tests.train.test_runs import SHORT, del_intermediate, whole_and_again


def pairs(folder: Path, **of_all: Any) -> dict[str, Any]:
    """Configuration blocks: images of squares, each with its negative as reference, in another size and format."""
    data = folder / "data"
    if not data.exists():
        pictures(data / "train", 6)
        pictures(data / "held_out", 2, first=6)
        for name in ("train", "held_out"):
            (data / f"{name}_before").mkdir()
            for file in sorted((data / name).glob("*.png")):
                before = Image.open(file).point(lambda value: 255 - value).resize((80, 64))
                before.save(data / f"{name}_before" / f"{file.stem}.jpg")
    common = {"resolution": 32, "bucket_step": 16, "conditioning_resolution": 64, **of_all}
    return {
        "model": {"family": "qwen-image-edit", "switch_boundary_every": 1},
        "adapter": {"dropout": 0.0},
        "datasets": [
            {
                "id": name,
                "instance_data_dir": str(data / name),
                "conditioning_dir": str(data / f"{name}_before"),
                "held_out": name == "held_out",
                **common,
            }
            for name in ("train", "held_out")
        ],
    }


WAYS = {
    "cached": {},
    "captions dropped and shuffled": {
        "captions": {"dropout": 0.3, "shuffle_tags": True},
        "augmentations_cache_mode": "refresh_each_epoch",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_stopped_and_resumed_ends_with_the_same_bits(
    parent: TrainingForkServer, tmp_path: Path, way: str
) -> None:
    changed = {**SHORT, "validation": {"at_start": False, "every_steps": 6}, **pairs(tmp_path, **WAYS[way])}
    caches = {"cache_config": {"vae_cache_type": "none", "text_cache_type": "none"}}
    fresh = parent.start(config(tmp_path, "fresh", **changed, **caches))
    whole, again = whole_and_again(parent, tmp_path, **changed)
    expected, found = artefacts(whole), artefacts(again)
    del_intermediate(expected), del_intermediate(found)
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if expected[name] != found[name]] == []
    assert any(name.startswith("samples/") and name.endswith(".png") for name in found)
    adapter = max((again / "exports").rglob("*.safetensors"))  # that of the last step
    assert all(key.startswith("transformer.transformer_blocks.") for key in load_file(adapter))
    assert any(tensor.abs().max() > 0 for key, tensor in load_file(adapter).items() if "lora_B" in key)
    assert parent.wait(fresh) == 0, parent.output()
    losses = (tmp_path / "fresh" / "run" / "losses.jsonl").read_bytes()
    assert losses == expected["losses.jsonl"], "encoded at use, the same is learnt"


def test_data_that_do_not_fit_the_family_are_refused_with_a_remedy(parent: TrainingForkServer, tmp_path: Path) -> None:
    changed = {**SHORT, **pairs(tmp_path)}
    alone = [{**one, "conditioning_dir": None} for one in changed["datasets"]]
    for one in alone:
        del one["conditioning_dir"], one["conditioning_resolution"]
    assert parent.train(config(tmp_path, "alone", **{**changed, "datasets": alone})) == 1
    assert "name their folder in conditioning_dir" in parent.output()
    assert parent.train(config(tmp_path, "plain", **{**changed, "model": {"family": "qwen-image"}})) == 1
    assert "remove conditioning_dir" in parent.output()
    missing = next((tmp_path / "data" / "train_before").iterdir())
    missing.unlink()
    assert parent.train(config(tmp_path, "missing", **changed)) == 1
    assert "1 of 6 samples have no image in" in parent.output() and missing.stem in parent.output()
    shutil.rmtree(tmp_path / "data" / "train_before")
    assert parent.train(config(tmp_path, "no folder", **changed)) == 1
    assert "is not a folder" in parent.output()

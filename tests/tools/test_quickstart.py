"""The quickstart is a complete training run, after which the model draws what it was trained on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from supertuner.core.errors import SuperTunerError
from supertuner.tools import shapes
from supertuner.tools.quickstart import QuickstartResult, run_quickstart
from tests.tools.shape_classifier import classify

SHORTER = ("train.max_steps=250", "validation.inference_steps=8")
"""Half of the training steps and of the inference steps, to save time."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> QuickstartResult:
    folder = tmp_path_factory.mktemp("quickstart")
    return run_quickstart(folder / "quickstart", [f"arena.home={folder / 'arenas'}", *SHORTER])


def recognised(folder: Path) -> int:
    """How many samples of a validation show what their prompts say."""
    pairs = {shapes.caption(*pair): pair for pair in shapes.HELD_OUT_PAIRS}
    facts = json.loads((folder / "samples.json").read_text())["samples"]
    pictures = [(fact["prompt"], np.asarray(Image.open(folder / fact["files"][0]).convert("RGB"))) for fact in facts]
    return sum(classify(picture).pair == pairs[prompt] for prompt, picture in pictures)


def test_held_out_pairs_are_drawn_more_often_after_training(made: QuickstartResult) -> None:
    folders = sorted((made.training.run_dir / "samples").iterdir())
    before, after = recognised(folders[0]), recognised(folders[-1])
    assert after >= before + 6, f"{before} before, {after} after, of 24"


def test_the_held_out_loss_falls_by_30_percent_or_more(made: QuickstartResult) -> None:
    assert made.loss_after <= 0.7 * made.loss_before, f"{made.loss_before} before, {made.loss_after} after"


def test_both_experts_were_trained_through_the_ramp(made: QuickstartResult) -> None:
    lines = [json.loads(line) for line in (made.training.run_dir / "losses.jsonl").read_text().splitlines()]
    assert {line["expert"] for line in lines} == {"high_noise", "low_noise"}
    windows = [line["window"] for line in lines]
    assert windows == sorted(windows) and windows[0] < windows[-1]


def test_all_pictures_and_exports_exist(made: QuickstartResult) -> None:
    for picture in (made.contact_sheet, made.comparison, made.training.loss_curve):
        assert picture is not None
        with Image.open(picture) as opened:
            assert len(np.unique(np.asarray(opened.convert("RGB").reduce(4)).reshape(-1, 3), axis=0)) > 50
    assert [path.name for path in made.training.adapters] == [
        "quickstart-step00000250_high_noise.safetensors",
        "quickstart-step00000250_low_noise.safetensors",
    ]


def test_the_exported_adapters_load_in_diffusers_and_change_both_experts(made: QuickstartResult) -> None:
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(shapes.BASE_MODEL, dtype=torch.float32)
    noisy = torch.randn((1, 8, 1, 6, 6), generator=torch.Generator().manual_seed(0))
    text, when = torch.zeros(1, 512, pipe.text_encoder.config.d_model), torch.tensor([900.0])

    def predictions() -> list[torch.Tensor]:
        with torch.no_grad():
            return [part(noisy, when, text).sample for part in (pipe.transformer, pipe.transformer_2)]

    before = predictions()
    high, low = made.training.adapters
    pipe.load_lora_weights(str(high), adapter_name="high")
    pipe.load_lora_weights(str(low), adapter_name="low", load_into_transformer_2=True)
    after = predictions()
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(after, before, strict=True))


def test_a_second_quickstart_has_the_same_result_without_training_again(made: QuickstartResult) -> None:
    losses = (made.training.run_dir / "losses.jsonl").read_bytes()
    begun = time.monotonic()
    again = run_quickstart(made.config.parent.parent, [f"arena.home={made.config.parents[2] / 'arenas'}", *SHORTER])
    assert (again.loss_before, again.loss_after, again.training.steps) == (
        made.loss_before,
        made.loss_after,
        made.training.steps,
    )
    assert (made.training.run_dir / "losses.jsonl").read_bytes() == losses
    assert time.monotonic() - begun < 60


def test_quickstart_refuses_a_folder_with_other_files(tmp_path: Path) -> None:
    mine = tmp_path / "quickstart" / "shapes" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(SuperTunerError, match="contains other files"):
        run_quickstart(tmp_path / "quickstart")
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


def test_a_quickstart_that_is_killed_while_drawing_leaves_no_partial_data(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from supertuner.tools.quickstart import run_quickstart as q; q(pathlib.Path(sys.argv[1]))"
    )
    folder = tmp_path / "quickstart"
    child = subprocess.Popen([sys.executable, "-c", script, str(folder)], stderr=subprocess.DEVNULL)
    while not list(folder.glob(".making-*/shapes/train/*")) and child.poll() is None:
        time.sleep(0.001)
    child.kill()
    child.wait()
    assert not (folder / "shapes").exists()

"""`supertuner sample`: samples of a run's adapter are those of its validation; files, strengths and wrong requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.train.runs import TrainingForkServer, config

SAMPLE = "prompt-00-seed-0.png"


@pytest.fixture(scope="module")
def run(parent: TrainingForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two experts with validations at steps 0, 2 and 4."""
    folder = tmp_path_factory.mktemp("sampled")
    file = config(
        folder,
        "one",
        train={"max_steps": 4, "ema_decay": None},
        optimizer={"learning_rate": 0.3, "lr_scheduler": "constant", "lr_warmup_steps": 0},
        model={"switch_boundary_every": 1},
        adapter={"dropout": 0.0},
        validation={"at_start": True, "every_steps": 2},
    )
    assert parent.train(file) == 0, parent.output()
    yield folder / "one" / "run"


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def test_the_seed_of_a_validation_gives_its_sample_to_the_bit(
    parent: TrainingForkServer, run: Path, tmp_path: Path
) -> None:
    for step, source in ((4, str(run)), (2, f"{run}@2"), (4, str(run / "checkpoints" / "step-00000004"))):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        parent.printed("sample", source, "--out", str(out))
        assert (out / SAMPLE).read_bytes() == (run / f"samples/step-{step:08d}" / SAMPLE).read_bytes(), source
    assert (run / "samples/step-00000002" / SAMPLE).read_bytes() != (
        run / "samples/step-00000004" / SAMPLE
    ).read_bytes()


def test_strength_0_is_the_base_model_and_the_files_of_an_export_give_the_samples_of_the_run(
    parent: TrainingForkServer, run: Path, tmp_path: Path
) -> None:
    parent.printed("sample", str(run), "--strength", "0", "--out", str(tmp_path / "base"))
    assert (tmp_path / "base" / SAMPLE).read_bytes() == (run / "samples/step-00000000" / SAMPLE).read_bytes()
    trained, base = pixels(run / "samples/step-00000004" / SAMPLE), pixels(tmp_path / "base" / SAMPLE)
    assert np.abs(trained - base).max() > 8

    files = tmp_path / "downloaded"
    shutil.copytree(run / "exports/step-00000004", files)
    model, size = f"model.path={run / 'tiny-wan2.2'}", ("validation.width=32", "validation.height=32")
    sets = [word for text in (model, *size, "validation.inference_steps=2") for word in ("--set", text)]
    device = ("--set", "train.mixed_precision=fp32")
    parent.printed(
        *("sample", str(files), "--prompt", "a red square", *sets, *device, "--out", str(tmp_path / "from-files"))
    )
    assert np.abs(pixels(tmp_path / "from-files" / SAMPLE) - trained).max() <= 2  # merged instead of attached

    parent.printed("adapter", "export", str(run), "--for", "comfyui")
    parent.printed(
        *("sample", str(run / "exports/comfyui"), "--prompt", "a red square", *sets, *device),
        *("--out", str(tmp_path / "from-comfyui")),
    )
    assert np.abs(pixels(tmp_path / "from-comfyui" / SAMPLE) - trained).max() <= 2


def test_every_prompt_is_sampled_with_every_seed_into_a_new_folder(parent: TrainingForkServer, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "events" not in path.name}
    arguments = ("sample", f"{run}@4", "--prompt", "a red square", "--prompt", "a blue square", "--seed", "3")
    printed = parent.printed(*arguments, "--count", "2")
    folder = run / "samples/generated/step-00000004"
    names = [f"prompt-0{prompt}-seed-{seed}.png" for prompt in (0, 1) for seed in (3, 4)]
    assert sorted(path.name for path in folder.iterdir()) == ["grid.png", *names, "samples.json"]
    assert f"look at {folder / 'grid.png'}" in printed
    facts = json.loads((folder / "samples.json").read_text())
    assert facts["weights"] == "adapter at strength 1" and facts["step"] == 4
    parent.printed(*arguments, "--count", "1", "--set", "validation.frames=5")
    videos = run / "samples/generated/step-00000004-2"
    assert (videos / "grid.mp4").is_file() and (videos / "prompt-01-seed-3.mp4").is_file()
    assert {path: path.read_bytes() for path in before} == before


def test_a_request_that_cannot_be_met_is_told_with_its_remedy(
    parent: TrainingForkServer, run: Path, tmp_path: Path
) -> None:
    export = run / "exports/step-00000004"
    high = next(export.glob("*_high_noise.safetensors"))
    copied = tmp_path / "copied"
    shutil.copytree(export, copied)
    (copied / "second_high_noise.safetensors").write_bytes(high.read_bytes())
    model = ("--set", f"model.path={run / 'tiny-wan2.2'}", "--prompt", "x")
    size = ("--set", "validation.width=32", "--set", "validation.height=32")
    for arguments, problem in {
        ("nowhere",): "there is no nowhere; name a run folder",
        (f"{run}@3",): "has no export and no checkpoint of step 3; it has 2, 4",
        (str(run), "--out", str(tmp_path)): f"{tmp_path} exists; name a new folder with --out",
        (str(run), "--strength", "inf"): "--strength is inf; it must be finite",
        (str(run), "--set", "validation.width=33", "--set", "validation.height=33"): "33, 33 and 1, which the model",
        (str(run), "--set", "validation.guidance=2"): "validation.guidance",
        (str(run), "--set", f"validation.image={high}"): "starts from no image; remove it",
        (str(high), "--prompt", "x"): "set model.path to its folder or its name on the hub",
        (str(high), *model): "set validation.width and validation.height",
        (str(high), *model[:2], *size): "has no validation.prompts; set --prompt",
        (str(copied), *model, *size): "are both for high_noise",
    }.items():
        code, printed = parent.code_and_output("sample", *arguments)
        assert code in (1, 2) and problem in " ".join(printed.split()) and "Traceback" not in printed, (
            arguments,
            printed,
        )


def test_an_editing_model_needs_an_image_and_edits_it(parent: TrainingForkServer, tmp_path: Path) -> None:
    from tests.train.test_edit_runs import pairs

    file = config(
        tmp_path,
        "edit",
        **{
            **pairs(tmp_path),
            "train": {"max_steps": 1, "ema_decay": None},
            "validation": {"at_start": False, "every_steps": None, "image": str(tmp_path / "start.jpg")},
        },
    )
    reference = sorted((tmp_path / "data/held_out_before").iterdir())[0]
    code, printed = parent.code_and_output("train", str(file))
    assert code == 2 and "validation.image" in printed and "is not a file" in printed
    shutil.copy(reference, tmp_path / "start.jpg")
    assert parent.train(file) == 0, parent.output()
    run = tmp_path / "edit" / "run"
    parent.printed("sample", str(run), "--out", str(tmp_path / "same"))
    assert (tmp_path / "same" / SAMPLE).read_bytes() == (run / "samples/step-00000001" / SAMPLE).read_bytes()
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    code, printed = parent.code_and_output("sample", str(run), "--set", f"validation.image={tmp_path / 'broken.png'}")
    assert code == 1 and "broken.png cannot be read as an image" in printed and "Traceback" not in printed

"""The quickstart on the phantom's CUDA device, from staging to export, with overflow and hints on.

Values mean nothing here, so nothing is said of losses and pictures; that every part runs on a device, that is said.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open

from supertuner.api.training import training_summary
from supertuner.tools.quickstart import QuickstartResult, run_quickstart

STEPS = 12
ON_CUDA = ("train.device=cuda", "memory.overflow.enabled=true", "gh200_optimizations.enable_uvm_hints=true")
SHORT = (
    f"train.max_steps={STEPS}", "checkpoints.every_steps=6", "validation.inference_steps=4", "validation.seeds=[0]",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> QuickstartResult:
    folder = tmp_path_factory.mktemp("quickstart")
    return run_quickstart(folder / "quickstart", [f"arena.home={folder / 'arenas'}", *ON_CUDA, *SHORT])


def test_it_trains_to_the_end(made: QuickstartResult) -> None:
    losses = [json.loads(line) for line in (made.training.run_dir / "losses.jsonl").read_text().splitlines()]
    assert made.training.steps == STEPS == len(losses)
    assert made.training.stopped_by is None


def test_both_experts_are_exported_whole(made: QuickstartResult) -> None:
    assert [path.stem for path in made.training.adapters] == [
        f"quickstart-step{STEPS:08d}_{expert}" for expert in ("high_noise", "low_noise")
    ]
    for path in made.training.adapters:
        with safe_open(path, framework="pt") as file:
            assert any("lora_A" in name for name in file.keys())  # noqa: SIM118


def test_there_are_checkpoints_and_samples(made: QuickstartResult) -> None:
    assert (made.training.run_dir / "checkpoints" / f"step-{STEPS:08d}").is_dir()
    with Image.open(made.comparison) as picture:
        assert picture.width > 0 and picture.height > 0


def test_the_summary_says_what_became_of_hints_and_overflow(made: QuickstartResult) -> None:
    said = training_summary(made.training)
    assert "hint applied" in said
    assert "overflow" in said


@pytest.mark.phantom_long
@pytest.mark.timeout(900)
def test_it_runs_at_its_full_length(tmp_path: Path) -> None:
    made = run_quickstart(tmp_path / "quickstart", [f"arena.home={tmp_path / 'arenas'}", *ON_CUDA])
    assert made.training.steps == 500
    assert len(list((made.training.run_dir / "samples").iterdir())) == 2
    assert all(path.stat().st_size > 0 for path in made.training.adapters)

"""Complete training runs: every way of training ends with usable files, and resuming changes no bit."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from supertuner.runs.loss_files import read_losses
from tests.train.runs import TrainingForkServer, artefacts, config

SHORT = {"train": {"max_steps": 6}, "validation": {"at_start": False, "every_steps": None}}


def trained(parent: TrainingForkServer, folder: Path, name: str, **changed: object) -> Path:
    """The folder of a finished run."""
    file = config(folder, name, **changed)
    assert parent.train(file) == 0, parent.output()
    return folder / name / "run"


def whole_and_again(parent: TrainingForkServer, folder: Path, **changed: object) -> tuple[Path, Path]:
    """The folders of an uninterrupted run, and of one that was stopped and resumed."""
    whole = parent.start(config(folder, "whole", **changed))
    again = interrupted(parent, folder, "again", **changed)
    assert parent.wait(whole) == 0, parent.output()
    return folder / "whole" / "run", again


def interrupted(parent: TrainingForkServer, folder: Path, name: str, **changed: object) -> Path:
    """Run it, stop it by SIGTERM in the middle, and resume it."""
    file = config(folder, name, **changed)
    pid = parent.start(file)
    wait_for(lambda: len(read_losses(folder / name / "run" / "losses.jsonl")) >= 3)
    os.kill(pid, signal.SIGTERM)
    code = parent.wait(pid)
    assert code in (0, 128 + signal.SIGTERM), parent.output()
    assert parent.train(file) == 0, parent.output()
    return folder / name / "run"


def wait_for(condition, most_s: float = 60.0) -> None:
    end = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


WAYS = {
    "bf16": {"train": {"mixed_precision": "bf16", "gradient_checkpointing": True}},
    "fp16": {"train": {"mixed_precision": "fp16"}},
    "schedule_free": {"optimizer": {"name": "schedule_free"}, "train": {"ema_decay": None}},
    "prodigy": {"optimizer": {"name": "prodigy", "learning_rate": 1.0}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "adamw8bit": {"optimizer": {"name": "adamw8bit"}, "adapter": {"rank": 64}},
    "full": {"adapter": {"type": "full"}, "train": {"ema_decay": None}},
    "int8 base": {"model": {"base_weights": "int8", "experts": "high_noise"}, "train": {"mixed_precision": "bf16"}},
    "low noise only": {"model": {"experts": "low_noise"}},
    "flux": {"model": {"family": "flux", "switch_boundary_every": 1}},
    "qwen-image": {
        "model": {"family": "qwen-image", "switch_boundary_every": 1},
        "adapter": {"targets": "all_linear"},
        "train": {"mixed_precision": "bf16", "gradient_checkpointing": True},
    },
    "sd3.5": {"model": {"family": "sd3.5", "switch_boundary_every": 1}, "adapter": {"targets": "all_linear"}},
    "sdxl": {"model": {"family": "sdxl", "switch_boundary_every": 1}, "adapter": {"targets": "all_layers"}},
    "no caches": {"cache_config": {"vae_cache_type": "none", "text_cache_type": "none"}},
    "caches on disk": {"cache_config": {"vae_cache_type": "disk", "text_cache_type": "disk"}},
}


def changes(way: str) -> dict[str, dict[str, object]]:
    """The configuration changes for one way of training: a short run with its settings."""
    both = {block: dict(values) for block, values in SHORT.items()}
    for block, values in WAYS[way].items():
        both[block] = {**both.get(block, {}), **values}
    if way in ("full", "flux", "qwen-image"):
        both.setdefault("adapter", {}).setdefault("dropout", 0.0)
    return both


@pytest.mark.parametrize("way", WAYS)
def test_a_run_stopped_by_a_signal_and_resumed_ends_with_the_same_bits(parent, tmp_path, way):
    whole, again = whole_and_again(parent, tmp_path, **changes(way))
    expected, found = artefacts(whole), artefacts(again)
    del_intermediate(expected), del_intermediate(found)
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if expected[name] != found[name]] == []
    assert len(set(file_modes(whole).values())) == 1, "libraries make some files that only their owner can read"


def file_modes(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mode for path in folder.rglob("*") if path.is_file()}


def del_intermediate(files: dict[str, bytes]) -> None:
    """Remove all checkpoints but the last: a signal saves at another step."""
    last = max(name.split("/")[1] for name in files if name.startswith("checkpoints/"))
    for name in [n for n in files if n.startswith("checkpoints/") and not n.startswith(f"checkpoints/{last}/")]:
        del files[name]


def test_a_requested_validation_changes_no_bit_of_the_result(parent, tmp_path):
    whole = parent.start(config(tmp_path, "whole"))
    pid = parent.start(config(tmp_path, "asked"))
    run = tmp_path / "asked" / "run"
    wait_for(lambda: len(read_losses(run / "losses.jsonl")) >= 3)
    os.kill(pid, signal.SIGUSR1)
    assert parent.wait(pid) == 0, parent.output()
    assert parent.wait(whole) == 0, parent.output()
    asked = {name for name in artefacts(run) if name.startswith("samples/asked/")}
    assert asked, "the validation that was asked for was made"
    expected, found = artefacts(tmp_path / "whole" / "run"), artefacts(run)
    assert {name: found[name] for name in found if name not in asked} == expected


def test_the_loss_log_has_the_windows_of_the_ramp_and_the_experts_in_turn(parent, tmp_path):
    lines = read_losses(trained(parent, tmp_path, "whole") / "losses.jsonl")
    assert [line.window for line in lines] == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4]
    assert [line.expert for line in lines] == (["high_noise"] * 2 + ["low_noise"] * 2) * 3
    assert [line.samples for line in lines][-1] == sum(line.window for line in lines)


def test_a_finished_run_is_not_trained_again(parent, tmp_path):
    run = trained(parent, tmp_path, "whole", **SHORT)
    before = artefacts(run)
    assert parent.train(config(tmp_path, "whole", **SHORT)) == 0
    assert artefacts(run) == before


def test_a_run_resumes_from_an_older_checkpoint_that_is_named(parent, tmp_path):
    run = trained(parent, tmp_path, "whole", **SHORT)
    before = artefacts(run)
    older = sorted((run / "checkpoints").iterdir())[0]
    assert parent.train(config(tmp_path, "whole", **SHORT), "--resume", str(older)) == 0, parent.output()
    found = artefacts(run)
    assert {name: found[name] for name in before} == before


def test_resuming_from_a_checkpoint_whose_log_is_lost_is_refused_and_renames_nothing(parent, tmp_path):
    run = trained(parent, tmp_path, "whole", checkpoints={"keep": 9}, **SHORT)
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    (run / "losses.jsonl").write_text("")
    assert parent.train(tmp_path / "whole.json", "--resume", str(run / "checkpoints" / "step-00000002")) == 1
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def test_a_run_whose_files_changed_resumes_with_a_warning(parent, tmp_path):
    run = trained(parent, tmp_path, "whole", **SHORT)
    assert parent.train(tmp_path / "whole.json") == 0 and "with other files" not in (run / "events.jsonl").read_text()
    shutil.copy(tmp_path / "data" / "train" / "001.png", tmp_path / "data" / "train" / "000.png")
    assert parent.train(tmp_path / "whole.json") == 0, parent.output()
    assert "was saved with other files in squares" in (run / "events.jsonl").read_text()


def test_an_epoch_may_end_with_a_short_window(parent, tmp_path):
    ramp = {"enable_batch_size_rampup": False, "initial_effective_batch_size": None}
    train = {"max_steps": None, "num_epochs": 1, "batch_size": 4}
    lines = read_losses(
        trained(parent, tmp_path, "whole", gh200_optimizations=ramp, **{**SHORT, "train": train}) / "losses.jsonl"
    )
    assert [line.window for line in lines] == [4, 2]


def test_losses_that_are_not_finite_end_the_run_and_name_their_samples(parent, tmp_path):
    """With a broken last layer every window is skipped, and the third ends the run."""
    base = tmp_path / "base"
    shutil.copytree(trained(parent, tmp_path, "whole", **SHORT) / "tiny-wan2.2", base)
    weights = base / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["proj_out.bias"].fill_(float("nan"))
    save_file(tensors, weights, {"format": "pt"})
    file = config(tmp_path, "broken", **{**SHORT, "model": {"path": str(base), "experts": "high_noise"}})
    assert parent.train(file) == 1
    messages = " ".join(parent.output().split())
    assert "squares/00" in messages and "3 windows in a row were not finite (train.max_nonfinite)" in messages
    lines = read_losses(tmp_path / "broken" / "run" / "losses.jsonl")
    assert len(lines) == 3 and all(math.isnan(line.loss) for line in lines)


def test_events_and_decisions_record_what_happened(parent, tmp_path):
    run = trained(parent, tmp_path, "whole", **SHORT)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    messages = [event["message"] for event in events if event["event"] == "noted"]
    assert any("gradient accumulation ramp enabled" in line for line in messages)
    decisions = {one["what"] for one in json.loads((run / "decisions.json").read_text())}
    assert {"model", "train.device", "train.steps", "trained.high_noise"} <= decisions

"""Complete runs with plans: every checkpoint, loss, sample and export has the bytes of a run without a plan.

With two experts, averages, clipping, a ramp, held-out loss and samples; resumed in the middle with another plan.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from tests.train.runs import TrainingForkServer, config

EVERYTHING = {"weights": "streamed", "activations": "send", "optimizer": "streamed", "idle_experts": "host"}
OTHERWISE = {"weights": "streamed", "activations": "recompute", "optimizer": "host", "check_every_windows": 1}


def written(run: Path) -> dict[str, str]:
    """The files of a run that must not depend on a plan."""
    kept = [*run.rglob("*.safetensors"), *run.rglob("*.png"), *run.glob("*.jsonl")]
    return {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in kept
        if file.name not in ("loss_curve.png", "events.jsonl")
    }


def made(folder: Path, name: str, parent: TrainingForkServer, plan: dict[str, Any]) -> Path:
    file = config(
        folder,
        name,
        train={"batch_size": 2, "max_steps": 6, "mixed_precision": "fp32", "ema_decay": 0.9, "max_grad_norm": 1.0},
        checkpoints={"every_steps": 3, "keep": 5},
        validation={"every_steps": 3, "inference_steps": 2, "prompts": ["a red square"]},
        optimizer={"learning_rate": 0.001, "lr_scheduler": "constant"},
        plan=plan,
    )
    assert parent.train(file) == 0, parent.output()
    return folder / name / "run"


def test_runs_with_plans_write_the_files_of_a_run_without_one(tmp_path: Path, parent: TrainingForkServer) -> None:
    wanted = written(made(tmp_path, "plain", parent, {}))
    run = made(tmp_path, "planned", parent, EVERYTHING)
    assert len(wanted) > 12 and written(run) == wanted
    assert "weights of 2 blocks streamed" in (run / "events.jsonl").read_text()
    # The same run again from the middle, with another plan.
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    shutil.rmtree(run / "exports" / "step-00000006")
    made(tmp_path, "planned", parent, OTHERWISE)
    assert "going on after step 3" in parent.output()
    assert written(run) == wanted

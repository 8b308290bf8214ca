"""Training is started as the seeds start it: `train.py` with their flags, alone or by a launcher of many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from supertuner.cli.train_flags import as_ours
from tests.train.runs import ROOT, pictures

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--config run.json", "train run.json"),
        ("--config=run.json --max_train_steps 10", "train run.json --set max_train_steps=10"),
        (
            "--config run.json --attention_mechanism flash_attn_3 --max_train_steps=10",
            "train run.json --set attention_mechanism=flash_attn_3 --set max_train_steps=10",
        ),
        ("--enable_manual_validation --config run.json", "train run.json --set enable_manual_validation=true"),
        ("--enable_manual_validation run.json", "train --set enable_manual_validation=true run.json"),
        ("run.json --set train.batch_size=2 --resume never", "train run.json --set train.batch_size=2 --resume never"),
        ("--config run.json --anyway --limit 3", "train run.json --anyway --limit 3"),
        ("--lr-warmup-steps -1 --config run.json", "train --set lr_warmup_steps=-1 run.json"),
        ("--use_ema --config run.json", "train --set use_ema=true run.json"),
        ("--config", "train"),
        ("--help", "train --help"),
    ],
)
def test_the_seeds_flags_in_our_words(theirs, ours):
    assert sorted(as_ours(theirs.split())) == sorted(ours.split())


def _config(folder: Path) -> Path:
    pictures(folder / "data", 6)
    tree = {
        "run": {"name": "run", "output_dir": str(folder / "runs"), "seed": 7},
        "model": {"family": "wan2.2", "path": "tiny"},
        "adapter": {"rank": 2},
        "arena": {"home": str(folder / "arenas")},
        "datasets": [{"id": "squares", "instance_data_dir": "data", "resolution": 32, "bucket_step": 16}],
        "train": {"batch_size": 1, "max_steps": 1000},
        "validation": {"at_end": False},
    }
    file = folder / "run.json"
    file.write_text(json.dumps(tree))
    return file


def _called(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    return subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_shipped_accelerate_configuration_starts_two_processes_of_one_run(tmp_path):
    done = _called(
        *(BIN / "accelerate", "launch", "--config_file", "config/accelerate_config_gh200.yaml"),
        *("--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no"),
        *("train.py", "--config", _config(tmp_path), "--max_train_steps", "2", "--enable_manual_validation"),
    )
    assert done.returncode == 0, done.stderr
    resolved = json.loads((tmp_path / "runs" / "run" / "config.resolved.json").read_text())
    config, origins = resolved["config"], resolved["origins"]
    assert (config["train"]["max_steps"], config["train"]["mixed_precision"]) == (2, "fp32")
    assert origins["parallel.strategy"] == "environment: ACCELERATE_USE_FSDP"
    losses = [json.loads(line) for line in (tmp_path / "runs" / "run" / "losses.jsonl").read_text().splitlines()]
    assert [line["window"] for line in losses] == [2, 2], "a sample of each process: they train together"


def test_one_process_where_several_were_asked_for_does_not_begin(tmp_path):
    done = _called(
        *(BIN / "accelerate", "launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
        *("train.py", "--config", _config(tmp_path), "--max_train_steps", "2"),
    )
    assert done.returncode != 0
    assert "asked for more than one process, and started this one alone" in done.stderr
    assert not (tmp_path / "runs").exists()

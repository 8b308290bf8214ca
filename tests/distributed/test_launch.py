"""Training starts as in the GH200 forks: `train.py` with their flags, as one process or by a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from supertuner.cli.train import translate_arguments
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
def test_flags_of_the_gh200_forks_are_translated(theirs, ours):
    assert sorted(translate_arguments(theirs.split())) == sorted(ours.split())


def _config(folder: Path) -> Path:
    pictures(folder / "data", 6)
    tree = {
        "run": {"name": "run", "output_dir": str(folder / "runs"), "seed": 7},
        "model": {"family": "wan2.2", "path": "tiny"},
        "adapter": {"rank": 2},
        "arena": {"home": str(folder / "arenas")},
        "datasets": [{"id": "squares", "instance_data_dir": "data", "resolution": 32, "bucket_step": 16}],
        "train": {"batch_size": 1, "max_steps": 100_000},
        "validation": {"at_end": False},
    }
    file = folder / "run.json"
    file.write_text(json.dumps(tree))
    return file


def _environ() -> dict[str, str]:
    ours = ("ACCELERATE_", "FSDP_", "SUPERTUNER_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(ours)}, "OMP_NUM_THREADS": "1"}


@contextmanager
def _begun(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running launcher; at the end none of its processes is left."""
    with open(log, "wb") as file:
        child = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=_environ(), stdout=file, stderr=file)
    ranks: list[int] = []
    try:
        yield child
        ranks = _children(child.pid)
    finally:
        for pid in (*(ranks or _children(child.pid)), child.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return sorted(map(int, text.split()))


def _wait_for(file: Path, child: subprocess.Popen[bytes], log: Path) -> None:
    while not (file.exists() and file.stat().st_size):
        assert child.poll() is None, log.read_text()
        time.sleep(0.05)


def test_the_shipped_accelerate_configuration_trains_on_two_processes_and_sigterm_saves(tmp_path):
    run, log = tmp_path / "runs" / "run", tmp_path / "log"
    command = (
        *(BIN / "accelerate", "launch", "--config_file", "examples/accelerate_config_gh200.yaml"),
        *("--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no"),
        *("train.py", "--config", _config(tmp_path), "--max_train_steps", "100000", "--enable_manual_validation"),
    )
    with _begun(log, *command) as launcher:
        _wait_for(run / "losses.jsonl", launcher, log)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait()
    resolved = json.loads((run / "config.resolved.json").read_text())
    config, origins = resolved["config"], resolved["origins"]
    assert (config["train"]["max_steps"], config["train"]["mixed_precision"]) == (100000, "fp32")
    assert origins["parallel.strategy"] == "environment: ACCELERATE_USE_FSDP"
    losses = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    assert {line["window"] for line in losses} == {2}, "a sample of each process: they train together"
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{len(losses):08d}"]
    assert log.read_text().count("stopped by SIGTERM after") >= 1


def test_the_sigterm_after_a_death_does_not_cause_a_save(tmp_path):
    """torchrun sends SIGTERM to the others when one of its processes is gone."""
    run, log = tmp_path / "runs" / "run", tmp_path / "log"
    command = (BIN / "torchrun", "--standalone", "--nproc-per-node", "2", BIN / "supertuner", "train")
    with _begun(log, *command, _config(tmp_path)) as launcher:
        _wait_for(run / "losses.jsonl", launcher, log)
        victim = _children(launcher.pid)[1]
        os.kill(victim, signal.SIGKILL)
        assert launcher.wait() == 1
    assert f"pid {victim}) is gone: it was killed while" in log.read_text()
    assert not list((run / "checkpoints").glob("step-*")) if (run / "checkpoints").exists() else True


def test_one_process_does_not_start_where_several_are_configured(tmp_path):
    command = (
        *(BIN / "accelerate", "launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
        *("train.py", "--config", _config(tmp_path), "--max_train_steps", "2"),
    )
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=_environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "accelerate was configured for several processes, but started only one" in done.stderr
    assert not (tmp_path / "runs").exists()

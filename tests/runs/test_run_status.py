"""Runs at a glance: their state, step, loss and remaining time, from the ends of their files."""

from __future__ import annotations

import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.core.errors import RunFolderError
from supertuner.runs.loss_files import encode_step
from supertuner.runs.run_status import BLOCK_BYTES, list_runs, read_status
from supertuner.sinks.training_events import StepRecord

BEGUN = 1_760_000_000


def a_run(folder: Path, name: str, *, begun_at: int | None = 0, done: int = 0, ended: bool = False) -> Path:
    """A run folder as a job leaves it, whose steps took 2 s each; `begun_at`: the step at which the session began."""
    run = folder / name
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"name": name, "begun": "2026-01-01T00:00:00+00:00", "config_file": "c"}))
    (run / ".lock").write_text("")
    events = [{"at": stamp(0), "event": "noted", "what": "filler", "message": "x" * 500}] * 10
    if begun_at is not None:
        figures = {"step": begun_at, "steps": 100, "samples": 0, "samples_total": 400}
        events.append({"at": stamp(0), "event": "measured", "what": "train/begin", "figures": figures})
        events += events[:1] * (3 * BLOCK_BYTES // 500)
    if ended:
        events.append({"at": stamp(500), "event": "measured", "what": "train/end", "figures": {"step": done}})
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    losses = [
        encode_step(StepRecord(n + 1, 4 * n, 4, "model", 1.0 if n < done - 20 else 0.5, 1.0, 1e-4)) for n in range(done)
    ]
    (run / "losses.jsonl").write_bytes(b"".join(losses) + b'{"step": 99')
    os.utime(run / "losses.jsonl", (BEGUN, BEGUN + 2 * (done - (begun_at or 0))))
    return run


def stamp(seconds: int) -> str:
    return datetime.fromtimestamp(BEGUN + seconds, UTC).isoformat(timespec="seconds")


def test_a_run_without_a_process_is_new_finished_stopped_or_died(tmp_path: Path) -> None:
    a_run(tmp_path, "a-new", begun_at=None)
    a_run(tmp_path, "b-finished", done=100, ended=True)
    a_run(tmp_path, "c-stopped", done=40, ended=True)
    a_run(tmp_path, "d-died", done=40)
    assert [run.state for run in list_runs(tmp_path)] == ["new", "finished", "stopped", "died"]


def test_a_training_run_shows_its_speed_and_remaining_time_of_this_session(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", begun_at=30, done=50)
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = read_status(run)
    assert status.state == "training" and (status.step, status.steps) == (50, 100)
    assert status.seconds_per_step == 2.0 and status.remaining_s == 100.0 and status.loss == 0.5


def test_a_resumed_session_that_has_not_trained_yet_is_preparing(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", done=40, ended=True)
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_status(run).state == "preparing"


def test_a_damaged_run_is_listed_beside_the_others_with_its_problem(tmp_path: Path) -> None:
    a_run(tmp_path, "good", done=100, ended=True)
    broken = a_run(tmp_path, "broken", done=3)
    (broken / "losses.jsonl").write_bytes(b"not json\n")
    runs = {run.name: run for run in list_runs(tmp_path)}
    assert runs["good"].state == "finished" and runs["broken"].state == "damaged"
    assert "not JSON" in runs["broken"].problem
    printed = CliRunner().invoke(app, ["run", "ls", str(tmp_path)])
    assert printed.exit_code == 0 and "100/100" in printed.output and "damaged" in printed.output
    as_json = json.loads(CliRunner().invoke(app, ["run", "ls", str(tmp_path / "good"), "--json"]).stdout)
    assert as_json[0]["state"] == "finished"
    with pytest.raises(RunFolderError, match="is not a run folder"):
        list_runs(tmp_path / "nowhere")

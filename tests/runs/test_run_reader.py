"""Run folders are read without changing them; `supertuner run show` prints settings, decisions and set-aside files."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from supertuner.cli.run_display import print_run
from supertuner.core.errors import RunFolderError
from supertuner.core.events import DecisionEvent, MeasurementEvent, SetAsideEvent, WarningEvent
from supertuner.core.types import JSON
from supertuner.runs.run_reader import find_runs, open_run
from supertuner.sinks.run_folder import RunFolder
from supertuner.sinks.saved_config import SavedConfig
from supertuner.sinks.training_events import HeldOutLoss, train_held_out_event, train_samples_event


@pytest.fixture
def run(tmp_path: Path) -> Path:
    origins = {"run.name": "cats.yaml", "datasets[0].resolution": "--set", "run.seed": "default"}
    resolved: dict[str, JSON] = {"run": {"name": "cats", "seed": 0}, "datasets": [{"resolution": [512]}]}
    with RunFolder(tmp_path / "runs/cats", "cats", SavedConfig(b"x", ".yaml", resolved, origins)) as folder:
        folder.emit(DecisionEvent("datasets[cats].in_memory.num_workers", 2, "CPUs this process may use"))
        folder.emit(DecisionEvent("datasets[cats].in_memory.num_workers", 4, "CPUs this process may use"))
        folder.emit(WarningEvent("cache_config.cache_dir", "has no effect"))
        folder.emit(WarningEvent("cache_config.cache_dir", "has no effect"))
        folder.emit_all(SetAsideEvent("cats", f"{n:02}.jpg", "truncated") for n in range(12))
        folder.emit(MeasurementEvent("staged cats", {"files": 1200, "stored_bytes": 3 << 30, "seconds": 1.5}))
    return tmp_path / "runs/cats"


def shown(run: Path) -> str:
    out = io.StringIO()
    print_run(open_run(run).summary(), Console(file=out, width=100))
    return out.getvalue()


def test_it_shows_settings_with_their_origins_but_no_defaults(run: Path) -> None:
    lines = [line.split() for line in shown(run).splitlines()]
    assert ["datasets[0].resolution", "=", "[512]", "--set"] in lines
    assert not any(line[:1] == ["run.seed"] for line in lines)


def test_it_shows_the_latest_decision_with_its_reason_and_earlier_values(run: Path) -> None:
    lines = [line.strip() for line in shown(run).splitlines()]
    at = lines.index("datasets[cats].in_memory.num_workers = 4")
    assert lines[at + 1] == "CPUs this process may use (earlier: 2)"


def test_it_shows_a_warning_once_and_figures_with_units(run: Path) -> None:
    text = shown(run)
    assert text.count("has no effect") == 1
    assert "1,200 files, 3.0 GiB stored, 1.5 s" in text


def test_it_shows_the_first_set_aside_files_and_counts_the_rest(run: Path) -> None:
    text = shown(run)
    assert "set aside: 12 files" in text and "09.jpg: truncated" in text
    assert "and 2 more in set_aside.jsonl" in text and "10.jpg" not in text


def test_a_run_without_events_is_shown_in_two_lines(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "empty", SavedConfig(b"", ".json", {}, {})):
        pass
    assert len(shown(tmp_path / "run").splitlines()) == 2


def test_the_folder_above_runs_is_refused_and_the_runs_in_it_are_listed(run: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no run\.json; there are runs below it: cats"):
        open_run(run.parent)
    assert find_runs(run.parent) == [run] and find_runs(run.parent / "missing") == []


def test_reading_a_run_changes_no_file(run: Path) -> None:
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    shown(run)
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from supertuner.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_the_command_prints_json_for_programs(run: Path) -> None:
    done = command("run", "show", str(run), "--json")
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    assert view["name"] == "cats" and len(view["set_aside"]) == 12 and view["in_use_by"] is None


def test_the_command_refuses_another_folder_without_a_traceback(tmp_path: Path) -> None:
    done = command("run", "show", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.strip() == f"{tmp_path / 'nowhere'} is not a run folder: it has no run.json"


@pytest.mark.parametrize(("file", "content"), [("run.json", "[]"), ("decisions.json", "{}")])
def test_a_damaged_file_is_an_error_that_names_it(run: Path, file: str, content: str) -> None:
    (run / file).write_text(content)
    with pytest.raises(RunFolderError, match=rf"{file} is not a JSON"):
        open_run(run).summary()


def test_held_out_losses_and_samples_have_their_own_format(tmp_path: Path) -> None:
    rows = [HeldOutLoss("model", 0.5, 0.25), HeldOutLoss("model", None, 0.25), HeldOutLoss(None, None, 0.25)]
    with RunFolder(tmp_path / "run", "run", SavedConfig(b"{}", ".json", {}, {})) as folder:
        folder.emit(train_held_out_event(40, rows))
        folder.emit(
            train_samples_event(step=40, folder=tmp_path, grid=tmp_path / "grid.png", video=None, weights="as trained")
        )
    out = io.StringIO()
    print_run(open_run(tmp_path / "run").summary(), Console(file=out, width=300))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert "held-out loss at step 40: 0.2500 (model 0.2500)" in lines
    assert f"samples of step 40: {tmp_path / 'grid.png'}" in lines

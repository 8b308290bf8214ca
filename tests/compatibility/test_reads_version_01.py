"""What version 0.1 wrote is read, checked, used and continued: run folders, checkpoints, staged data, caches, configs.

`version_01` beside this file was made by version 0.1; its README says how. In its text files the folder it was made in
is called PLACE: a copy is put into a temporary folder, and PLACE replaced by that folder's name. Staged data are found
again by names, sizes and times of their source files, so those get the times that they had.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.train.runs import exported_file

DATA = Path(__file__).resolve().parent / "version_01"
PLACE = "/supertuner-version-01"
MODIFIED_S = 1_700_000_000
RUN = ["-m", "supertuner"] if find_spec("supertuner.__main__") else ["-c", "from supertuner.cli import main; main()"]
CLOSE = 1e-5
"""How near numbers come that another type of CPU computed."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of what version 0.1 left, as if it had been made there."""
    folder = tmp_path.resolve() / "version-01"
    shutil.copytree(DATA, folder)
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl") and "checkpoints" not in path.parts:
            path.write_text(path.read_text().replace(PLACE, str(folder)))
    for path in (folder / "pictures").rglob("*.*"):
        os.utime(path, (MODIFIED_S, MODIFIED_S))
    return folder


def supertuner(folder: Path, *arguments: str) -> str:
    """What `supertuner arguments…` prints in a folder; it must end well."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GH200", "SIMPLETUNER", "ACCEL"))}
    paths = os.pathsep.join(path for path in sys.path if path)  # the program that the tests see
    environ = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *RUN, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def as_json(folder: Path, *arguments: str) -> Any:
    return json.loads(supertuner(folder, *arguments, "--json"))


def kept(path: Path) -> Any:
    return json.loads(path.read_text())


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def assert_holds(now: Any, before: Any, where: str = "") -> None:
    """All that was there is there with its value; there may be more."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            assert key in now, f"{where}.{key} is gone"
            assert_holds(now[key], value, f"{where}.{key}")
    elif isinstance(before, list) and isinstance(now, list):
        assert len(now) == len(before), f"{where}: {now} instead of {before}"
        for number, value in enumerate(before):
            assert_holds(now[number], value, f"{where}[{number}]")
    else:
        assert now == before, f"{where}: {now} instead of {before}"


def assert_alike(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Lines of a log agree, numbers but for rounding."""
    assert len(now) == len(before)
    for one, other in zip(now, before, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == (pytest.approx(value, rel=CLOSE) if isinstance(value, float) else value), (key, other)


@pytest.mark.parametrize("name", ["own.yaml", "own.toml", "simpletuner.json", "ai-toolkit.yaml"])
def test_a_configuration_in_any_dialect_means_the_same(place: Path, name: str) -> None:
    shown = as_json(place, "config", "show", f"configs/{name}", "--all", "--no-paths")
    assert_holds(shown["config"], kept(place / "configs" / f"{name}.shown.json")["config"])


def test_staged_data_are_whole_listed_and_used_again(place: Path) -> None:
    (before,) = kept(place / "arena_ls.json")
    (now,) = as_json(place, "arena", "ls", "--home", "arenas")
    for key in ("name", "state", "nbytes", "units", "created", "life", "problem"):
        assert now[key] == before[key]
    assert now["meta"]["fingerprint"] == before["meta"]["fingerprint"]
    for home in ("arenas", "runs/arenas"):
        assert "intact" in supertuner(place, "arena", "verify", "--home", home)
    homes = [place / "arenas", place / "runs" / "arenas"]
    names = [sorted(os.listdir(home)) for home in homes]
    supertuner(place, "stage", "config.json")
    assert [sorted(os.listdir(home)) for home in homes] == names, "nothing was staged anew"


def test_caches_are_whole_and_used_again(place: Path) -> None:
    built = as_json(place, "cache", "build", "config.json")  # also writes the tiny model, which is not kept here
    assert [one["made"] for one in built] == [0] * len(built)
    supertuner(place, "cache", "verify", "config.json")
    now, before = as_json(place, "cache", "ls", "config.json"), kept(place / "cache_ls.json")
    assert now["missing"] == {"latents": 0, "text": 0}
    facts = ("name", "what", "identity", "verdict", "entries", "used")
    assert [[one[key] for key in facts] for one in now["arenas"]] == [
        [one[key] for key in facts] for one in before["arenas"]
    ]


def test_a_run_folder_is_shown(place: Path) -> None:
    now, before = as_json(place, "run", "show", "runs/finished"), kept(place / "run_show.json")
    for key in ("name", "begun", "config_file", "decisions", "warnings", "set_aside", "figures"):
        assert_holds(now[key], before[key], key)
    assert {one["path"]: one["value"] for one in now["settings"]} == {
        one["path"]: one["value"] for one in before["settings"]
    }


def test_checkpoints_are_listed_and_whole(place: Path) -> None:
    assert_holds(as_json(place, "checkpoint", "ls", "runs/finished"), kept(place / "checkpoint_ls.json"))
    assert "32 of 32 keys matched" in supertuner(place, "checkpoint", "verify", "runs/finished")
    assert "intact" in supertuner(place, "checkpoint", "verify", "runs/sharded")


def test_a_stopped_run_goes_on_and_ends_like_one_that_was_not_stopped(place: Path) -> None:
    cached = sorted(os.listdir(place / "cache"))
    supertuner(place, "train", "config.json", "--set", "run.name=stopped")
    stopped, finished = place / "runs" / "stopped", place / "runs" / "finished"
    for log in ("losses.jsonl", "validation.jsonl"):
        assert_alike(rows(stopped / log), rows(finished / log))
    assert (stopped / "losses.jsonl").read_text().startswith((DATA / "runs/stopped/losses.jsonl").read_text())
    for expert in ("high_noise", "low_noise"):
        now = load_file(exported_file(stopped, expert))
        before = load_file(finished / "exports" / f"finished_{expert}.safetensors")
        assert now.keys() == before.keys()
        for name, tensor in before.items():
            assert now[name] == pytest.approx(tensor, rel=1e-3, abs=1e-6), name
    assert sorted(os.listdir(place / "cache")) == cached, "nothing was encoded anew"
    assert len(os.listdir(place / "arenas")) == 2, "nothing was staged anew"


def test_a_finished_run_stays_as_it_is(place: Path) -> None:
    finished = place / "runs" / "finished"
    files = [finished / "losses.jsonl", finished / "validation.jsonl", *(finished / "checkpoints").rglob("*.*")]
    before = {path: path.read_bytes() for path in files}
    supertuner(place, "train", "config.json")
    assert {path: path.read_bytes() for path in files} == before


def test_a_checkpoint_of_two_processes_goes_on_in_one(place: Path) -> None:
    supertuner(place, "train", "sharded.json")
    assert_alike(rows(place / "runs" / "sharded" / "losses.jsonl"), rows(place / "sharded_losses.jsonl"))


def test_a_checkpoint_from_elsewhere_begins_another_run(place: Path) -> None:
    checkpoint = shutil.copytree(place / "runs" / "stopped" / "checkpoints" / "step-00000003", place / "carried")
    supertuner(place, "train", "config.json", "--set", "run.name=moved", "--resume", str(checkpoint))
    assert_alike(
        rows(place / "runs" / "moved" / "losses.jsonl"), rows(place / "runs" / "finished" / "losses.jsonl")[3:]
    )


def test_an_exported_adapter_is_understood(place: Path) -> None:
    told = supertuner(place, "adapter", "inspect", "runs/finished/exports/finished_high_noise.safetensors")
    assert "32 of 32 matched" in told and "high_noise" in told


def without_wording(value: Any) -> Any:
    """A forecast without its sentences, which may be reworded: reasons and notes."""
    if isinstance(value, dict):
        return {key: without_wording(inner) for key, inner in value.items() if key not in ("reasons", "notes")}
    return [without_wording(inner) for inner in value] if isinstance(value, list) else value


def test_old_traces_do_not_change_a_forecast(place: Path) -> None:
    sets = ["--set", "forecast.before_training=never", "--set", "model.experts=low_noise"]
    now = as_json(place, "estimate", "config.json", "--machine", "gh200-96", *sets)
    before = kept(place / "estimate.json")
    # Version 0.1 neither forecast the loading of weights nor judged a planned step by what the allocator reserves.
    now["phases"] = [phase for phase in now["phases"] if phase["name"] != "load"]
    for phase in now["phases"]:
        phase["gpu_peak_bytes"] = phase["gpu_peak"]["allocated" if phase["plan"] else "reserved"]
    for key in ("fits", "judged", "phases", "total_s"):
        assert_holds(without_wording(now[key]), without_wording(before[key]), key)


def test_a_baseline_is_listed_and_compared(place: Path) -> None:
    assert "example" in supertuner(place, "baseline", "ls")
    assert "identical" in supertuner(place, "baseline", "compare", "example", "example")

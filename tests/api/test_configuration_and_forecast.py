"""`load_config`, `estimate` and `plan`: sources of a configuration, results as data, errors of the tree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import supertuner as st
from supertuner.core.errors import ConfigError, OptionError
from tests.train.runs import pictures


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    data = pictures(tmp_path / "data", 4)
    return {
        "run": {"name": "run", "output_dir": str(tmp_path / "runs")},
        "model": {"family": "wan2.2", "path": "tiny"},
        "datasets": [{"id": "squares", "instance_data_dir": str(data), "resolution": 32, "bucket_step": 16}],
        "train": {"batch_size": 2, "max_steps": 4, "mixed_precision": "fp32"},
        "adapter": {"rank": 2},
    }


def test_a_mapping_and_a_file_give_the_same_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(settings))
    assert st.load_config(settings).config == st.load_config(file).config == st.load_config(str(file)).config


def test_overrides_win_and_say_so(settings: dict[str, Any]) -> None:
    config = st.load_config(settings, overrides={"train.batch_size": 3, "datasets[0].repeats": 2})
    assert config.config.train.batch_size == 3 and config.config.datasets[0].repeats == 2
    assert config.origins["train.batch_size"] == "code"
    assert config.origins["train.max_steps"] == "the settings given"


def test_a_configuration_is_written_under_own_names(settings: dict[str, Any], tmp_path: Path) -> None:
    config = st.load_config({**settings, "train": {}, "train_batch_size": 2, "max_train_steps": 4})
    (tmp_path / "run.yaml").write_text(st.render_config(config, "yaml", folder=tmp_path))
    written = st.load_config(tmp_path / "run.yaml")
    assert written.config == config.config and "train_batch_size" not in (tmp_path / "run.yaml").read_text()


def test_all_problems_of_a_mapping_are_reported(settings: dict[str, Any]) -> None:
    settings["train"]["bach_size"] = 2
    with pytest.raises(ConfigError) as caught:
        st.load_config(settings, overrides={"train.max_steps": -1})
    assert {problem.path for problem in caught.value.problems} == {"train.bach_size", "train.max_steps"}


def test_a_value_that_json_does_not_have_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_size: .* is a set"):
        st.load_config({**settings, "train": {"batch_size": {2}}})


def test_missing_data_are_reported_when_they_are_needed(settings: dict[str, Any], tmp_path: Path) -> None:
    config = st.load_config(settings, overrides={"datasets[0].instance_data_dir": str(tmp_path / "nowhere")})
    assert [problem.path for problem in config.path_problems] == ["datasets[0].instance_data_dir"]
    for needs_data in (st.train, st.data.open):
        with pytest.raises(ConfigError, match=r"instance_data_dir: .* is not a folder"):
            needs_data(config)
    assert not (tmp_path / "runs").exists()


def test_a_forecast_is_frozen_data(settings: dict[str, Any]) -> None:
    forecast = st.estimate(st.load_config(settings), machine="gh200-96", advise=False)
    assert forecast.fits is True
    assert 0 < forecast.peak_bytes < 2**30
    assert forecast.step_seconds is not None and forecast.step_seconds > 0
    assert [phase.name for phase in forecast.phases if phase.name.startswith("train ")] == [
        "train high_noise",
        "train low_noise",
    ]
    assert json.loads(json.dumps(forecast.to_dict()))["fits"] is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        forecast.model = "another"  # type: ignore[misc]


def test_a_plan_for_each_training_phase(settings: dict[str, Any]) -> None:
    plan = st.plan(st.load_config(settings), machine="rtx-4090")
    assert plan.fits is True and set(plan.phases) == {"train high_noise", "train low_noise"}
    shown = json.loads(json.dumps(plan.to_dict()))
    assert shown["modelled"] is True and shown["phases"]["train high_noise"]["blocks"]


@pytest.mark.parametrize("function", [st.estimate, st.plan])
def test_an_unknown_machine_is_refused_before_anything_is_traced(function: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="not a known machine"):
        function(st.load_config(settings), machine="gh300")

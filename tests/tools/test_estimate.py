"""`supertuner estimate` on tiny models: from a configuration to text, JSON and a picture, without starting a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.cli.estimate import MACHINE_NAMES
from supertuner.config.sources.load import load_config
from supertuner.core.errors import ConfigError, ModelError, OptionError
from supertuner.core.host import HostFacts
from supertuner.memory.machines import MACHINES
from supertuner.plan.forecast.forecast import estimate_run, plan_run
from supertuner.plan.forecast.results import RunForecast
from supertuner.plan.forecast.target_machine import find_machine_capacity
from supertuner.plan.placement.run_plans import RunPlanner
from supertuner.sinks.console import ConsoleSink
from supertuner.tools.estimate import (
    EstimateRequest,
    EstimateResult,
    estimate_json,
    estimate_lines,
    estimate_png,
    require_plot_path,
    run_estimate,
    write_plot,
)
from tests.train.runs import config as a_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests share its traces, so that most of them trace nothing."""
    return tmp_path_factory.mktemp("estimates")


def estimate(folder: Path, *sets: str, what_ifs: tuple[str, ...] = (), **more: Any) -> EstimateResult:
    file = folder / "run.json"
    if not file.exists():
        a_run(folder, "run", train={"mixed_precision": "bf16", "batch_size": 2, "max_steps": 12})
    with ConsoleSink() as console:
        return run_estimate(EstimateRequest(file, sets, what_ifs=what_ifs, **more), console)


def live_training_bytes(forecast: RunForecast) -> int:
    """The peak of live bytes on the GPU over the training phases, without the allocator's rounding."""
    return max(sum(phase.gpu.values()) for phase in forecast.phases if phase.name.startswith("train "))


def test_a_run_with_two_experts_has_a_training_phase_for_each(folder: Path) -> None:
    result = estimate(folder, machine="gh200-96")
    names = [phase.name for phase in result.forecast.phases]
    assert names == ["encode text", "encode media", "load", "train high_noise", "train low_noise", "sample"]
    assert result.fits
    train = result.forecast.phases[3]
    assert {"frozen weights", "idle experts", "trained weights", "optimizer state", "activations"} <= train.gpu.keys()
    assert train.reserved_bytes is not None and train.reserved_bytes >= sum(train.gpu.values())


def test_the_time_of_the_run_includes_the_ramp_and_the_samples(folder: Path) -> None:
    timing = estimate(folder, machine="gh200-96").forecast.timing
    assert timing is not None and timing.steps == 12 and timing.first_window == 1 and timing.window == 4
    at_peak, slower = timing.paces
    assert (at_peak.compute_share, slower.compute_share) == (1.0, 0.4)
    assert at_peak.total_s is not None and slower.total_s == pytest.approx(at_peak.total_s / 0.4, rel=0.01)
    assert at_peak.training_s and at_peak.encoding_s and at_peak.sampling_s
    other = estimate(folder, machine="gh200-96", compute_share=0.5).forecast.timing
    assert other is not None and other.paces[1].step_s == pytest.approx(at_peak.step_s / 0.5, rel=0.01)


def test_a_note_says_that_sharded_weights_are_not_forecast(folder: Path) -> None:
    plain, sharded = (estimate(folder, *sets, machine="gh200-96") for sets in ((), ("parallel.strategy=fsdp",)))
    note = 'all figures are for one process that holds all weights; parallel.strategy "fsdp" is not forecast'
    assert set(sharded.forecast.notes) - set(plain.forecast.notes) == {note}
    assert any(note in line for line in estimate_lines(sharded))


def test_a_second_estimate_traces_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate(folder, machine="gh200-96")
    capsys.readouterr()
    estimate(folder, machine="a100-80")
    assert "tracing" not in capsys.readouterr().err


def test_each_what_if_value_is_in_table_json_and_picture_and_a_larger_batch_needs_more(
    folder: Path, tmp_path: Path
) -> None:
    result = estimate(folder, machine="gh200-96", what_ifs=("train.batch_size=1,2,8",), plot=True)
    (what_if,) = result.what_ifs
    assert [(one.value, one.current) for one in what_if.results] == [("1", False), ("2", True), ("8", False)]
    peaks = [live_training_bytes(one.forecast) for one in what_if.results]
    assert peaks == sorted(peaks) and peaks[0] < peaks[2]
    text = "\n".join(estimate_lines(result))
    assert "what if train.batch_size were" in text and "2 (as configured)" in text
    assert [one["value"] for one in estimate_json(result)["what_if"][0]["tried"]] == ["1", "2", "8"]  # type: ignore[index, call-overload]
    write_plot(result, tmp_path / "p.png")
    drawn = np.asarray(Image.open(tmp_path / "p.png").convert("RGB"))
    assert drawn.shape == (640 + 520, 1280, 3)
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 50


def test_equal_forecasts_give_equal_pictures(folder: Path) -> None:
    one, two = (estimate_png(estimate(folder, machine="gh200-96", plot=True)) for _ in range(2))
    assert one == two


def test_a_machine_without_known_rates_has_memory_but_no_times(folder: Path) -> None:
    forecast = estimate(folder, machine="this").forecast
    assert forecast.capacity.on_cpu and forecast.timing is None and "is not known" in forecast.why_no_timing
    assert forecast.verdict.where == "host memory"
    assert all(phase.reserved_bytes is None for phase in forecast.phases)


def test_checkpointing_needs_less_memory_and_more_time_unless_a_plan_is_followed(folder: Path) -> None:
    def estimate_with(checkpointing: str, act: str) -> EstimateResult:
        return estimate(folder, f"train.gradient_checkpointing={checkpointing}", f"plan.act={act}", machine="gh200-96")

    def step_s(result: EstimateResult) -> float:
        assert result.forecast.timing is not None
        return result.forecast.timing.paces[0].step_s

    plain, again = estimate_with("false", "never"), estimate_with("true", "never")
    assert live_training_bytes(again.forecast) < live_training_bytes(plain.forecast)
    assert step_s(again) > 1.2 * step_s(plain)
    faster = {change.what for change in again.forecast.changes}
    assert faster == {"train.gradient_checkpointing=false", "plan.act=auto"}
    assert step_s(estimate_with("true", "auto")) == pytest.approx(step_s(plain)), (
        "everything fits, so the plan recomputes nothing"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"machine": "gh300"}, "one of gh200-96"),
        ({"what_ifs": ("train.batch_size",)}, "write key=value,value"),
        ({"what_ifs": ("train.batch_size=1,,2",)}, "a value is missing"),
    ],
)
def test_a_wrong_option_raises_an_error_that_explains_it(folder: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        estimate(folder, **wrong)


def test_a_what_if_with_an_unknown_key_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="batch_siz"):
        estimate(folder, machine="gh200-96", what_ifs=("train.batch_siz=1,2",))


def test_a_shape_that_training_refuses_is_refused_by_the_estimate(folder: Path) -> None:
    with pytest.raises(ModelError, match="change bucket_step"):
        estimate(folder, "datasets[0].bucket_step=20", "datasets[0].resolution=20", machine="gh200-96")


def test_a_picture_path_that_cannot_be_written_is_refused_before_the_forecast(tmp_path: Path) -> None:
    for name in ("p.jpg", "no/folder/p.png"):
        with pytest.raises(OptionError, match="--plot"):
            require_plot_path(tmp_path / name)


def test_the_command_prints_json_and_writes_only_traces(folder: Path) -> None:
    estimate(folder, machine="gh200-96")
    before = {path.relative_to(folder) for path in folder.rglob("*") if ".traces" not in path.parts}
    done = CliRunner().invoke(
        app, ["estimate", str(folder / "run.json"), "--machine", "gh200-96", "--json", "--require-fit"]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["modelled"] is True and document["fits"] is True and len(document["phases"]) == 6
    assert {path.relative_to(folder) for path in folder.rglob("*") if ".traces" not in path.parts} == before


def test_the_help_names_every_machine() -> None:
    assert MACHINE_NAMES.split(", ") == [name for name in MACHINES if name != "cpu"]


def test_only_a_run_that_follows_plans_gets_a_planner(folder: Path) -> None:
    def planner_of(machine: str, *sets: str) -> RunPlanner | None:
        estimate(folder, machine="gh200-96")  # writes the configuration
        config = load_config(folder / "run.json", sets=sets, check_paths=False).config
        return estimate_run(config, find_machine_capacity(machine, HostFacts())).planner

    planner = planner_of("gh200-96")
    assert planner is not None and planner.searched_plans.keys() == planner.tables.keys() == {"high_noise", "low_noise"}
    assert all(plan.fits for plan in planner.searched_plans.values())
    assert planner_of("gh200-96", "plan.act=never") is None
    assert planner_of("this") is None, "without a GPU there is nothing to place"


def test_the_forecast_follows_the_plan_settings(folder: Path) -> None:
    default = estimate(folder, machine="gh200-96").forecast
    streamed = estimate(folder, "plan.weights=streamed", "plan.idle_experts=host", machine="gh200-96").forecast
    plan = streamed.plans["train high_noise"]
    assert plan.fits and plan.idle_at_home and plan.modelled is not None
    assert any(block.weights == "streamed" for block in plan.blocks)
    assert streamed.phases[3].host_bytes > default.phases[2].host_bytes


def test_the_whole_api_of_an_estimate_is_one_call(folder: Path) -> None:
    estimate(folder, machine="gh200-96")
    config = load_config(folder / "run.json").config
    forecast = estimate_run(config, find_machine_capacity("gh200-96", HostFacts())).forecast
    assert (
        forecast.fits is True
        and forecast.step_seconds
        and forecast.peak_bytes == max(phase.gpu_bytes for phase in forecast.phases)
    )
    assert json.loads(json.dumps(forecast.to_dict()))["fits"] is True
    plans = plan_run(config, find_machine_capacity("gh200-96", HostFacts()))
    assert plans == forecast.plans and plans.keys() == {"train high_noise", "train low_noise"}

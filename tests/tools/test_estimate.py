"""`supertuner estimate` on tiny models: from a configuration to a page, JSON and a picture, and nothing is begun."""

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
from supertuner.core.errors import ConfigError, ModelError, OptionError
from supertuner.memory.machines import MACHINES
from supertuner.sinks.console import ConsoleSink
from supertuner.tools.estimate import (
    EstimateRequest,
    EstimateResult,
    draw_result,
    estimate_json,
    estimate_lines,
    require_plot_path,
    run_estimate,
    write_plot,
)
from tests.train.runs import config as a_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces are kept in it, so that most tests only look at them."""
    return tmp_path_factory.mktemp("estimates")


def asked(folder: Path, *sets: str, what_ifs: tuple[str, ...] = (), **more: Any) -> EstimateResult:
    file = folder / "run.json"
    if not file.exists():
        a_run(folder, "run", train={"mixed_precision": "bf16", "batch_size": 2, "max_steps": 12})
    with ConsoleSink() as console:
        return run_estimate(EstimateRequest(file, sets, what_ifs=what_ifs, **more), console)


def test_a_run_of_two_experts_has_all_its_phases(folder: Path) -> None:
    found = asked(folder, machine="gh200-96")
    names = [phase.name for phase in found.forecast.phases]
    assert names == ["encode text", "encode media", "train high_noise", "train low_noise", "sample"]
    assert found.fits
    train = found.forecast.phases[2]
    assert {"frozen weights", "idle experts", "trained weights", "optimizer state", "activations"} <= train.gpu.keys()
    assert train.reserved_bytes is not None and train.reserved_bytes >= sum(train.gpu.values())


def test_the_ramp_and_the_samples_are_in_the_time_of_the_run(folder: Path) -> None:
    timing = asked(folder, machine="gh200-96").forecast.timing
    assert timing is not None and timing.steps == 12 and timing.first_window == 1 and timing.window == 4
    least, slower = timing.paces
    assert (least.compute_share, slower.compute_share) == (1.0, 0.4)
    assert least.total_s is not None and slower.total_s == pytest.approx(least.total_s / 0.4, rel=0.01)
    assert least.training_s and least.encoding_s and least.sampling_s
    other = asked(folder, machine="gh200-96", compute_share=0.5).forecast.timing
    assert other is not None and other.paces[1].step_s == pytest.approx(least.step_s / 0.5, rel=0.01)


def test_weights_that_are_shared_out_are_said_not_to_be_forecast(folder: Path) -> None:
    plain, shared = (asked(folder, *sets, machine="gh200-96") for sets in ((), ("parallel.strategy=fsdp",)))
    words = 'all of it is of one process that has all weights; parallel.strategy "fsdp" is not forecast'
    assert set(shared.forecast.notes) - set(plain.forecast.notes) == {words}
    assert any(words in line for line in estimate_lines(shared))


def test_a_second_look_traces_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(folder, machine="gh200-96")
    capsys.readouterr()
    asked(folder, machine="a100-80")
    assert "tracing" not in capsys.readouterr().err


def test_a_larger_batch_needs_more_and_every_value_is_in_table_picture_and_json(folder: Path, tmp_path: Path) -> None:
    found = asked(folder, machine="gh200-96", what_ifs=("train.batch_size=1,2,8",))
    (what_if,) = found.what_ifs
    assert [(one.value, one.current) for one in what_if.results] == [("1", False), ("2", True), ("8", False)]
    peaks = [one.estimate.fullest_expert().trace.peak()[0] for one in what_if.results]
    assert peaks == sorted(peaks) and peaks[0] < peaks[2]
    text = "\n".join(estimate_lines(found))
    assert "what if train.batch_size were" in text and "2 (as now)" in text
    assert [one["value"] for one in estimate_json(found)["what_if"][0]["tried"]] == ["1", "2", "8"]  # type: ignore[index, call-overload]
    write_plot(found, tmp_path / "p.png")
    drawn = np.asarray(Image.open(tmp_path / "p.png"))
    assert drawn.shape == (640 + 520, 1280, 3)
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 50


def test_the_same_forecast_gives_the_same_picture(folder: Path) -> None:
    one, two = (draw_result(asked(folder, machine="gh200-96")).tobytes() for _ in range(2))
    assert one == two


def test_a_machine_without_figures_has_memory_and_no_time(folder: Path) -> None:
    forecast = asked(folder, machine="this").forecast
    assert forecast.capacity.on_cpu and forecast.timing is None and "is not known" in forecast.why_no_timing
    assert forecast.verdict.where == "host memory"
    assert all(phase.reserved_bytes is None for phase in forecast.phases)


def test_checkpointing_needs_less_and_takes_longer_unless_a_plan_is_followed(folder: Path) -> None:
    def asked_for(checkpointing: str, act: str) -> EstimateResult:
        return asked(folder, f"train.gradient_checkpointing={checkpointing}", f"plan.act={act}", machine="gh200-96")

    def step_s(found: EstimateResult) -> float:
        assert found.forecast.timing is not None
        return found.forecast.timing.paces[0].step_s

    plain, again = asked_for("false", "never"), asked_for("true", "never")
    assert again.estimate.fullest_expert().trace.peak()[0] < plain.estimate.fullest_expert().trace.peak()[0]
    assert step_s(again) > 1.2 * step_s(plain)
    faster = {change.what for change in again.forecast.changes}
    assert faster == {"train.gradient_checkpointing=false", "plan.act=auto"}
    assert step_s(asked_for("true", "auto")) == pytest.approx(step_s(plain)), "there is room to keep everything"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"machine": "gh300"}, "there are gh200-96"),
        ({"what_ifs": ("train.batch_size",)}, "write key=value,value"),
        ({"what_ifs": ("train.batch_size=1,,2",)}, "a value is missing"),
    ],
)
def test_a_wrong_option_is_refused_in_words(folder: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        asked(folder, **wrong)


def test_a_wrong_what_if_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="batch_siz"):
        asked(folder, machine="gh200-96", what_ifs=("train.batch_siz=1,2",))


def test_a_shape_that_training_would_refuse_is_refused_here(folder: Path) -> None:
    with pytest.raises(ModelError, match="change bucket_step"):
        asked(folder, "datasets[0].bucket_step=20", "datasets[0].resolution=20", machine="gh200-96")


def test_a_picture_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    for name in ("p.jpg", "no/folder/p.png"):
        with pytest.raises(OptionError, match="--plot"):
            require_plot_path(tmp_path / name)


def test_the_command_prints_json_and_begins_nothing(folder: Path) -> None:
    asked(folder, machine="gh200-96")
    before = {path.relative_to(folder) for path in folder.rglob("*") if ".traces" not in path.parts}
    done = CliRunner().invoke(
        app, ["estimate", str(folder / "run.json"), "--machine", "gh200-96", "--json", "--require-fit"]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["modelled"] is True and document["fits"] is True and len(document["phases"]) == 5
    assert {path.relative_to(folder) for path in folder.rglob("*") if ".traces" not in path.parts} == before


def test_the_help_names_every_machine() -> None:
    assert MACHINE_NAMES.split(", ") == [name for name in MACHINES if name != "cpu"]


def test_a_run_on_a_gpu_is_given_its_plans_and_one_that_follows_none_is_not(folder: Path) -> None:
    planning = asked(folder, machine="gh200-96").estimate.planner
    assert planning is not None and planning.plans.keys() == planning.tables.keys() == {"high_noise", "low_noise"}
    assert all(plan.fits for plan in planning.plans.values())
    assert asked(folder, "plan.act=never", machine="gh200-96").estimate.planner is None
    assert asked(folder, machine="this").estimate.planner is None, "there is no second memory"


def test_what_the_plan_settings_ask_for_is_what_is_forecast(folder: Path) -> None:
    usual = asked(folder, machine="gh200-96").forecast
    streamed = asked(folder, "plan.weights=streamed", "plan.idle_experts=host", machine="gh200-96").forecast
    plan = streamed.plans["train high_noise"]
    assert plan.fits and plan.idle_at_home and plan.modelled is not None
    assert any(block.weights == "streamed" for block in plan.blocks)
    assert streamed.phases[2].host_bytes > usual.phases[2].host_bytes

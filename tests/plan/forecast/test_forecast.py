"""The verdict of a forecast over all phases and memories, its one-line summary, its page and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from supertuner.core.types import GIB
from supertuner.plan.forecast.report import report_lines
from supertuner.plan.forecast.results import FitStatus, PhaseForecast, RunTiming, TimingScenario, verdict_text
from supertuner.plan.forecast.storage import StorageItem
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.plan import MemoryPlan, OptimizerPlacement, PlanEstimate
from supertuner.plan.placement.throughput import MemoryLimits
from tests.plan.making_forecasts import a_capacity, a_forecast, a_phase, a_table


def test_the_summary_of_a_run_that_fits_has_the_spare_memory_and_the_times() -> None:
    line = verdict_text(a_forecast(a_phase("train high_noise", 62.0)))
    assert line.startswith("modelled: fits GH200 96 GB: train high_noise needs 62.0 GiB of 96.0 GiB GPU memory")
    assert "34.0 GiB to spare" in line
    assert "a step takes at least 20 s, the run at least 11.3 h" in line


def test_the_summary_of_a_run_that_does_not_fit_has_the_missing_memory() -> None:
    forecast = a_forecast(a_phase("encode text", 11.0), a_phase("train model", 258.0))
    assert forecast.verdict.fit is FitStatus.DOES_NOT_FIT
    assert (
        "does not fit GH200 96 GB: train model needs 258 GiB of 96.0 GiB GPU memory, 162 GiB too much"
        in verdict_text(forecast)
    )


def test_above_95_percent_of_the_memory_a_run_fits_tightly() -> None:
    forecast = a_forecast(a_phase(gpu_gib=94.0))
    assert forecast.verdict.fit is FitStatus.TIGHT
    assert "tightly" in verdict_text(forecast)


def test_the_memory_that_the_allocator_reserves_must_fit() -> None:
    phase = a_phase(gpu_gib=90.0)
    reserved = type(phase)(phase.name, phase.gpu, int(97 * GIB))
    assert a_forecast(reserved).verdict.fit is FitStatus.DOES_NOT_FIT


def test_a_run_can_exceed_host_memory() -> None:
    stored = (StorageItem("datasets[clips], staged", "memory", 500 * GIB, "files"),)
    verdict = a_forecast(a_phase(gpu_gib=20.0), stored=stored).verdict
    assert (verdict.fit, verdict.where) == (FitStatus.DOES_NOT_FIT, "host memory")


def test_on_a_one_pool_machine_gpu_and_host_memory_are_added() -> None:
    capacity = a_capacity("gb10")
    stored = (StorageItem("datasets[clips], staged", "memory", 70 * GIB, "files"),)
    assert a_forecast(a_phase(gpu_gib=60.0), capacity=capacity).verdict.fit is FitStatus.FITS
    verdict = a_forecast(a_phase(gpu_gib=60.0), capacity=capacity, stored=stored).verdict
    assert (verdict.fit, verdict.where, verdict.need_bytes) == (FitStatus.DOES_NOT_FIT, "the pool", 130 * GIB)


def test_a_card_with_an_unknown_host_is_judged_by_its_own_memory() -> None:
    card = a_capacity("rtx-4090")
    assert a_forecast(a_phase(gpu_gib=20.0), capacity=card).verdict.fit is FitStatus.FITS
    assert a_forecast(a_phase(gpu_gib=30.0), capacity=card).verdict.fit is FitStatus.DOES_NOT_FIT


def test_without_a_gpu_everything_is_in_host_memory() -> None:
    cpu = a_capacity("cpu", host_gib=32)
    verdict = a_forecast(a_phase(gpu_gib=20.0), capacity=cpu).verdict
    assert (verdict.fit, verdict.where, verdict.need_bytes) == (FitStatus.FITS, "host memory", 21 * GIB)
    assert a_forecast(a_phase(gpu_gib=20.0), capacity=a_capacity("cpu")).verdict.fit is FitStatus.UNKNOWN


def test_the_page_has_every_phase_and_class_and_says_that_all_is_modelled() -> None:
    text = "\n".join(
        report_lines(a_forecast(a_phase("encode media", 9.0, certain=False), a_phase("train model", 40.0)))
    )
    for words in ("encode media *", "train model", "frozen", "activations", "cache of latents", "modelled throughout"):
        assert words in text
    assert "gradients" not in text, "a class that occurs in no phase has no column"


def test_an_unknown_size_makes_the_total_a_lower_limit() -> None:
    stored = (
        StorageItem("datasets[cats], staged", "memory", None, "not there: give its size with --samples N"),
        StorageItem("prefetched batches", "memory", GIB, "3 micro-batches"),
    )
    text = "\n".join(report_lines(a_forecast(stored=stored)))
    assert "not known" in text and "at least 1.0 GiB" in text and "--samples N" in text


def test_times_are_given_at_peak_rates_and_at_a_share_of_them() -> None:
    paces = (
        TimingScenario(1.0, 20.0, 18.0, "compute", None, None, None),
        TimingScenario(0.4, 50.0, 45.0, "compute", None, None, None),
    )
    timing = RunTiming(paces, 4, 4, 4, None, None, left_out=("the length of the run: give --samples N",))
    text = "\n".join(report_lines(a_forecast(timing=timing)))
    assert "at peak rates" in text and "at 40% of peak" in text
    assert "not included: the length of the run: give --samples N" in text
    assert "training:" not in text


def a_planned_phase(live_gib: int, reserved_gib: int) -> PhaseForecast:
    modelled = PlanEstimate(1.0, 1.0, "compute", live_gib * GIB, 0, reserved_gib * GIB)
    plan = MemoryPlan("train model", "gh200-96", True, (), 1, OptimizerPlacement.GPU, True, modelled)
    return replace(a_phase(gpu_gib=120), reserved_bytes=130 * GIB, plan=plan)


def test_a_planned_step_whose_live_bytes_fit_and_reserved_bytes_do_not_does_not_fit() -> None:
    assert a_forecast(a_planned_phase(92, 97)).verdict.fit is FitStatus.DOES_NOT_FIT
    assert a_forecast(a_planned_phase(88, 93)).verdict.fit is FitStatus.TIGHT
    assert a_forecast(a_planned_phase(85, 90)).verdict.fit is FitStatus.FITS


def test_both_counts_of_the_allocator_are_shown() -> None:
    forecast = a_forecast(a_phase("encode text", 10), a_planned_phase(85, 90))
    first, planned = json.loads(json.dumps(forecast.to_dict()))["phases"]
    assert first["gpu_peak"] == {"allocated": 10 * GIB, "reserved": None}
    assert planned["gpu_peak"] == {"allocated": 85 * GIB, "reserved": 90 * GIB}
    assert planned["gpu_peak_bytes"] == 90 * GIB
    assert ["by", "its", "plan", "85.0", "90.0"] in [line.split() for line in report_lines(forecast)]


def test_encoders_that_stay_on_the_gpu_count_beside_the_plan() -> None:
    phase = a_planned_phase(85, 90)
    phase = replace(phase, gpu={**phase.gpu, "encoders": 5 * GIB})
    assert (phase.allocated_bytes, phase.gpu_bytes) == (90 * GIB, 95 * GIB)


def test_to_dict_has_everything_as_json_values() -> None:
    document = json.loads(json.dumps(a_forecast().to_dict()))
    assert document["modelled"] is True and document["fits"] is True
    assert document["judged"]["spare_bytes"] == 56 * GIB
    assert document["phases"][0]["gpu"]["activations"] == 10 * GIB
    assert document["timing"]["paces"][0]["step_s"] == 20.0
    assert document["total_s"] == pytest.approx(40_600)


def test_the_infinite_time_of_a_plan_that_does_not_fit_becomes_json() -> None:
    table = a_table(saved=400)
    plan = make_plan(table, a_capacity().machine, MemoryLimits(GIB, GIB))
    assert not plan.fits
    text = json.dumps(a_forecast(plans={"train model": plan}).to_dict(), allow_nan=False)
    assert json.loads(text)["plans"]["train model"]["fits"] is False


def test_the_verdict_uses_the_memory_of_the_plan_that_is_followed() -> None:
    table = a_table(saved=30)
    plan = make_plan(table, a_capacity().machine)
    assert plan.fits and plan.modelled is not None and not plan.keeps_all_on_gpu
    forecast = a_forecast(a_phase("train model", 150.0, plan=plan), plans={"train model": plan})
    assert forecast.verdict.fit is not FitStatus.DOES_NOT_FIT
    assert forecast.phases[0].host_bytes == plan.modelled.host_peak_bytes
    text = "\n".join(report_lines(forecast))
    assert "by its plan" in text and "by the plan that the run follows" in text

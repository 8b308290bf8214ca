"""A forecast judges every phase in every memory, and says in one line what a person must know."""

from __future__ import annotations

import json

import pytest

from supertuner.core.types import GIB
from supertuner.plan.forecast.report import report_lines
from supertuner.plan.forecast.results import FitStatus, RunTiming, TimingScenario, verdict_text
from supertuner.plan.forecast.storage import StorageItem
from supertuner.plan.placement.plan_step import plan_step
from supertuner.plan.placement.throughput import MemoryLimits
from tests.plan.making_forecasts import a_capacity, a_forecast, a_phase, a_table


def test_a_run_that_fits_says_by_how_much_and_how_long_it_takes() -> None:
    line = verdict_text(a_forecast(a_phase("train high_noise", 62.0)))
    assert line.startswith("modelled: fits GH200 96 GB: train high_noise needs 62.0 GiB of 96.0 GiB GPU memory")
    assert "34.0 GiB to spare" in line
    assert "a step takes at least 20 s, the run at least 11.3 h" in line


def test_a_run_that_does_not_fit_says_what_is_missing() -> None:
    forecast = a_forecast(a_phase("encode text", 11.0), a_phase("train model", 258.0))
    assert forecast.verdict.fit is FitStatus.DOES_NOT_FIT
    assert (
        "does not fit GH200 96 GB: train model needs 258 GiB of 96.0 GiB GPU memory, 162 GiB too much"
        in verdict_text(forecast)
    )


def test_nearly_full_is_called_tight() -> None:
    forecast = a_forecast(a_phase(gpu_gib=94.0))
    assert forecast.verdict.fit is FitStatus.TIGHT
    assert "tightly" in verdict_text(forecast)


def test_what_the_allocator_reserves_is_what_must_fit() -> None:
    phase = a_phase(gpu_gib=90.0)
    reserved = type(phase)(phase.name, phase.gpu, int(97 * GIB))
    assert a_forecast(reserved).verdict.fit is FitStatus.DOES_NOT_FIT


def test_host_memory_can_be_what_does_not_fit() -> None:
    stored = (StorageItem("datasets[clips], staged", "memory", 500 * GIB, "files"),)
    judged = a_forecast(a_phase(gpu_gib=20.0), stored=stored).verdict
    assert (judged.fit, judged.where) == (FitStatus.DOES_NOT_FIT, "host memory")


def test_on_one_pool_everything_is_counted_together() -> None:
    room = a_capacity("gb10")
    stored = (StorageItem("datasets[clips], staged", "memory", 70 * GIB, "files"),)
    assert a_forecast(a_phase(gpu_gib=60.0), capacity=room).verdict.fit is FitStatus.FITS
    judged = a_forecast(a_phase(gpu_gib=60.0), capacity=room, stored=stored).verdict
    assert (judged.fit, judged.where, judged.need_bytes) == (FitStatus.DOES_NOT_FIT, "the pool", 130 * GIB)


def test_a_card_whose_host_nobody_knows_is_judged_by_its_own_memory() -> None:
    room = a_capacity("rtx-4090")
    assert a_forecast(a_phase(gpu_gib=20.0), capacity=room).verdict.fit is FitStatus.FITS
    assert a_forecast(a_phase(gpu_gib=30.0), capacity=room).verdict.fit is FitStatus.DOES_NOT_FIT


def test_without_a_gpu_everything_is_in_host_memory() -> None:
    room = a_capacity("cpu", host_gib=32)
    judged = a_forecast(a_phase(gpu_gib=20.0), capacity=room).verdict
    assert (judged.fit, judged.where, judged.need_bytes) == (FitStatus.FITS, "host memory", 21 * GIB)
    assert a_forecast(a_phase(gpu_gib=20.0), capacity=a_capacity("cpu")).verdict.fit is FitStatus.UNKNOWN


def test_the_page_names_every_phase_and_class_and_says_that_it_is_modelled() -> None:
    text = "\n".join(
        report_lines(a_forecast(a_phase("encode media", 9.0, certain=False), a_phase("train model", 40.0)))
    )
    for words in ("encode media *", "train model", "frozen", "activations", "cache of latents", "modelled throughout"):
        assert words in text
    assert "gradients" not in text, "a class that no phase has takes no column"


def test_a_size_that_is_not_known_is_not_counted_as_nothing() -> None:
    stored = (
        StorageItem("datasets[cats], staged", "memory", None, "not there: say --samples N"),
        StorageItem("batches on their way", "memory", GIB, "3 micro-batches"),
    )
    text = "\n".join(report_lines(a_forecast(stored=stored)))
    assert "not known" in text and "at least 1.0 GiB" in text and "say --samples N" in text


def test_times_are_given_at_the_peaks_and_at_a_share_of_them() -> None:
    paces = (
        TimingScenario(1.0, 20.0, 18.0, "compute", None, None, None),
        TimingScenario(0.4, 50.0, 45.0, "compute", None, None, None),
    )
    timing = RunTiming(paces, 4, 4, 4, None, None, left_out=("how long the run is: say --samples N",))
    text = "\n".join(report_lines(a_forecast(timing=timing)))
    assert "at the peaks" in text and "at 40% of them" in text
    assert "not in it: how long the run is: say --samples N" in text
    assert "training:" not in text


def test_programs_get_everything_as_json() -> None:
    document = json.loads(json.dumps(a_forecast().to_dict()))
    assert document["modelled"] is True and document["fits"] is True
    assert document["judged"]["spare_bytes"] == 56 * GIB
    assert document["phases"][0]["gpu"]["activations"] == 10 * GIB
    assert document["timing"]["paces"][0]["step_s"] == 20.0
    assert document["total_s"] == pytest.approx(40_600)


def test_a_plan_that_does_not_fit_is_json_all_the_same() -> None:
    table = a_table(saved=400)
    plan = plan_step(table, a_capacity().machine, MemoryLimits(GIB, GIB))
    assert not plan.fits
    text = json.dumps(a_forecast(plans={"train model": plan}).to_dict(), allow_nan=False)
    assert json.loads(text)["plans"]["train model"]["fits"] is False


def test_a_phase_that_follows_a_plan_is_judged_by_it() -> None:
    table = a_table(saved=30)
    plan = plan_step(table, a_capacity().machine)
    assert plan.fits and plan.modelled is not None and not plan.keeps_all_on_gpu
    forecast = a_forecast(a_phase("train model", 150.0, plan=plan), plans={"train model": plan})
    assert forecast.verdict.fit is not FitStatus.DOES_NOT_FIT
    assert forecast.phases[0].host_bytes == plan.modelled.host_peak_bytes
    text = "\n".join(report_lines(forecast))
    assert "by its plan" in text and "by the plan that it follows" in text

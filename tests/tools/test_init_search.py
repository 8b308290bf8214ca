"""The search of `supertuner init` over hand-made forecasts: which settings are tried, in which order, and chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from supertuner.core.types import GIB, JSON
from supertuner.plan.forecast.results import PhaseForecast, RunForecast, SuggestedChange
from supertuner.tools.init.reasons import search_reasons
from supertuner.tools.init.search import SettingValues, search_settings
from tests.plan.making_forecasts import a_capacity, a_forecast

WEIGHTS, ACTIVATIONS, ENCODERS = 30, 20, 10
"""GiB of a made-up model: weights in 16 bits, activations of a sample, encoders."""


def forecasts(gpu_gib: float, **more: float) -> Callable[[SettingValues], RunForecast]:
    """Forecasts of that model on a GPU of this size. Recomputation leaves a tenth of the activations."""
    smaller_gib = more.get("smaller_gib", 0)

    def forecast(settings: SettingValues) -> RunForecast:
        weights = WEIGHTS * GIB // (2 if settings["model.base_weights"] == "int8" else 1)
        activations = int(str(settings["train.batch_size"])) * ACTIVATIONS * GIB
        activations //= 10 if settings["train.gradient_checkpointing"] else 1
        if "datasets[0].resolution" in settings:
            activations //= 2
        train = {"frozen weights": weights, "activations": activations}
        phases = [PhaseForecast("train model", train, None)]
        if settings.get("validation.at_end", True):
            phases.append(PhaseForecast("sample", {"frozen weights": weights + ENCODERS * GIB}, None))
        changes = (SuggestedChange("datasets[0].resolution=512", None, 0, bool(smaller_gib), None, "smaller images"),)
        return a_forecast(*phases, capacity=a_capacity("rtx-4090", gpu_gib), changes=changes, stored=())

    return forecast


def choose(gpu_gib: float, given: tuple[str, ...] = (), **more: float) -> tuple[dict[str, JSON] | None, int]:
    """The chosen settings that are not the best ones, and how many forecasts were made."""
    best = {
        "model.base_weights": "as_computed",
        "train.gradient_checkpointing": False,
        "train.batch_size": 4,
        "train.gradient_accumulation_steps": 1,
    }
    fixed = {"train.batch_size": 1} if given else {}
    forecast = forecasts(gpu_gib, **more)
    chosen, trials = search_settings(lambda free: forecast({**free, **fixed}), 4, given)
    if chosen is None:
        return None, len(trials)
    assert all(one.reason for one in search_reasons(chosen, trials))
    return {name: value for name, value in chosen.settings.items() if best.get(name, "unset") != value}, len(trials)


CHECKPOINTED = {"train.gradient_checkpointing": True, "train.batch_size": 1, "train.gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("gpu_gib", "changed", "forecast_count"),
    [
        (120, {}, 2),
        (80, {"train.batch_size": 2, "train.gradient_accumulation_steps": 2}, 2),
        (60, {"train.batch_size": 1, "train.gradient_accumulation_steps": 4}, 1),
        (45, CHECKPOINTED, 2),
        (30, {**CHECKPOINTED, "model.base_weights": "int8"}, 3),
    ],
)
def test_the_first_settings_that_fit_are_chosen_with_few_forecasts(
    gpu_gib: float, changed: dict[str, JSON], forecast_count: int
) -> None:
    assert choose(gpu_gib) == (changed, forecast_count)


def test_smaller_samples_are_tried_if_the_forecast_suggests_them() -> None:
    def forecast(settings: SettingValues) -> RunForecast:
        without_samples = {**settings, "validation.at_end": False}
        return forecasts(17.2, smaller_gib=1)(without_samples)

    chosen, trials = search_settings(forecast, 4, ())
    assert chosen is not None and chosen.settings["datasets[0].resolution"] == 512
    reason = next(one.reason for one in search_reasons(chosen, trials) if "resolution" in one.path)
    assert "modelled" in reason and "17" in reason


def test_samples_are_left_out_only_if_nothing_else_lacks_memory() -> None:
    changed, _ = choose(20)
    assert changed == {
        **CHECKPOINTED,
        "model.base_weights": "int8",
        "validation.at_end": False,
        "validation.every_steps": None,
    }


def test_settings_that_barely_fit_are_better_than_none() -> None:
    changed, _ = choose(25.5)
    assert changed is not None and "validation.at_end" not in changed


def test_nothing_is_chosen_where_the_weights_alone_do_not_fit() -> None:
    assert choose(10) == (None, 3)


def test_a_setting_of_the_user_is_never_changed() -> None:
    assert choose(120, ("train.batch_size",)) == ({}, 1)

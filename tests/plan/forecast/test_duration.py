"""The length of a run: every window counts once with its own size, and times between known sizes are interpolated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.config.settings.run_config import RunConfig
from supertuner.config.settings.validation import ValidationSettings
from supertuner.optim.schedule import build_training_schedule
from supertuner.optim.schedule import windows as all_windows
from supertuner.plan.forecast.duration import (
    StepTime,
    group_windows,
    interpolate_by_tokens,
    mean_step_time,
    samples_per_validation,
    training_seconds,
    validation_count,
)
from supertuner.plan.sample_requests import PROMPTS_FROM_CAPTIONS


def a_config(**settings: object) -> RunConfig:
    return RunConfig.model_validate(settings)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 60), st.integers(1, 5), st.integers(1, 900))
def test_every_window_of_the_run_counts_once_with_its_own_size(
    start: int, more: int, length: int, batch: int, samples: int
) -> None:
    ramp = {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": start,
        "target_effective_batch_size": start + more,
        "batch_rampup_steps": length,
    }
    config = a_config(gh200_optimizations=ramp, train={"batch_size": batch, "num_epochs": 1})
    schedule = build_training_schedule(config, lambda epochs: epochs * samples, 1)
    counted = [size for part in group_windows(schedule, batch) for size in [part.samples] * part.count]
    assert counted == [len(window) for window in all_windows(samples, schedule.ramp)]


def test_equal_windows_take_their_number_times_the_time_of_one() -> None:
    config = a_config(train={"batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 10})
    parts = group_windows(build_training_schedule(config, lambda epochs: 0, 1), 2)
    assert [(part.samples, part.count, part.micro_batches) for part in parts] == [(6, 10, 3)]
    assert training_seconds(parts, [StepTime(2.0, 1.0)]) == pytest.approx(70.0)


def test_experts_alternate_so_the_mean_of_their_times_counts() -> None:
    parts = group_windows(build_training_schedule(a_config(train={"max_steps": 10}), lambda epochs: 0, 1), 1)
    assert training_seconds(parts, [StepTime(1.0, 0.0), StepTime(3.0, 0.0)]) == pytest.approx(20.0)


def test_a_run_with_a_ramp_takes_a_time_between_its_smallest_and_its_largest_windows() -> None:
    ramp = {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 4,
        "target_effective_batch_size": 32,
        "batch_rampup_steps": 400,
    }
    steps = {"max_steps": 100}
    long = training_seconds(
        group_windows(build_training_schedule(a_config(train=steps, gh200_optimizations=ramp), lambda e: 0, 1), 1),
        [StepTime(1.0, 0.5)],
    )
    assert 100 * 4.5 < long < 100 * 32.5


@given(st.floats(0, 10), st.floats(0.01, 10), st.floats(0, 1), st.lists(st.integers(1, 50_000), min_size=1))
def test_interpolation_from_three_sizes_is_exact(c: float, b: float, a: float, requested: list[int]) -> None:
    def work(tokens: int) -> float:
        return c + b * tokens / 100 + a * (tokens / 1000) ** 2

    known = {tokens: work(tokens) for tokens in (1_000, 7_000, 40_000)}
    for tokens in requested:
        assert interpolate_by_tokens(known, tokens) == pytest.approx(work(tokens), rel=1e-6, abs=1e-6)


def test_one_known_size_scales_in_proportion_and_known_sizes_are_exact() -> None:
    assert interpolate_by_tokens({100: 2.0}, 50) == pytest.approx(1.0)
    assert interpolate_by_tokens({100: 2.0, 200: 5.0}, 200) == 5.0
    assert interpolate_by_tokens({100: 2.0, 200: 5.0}, 100) == 2.0
    assert 2.0 < interpolate_by_tokens({100: 2.0, 200: 5.0}, 150) < 5.0


def test_the_mean_step_weighs_shapes_by_their_draws() -> None:
    mean = mean_step_time([StepTime(1.0, 0.5), StepTime(4.0, 0.25)], [3.0, 1.0])
    assert mean.micro_batch_s == pytest.approx(1.75)
    assert mean.update_s == 0.5


@pytest.mark.parametrize(
    ("settings", "steps", "count"),
    [
        ({"every_steps": 10}, 30, 3),
        ({"every_steps": 10}, 35, 4),
        ({"every_steps": 10, "at_start": True}, 35, 5),
        ({"every_steps": 10, "at_end": False}, 35, 3),
        ({}, 35, 1),
        ({"at_end": False}, 35, 0),
    ],
)
def test_validations_are_counted_as_the_training_loop_runs_them(
    settings: dict[str, object], steps: int, count: int
) -> None:
    assert validation_count(ValidationSettings.model_validate(settings), steps) == count


def test_each_prompt_is_sampled_with_each_seed() -> None:
    two_prompts = ValidationSettings(prompts=("a", "b"), seeds=(0, 1, 2))
    assert samples_per_validation(two_prompts) == 6
    assert samples_per_validation(ValidationSettings()) == PROMPTS_FROM_CAPTIONS

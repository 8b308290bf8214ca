"""Windows, number of steps, learning rate and active expert as pure functions of the position."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.config.settings.run_config import RunConfig
from supertuner.optim.schedule import (
    BatchRamp,
    LrScheduleKind,
    accumulation_steps,
    active_expert_index,
    build_batch_ramp,
    build_training_schedule,
    equal_window_spans,
    learning_rate_factor,
    ramp_change_text,
    ramp_text,
    window_samples,
    windows,
)

TOTALS = st.integers(1, 5_000)


@st.composite
def ramps(draw: st.DrawFn) -> BatchRamp:
    start = draw(st.integers(1, 40))
    return BatchRamp(start, start + draw(st.integers(0, 60)), draw(st.integers(0, 3_000)))


def configured(train: dict[str, Any] | None = None, **ramp: Any) -> RunConfig:
    ramp_settings = {"enable_batch_size_rampup": True, **ramp} if ramp else {}
    return RunConfig.model_validate({"train": train or {}, "gh200_optimizations": ramp_settings})


def epochs_of(samples: int) -> Callable[[int], int]:
    return lambda epoch: epoch * samples


@given(ramps(), TOTALS)
def test_windows_partition_the_run(ramp: BatchRamp, total: int) -> None:
    assert [position for window in windows(total, ramp) for position in window] == list(range(total))


@given(ramps(), TOTALS, st.data())
def test_a_run_resumed_at_any_window_sees_the_same_windows(ramp: BatchRamp, total: int, data: st.DataObject) -> None:
    whole = list(windows(total, ramp))
    at = data.draw(st.sampled_from(whole)).start
    assert list(windows(total, ramp, start=at)) == [window for window in whole if window.start >= at]


@given(ramps(), TOTALS)
def test_windows_never_shrink_and_stay_between_start_and_end(ramp: BatchRamp, total: int) -> None:
    sizes = [window_samples(window.start, ramp) for window in windows(total, ramp)]
    assert all(before <= after for before, after in pairwise(sizes))
    assert set(sizes) <= set(range(ramp.start, ramp.end + 1))
    assert [len(window) for window in windows(total, ramp)][:-1] == sizes[:-1]


@given(ramps())
def test_the_ramp_begins_at_its_start_and_ends_at_its_end(ramp: BatchRamp) -> None:
    assert window_samples(0, ramp) == (ramp.start if ramp.samples else ramp.end)
    assert window_samples(ramp.samples, ramp) == ramp.end


@given(ramps(), TOTALS, st.integers(1, 300), st.integers(1, 3))
def test_the_schedule_agrees_with_enumerating_the_windows(
    ramp: BatchRamp, samples: int, max_steps: int, epochs: int
) -> None:
    config = configured(
        {"max_steps": max_steps, "num_epochs": epochs, "batch_size": 1},
        initial_effective_batch_size=ramp.start,
        target_effective_batch_size=ramp.end,
        batch_rampup_steps=max(1, ramp.samples),
    )
    schedule = build_training_schedule(config, epochs_of(samples), world_size=1)
    expected = list(windows(epochs * samples, schedule.ramp))[:max_steps]
    assert schedule.total_steps == len(expected)
    assert schedule.total_samples == expected[-1].stop
    assert [schedule.window_at(step) for step in range(schedule.total_steps)] == expected
    assert [schedule.samples_after(step) for step in range(schedule.total_steps + 2)] == [
        *(window[0] for window in expected),
        schedule.total_samples,
        schedule.total_samples,
    ]
    sizes = [window_samples(window.start, schedule.ramp) for window in expected]
    changed = [step for step in range(1, len(sizes)) if sizes[step] != sizes[step - 1]]
    assert [step for step in range(schedule.total_steps) if schedule.window_size_changes_at(step)] == changed


def test_a_schedule_of_ten_billion_samples_is_computed_at_once_and_in_little_memory() -> None:
    config = configured(
        {"num_epochs": 1000, "batch_size": 4},
        initial_effective_batch_size=1,
        target_effective_batch_size=512,
        batch_rampup_steps=25_000_000,
    )
    start_s = time.process_time()
    schedule = build_training_schedule(config, epochs_of(10_000_000), world_size=1)
    last = schedule.window_at(schedule.total_steps - 1)
    assert time.process_time() - start_s < 1
    assert last.stop == schedule.total_samples == 10**10
    assert schedule.total_steps > 19_000_000
    assert len(schedule.spans) <= 512


def test_max_steps_ends_the_run_after_that_many_whole_windows() -> None:
    schedule = build_training_schedule(configured({"batch_size": 3, "max_steps": 7}), epochs_of(10), world_size=2)
    assert (schedule.total_steps, schedule.total_samples) == (7, 42)
    assert schedule.end_reason == "train.max_steps 7 ends the run"


def test_epochs_end_the_run_where_the_last_epoch_ends_with_a_short_window() -> None:
    schedule = build_training_schedule(configured({"batch_size": 4, "num_epochs": 3}), epochs_of(10), world_size=1)
    assert (schedule.total_steps, schedule.total_samples) == (8, 30)
    assert schedule.window_at(7) == range(28, 30)
    assert schedule.end_reason == "train.num_epochs 3 ends the run"


@pytest.mark.parametrize(
    ("max_steps", "steps", "why"),
    [
        (5, 5, "train.max_steps 5 ends the run, no later than train.num_epochs 3"),
        (8, 8, "train.num_epochs 3 ends the run, before train.max_steps 8"),
        (9, 8, "train.num_epochs 3 ends the run, before train.max_steps 9"),
    ],
)
def test_max_steps_or_num_epochs_ends_the_run_whichever_comes_first(max_steps: int, steps: int, why: str) -> None:
    config = configured({"batch_size": 4, "num_epochs": 3, "max_steps": max_steps})
    schedule = build_training_schedule(config, epochs_of(10), world_size=1)
    assert (schedule.total_steps, schedule.end_reason) == (steps, why)


def test_without_steps_and_epochs_the_run_is_one_epoch() -> None:
    schedule = build_training_schedule(configured({"batch_size": 4}), epochs_of(10), world_size=1)
    assert (schedule.total_steps, schedule.total_samples) == (3, 10)
    assert "one epoch" in schedule.end_reason


def test_a_constant_window_is_micro_batch_times_accumulation_times_processes() -> None:
    ramp = build_batch_ramp(configured({"batch_size": 2, "gradient_accumulation_steps": 3}), world_size=4)
    assert ramp == BatchRamp(24, 24)
    assert not ramp.grows


def test_a_ramp_without_a_target_ends_at_the_constant_size() -> None:
    ramp = build_batch_ramp(
        configured({"batch_size": 2, "gradient_accumulation_steps": 8}, initial_effective_batch_size=4), 2
    )
    assert ramp == BatchRamp(4, 32, 400 * 2)


def test_a_large_micro_batch_with_a_small_initial_size_begins_with_small_windows() -> None:
    """A configuration of the GH200 forks: train_batch_size 32 and initial_effective_batch_size 4."""
    config = configured({"batch_size": 32}, initial_effective_batch_size=4)
    ramp = build_batch_ramp(config, world_size=1)
    assert ramp == BatchRamp(4, 32, 400 * 32)
    assert [len(window) for window in windows(40, ramp)] == [4] * 10
    assert accumulation_steps(4, 32, 1) == 1


def test_a_ramp_with_a_target_has_the_same_windows_on_any_number_of_processes() -> None:
    config = configured({"batch_size": 2}, initial_effective_batch_size=4, target_effective_batch_size=32)
    assert build_batch_ramp(config, 1) == build_batch_ramp(config, 8)


def test_a_decreasing_ramp_raises_an_assertion() -> None:
    with pytest.raises(AssertionError, match="a ramp grows"):
        BatchRamp(8, 4, 100)


@given(ramps(), st.integers(0, 5_000))
def test_spans_give_the_size_of_every_window(ramp: BatchRamp, at: int) -> None:
    parts = equal_window_spans(ramp)
    begin = 0
    for step in range(at):
        if begin > 5_000:
            break
        part = [p for p in parts if p.first_step <= step][-1]
        assert part.first_position + (step - part.first_step) * part.window_size == begin
        assert part.window_size == window_samples(begin, ramp)
        begin += part.window_size


@given(
    st.integers(1, 500),
    st.integers(0, 50),
    st.sampled_from(["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]),
)
def test_learning_rates_rise_linearly_and_then_follow_their_curve(
    total: int, warmup: int, kind: LrScheduleKind
) -> None:
    for step in range(total):
        factor = learning_rate_factor(step, total, kind, warmup, power=2.0, cycles=1)
        if step < warmup:
            assert factor == pytest.approx((step + 1) / warmup)
            continue
        done = (step - warmup) / (total - warmup)
        cosine = math.cos(math.pi * done / 2) ** 2
        curves = {"constant": 1.0, "linear": 1 - done, "cosine": cosine, "polynomial": (1 - done) ** 2}
        assert factor == pytest.approx(curves.get(kind, cosine), abs=1e-12)
        assert 0 < factor <= 1  # no step has a rate of zero


def test_a_rate_with_restarts_falls_as_often_as_it_has_cycles() -> None:
    factors = [learning_rate_factor(step, 110, "cosine_with_restarts", 10, cycles=4) for step in range(10, 110)]
    assert factors[:25] == factors[25:50] == factors[50:75] == factors[75:]
    assert factors[0] == 1.0 and factors[:25] == sorted(factors[:25], reverse=True)


@pytest.mark.parametrize("kind", ["cosine", "linear", "cosine_with_restarts", "polynomial"])
def test_a_falling_rate_ends_at_the_end_factor(kind: LrScheduleKind) -> None:
    factors = [learning_rate_factor(step, 50, kind, 5, end=0.2, power=3.0, cycles=2) for step in range(51)]
    assert factors[5] == 1.0 and factors[50] == pytest.approx(0.2)
    assert all(0.2 < factor <= 1.0 for factor in factors[4:50])


@pytest.mark.parametrize("kind", ["cosine", "linear", "cosine_with_restarts", "polynomial"])
def test_decaying_rates_are_zero_at_the_end_of_the_run_and_after_it(kind: LrScheduleKind) -> None:
    assert learning_rate_factor(100, 100, kind, 10) == pytest.approx(0, abs=1e-15)
    assert learning_rate_factor(150, 100, kind, 10) == pytest.approx(0, abs=1e-15)
    assert learning_rate_factor(10, 100, kind, 10) == 1.0


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert [learning_rate_factor(step, 3, "cosine", 10) for step in range(3)] == [0.1, 0.2, 0.3]


def test_experts_take_turns_for_a_fixed_number_of_steps() -> None:
    assert [active_expert_index(step, 2, 3) for step in range(9)] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert {active_expert_index(step, 1, 3) for step in range(9)} == {0}


def test_the_log_lines_are_those_of_the_gh200_forks() -> None:
    assert ramp_text(BatchRamp(4, 32, 400), batch_size=1, world_size=1) == (
        "gradient accumulation ramp enabled: effective batch size 4 -> 32 over 400 samples "
        "(gradient_accumulation_steps 4 -> 32)"
    )
    assert ramp_change_text(9, batch_size=2, world_size=2) == (
        "ramp adjusted effective batch size -> 9 (gradient_accumulation_steps -> 3)"
    )

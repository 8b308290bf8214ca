"""Windows, number of steps, learning rate and stage: functions of position, the same whoever asks and whenever."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.config.settings.tree import RunConfig
from supertuner.optim.schedule import (
    Kind,
    Ramp,
    accumulation,
    active,
    change_text,
    course_of,
    ramp_of,
    ramp_text,
    rate_factor,
    stretches,
    window_samples,
    windows,
)

TOTALS = st.integers(1, 5_000)


@st.composite
def ramps(draw: st.DrawFn) -> Ramp:
    start = draw(st.integers(1, 40))
    return Ramp(start, start + draw(st.integers(0, 60)), draw(st.integers(0, 3_000)))


def configured(train: dict[str, Any] | None = None, **ramp: Any) -> RunConfig:
    more = {"enable_batch_size_rampup": True, **ramp} if ramp else {}
    return RunConfig.model_validate({"train": train or {}, "gh200_optimizations": more})


def epochs_of(samples: int) -> Callable[[int], int]:
    return lambda epoch: epoch * samples


@given(ramps(), TOTALS)
def test_windows_partition_the_run(ramp: Ramp, total: int) -> None:
    assert [position for window in windows(total, ramp) for position in window] == list(range(total))


@given(ramps(), TOTALS, st.data())
def test_a_run_resumed_at_any_window_sees_the_same_windows(ramp: Ramp, total: int, data: st.DataObject) -> None:
    whole = list(windows(total, ramp))
    at = data.draw(st.sampled_from(whole)).start
    assert list(windows(total, ramp, begin=at)) == [window for window in whole if window.start >= at]


@given(ramps(), TOTALS)
def test_windows_never_shrink_and_stay_between_start_and_end(ramp: Ramp, total: int) -> None:
    sizes = [window_samples(window.start, ramp) for window in windows(total, ramp)]
    assert all(before <= after for before, after in pairwise(sizes))
    assert set(sizes) <= set(range(ramp.start, ramp.end + 1))
    assert [len(window) for window in windows(total, ramp)][:-1] == sizes[:-1]


@given(ramps())
def test_the_ramp_begins_at_its_start_and_ends_at_its_end(ramp: Ramp) -> None:
    assert window_samples(0, ramp) == (ramp.start if ramp.samples else ramp.end)
    assert window_samples(ramp.samples, ramp) == ramp.end


@given(ramps(), TOTALS, st.integers(1, 300), st.integers(1, 3))
def test_the_course_agrees_with_counting(ramp: Ramp, samples: int, max_steps: int, epochs: int) -> None:
    config = configured(
        {"max_steps": max_steps, "num_epochs": epochs, "batch_size": 1},
        initial_effective_batch_size=ramp.start,
        target_effective_batch_size=ramp.end,
        batch_rampup_steps=max(1, ramp.samples),
    )
    course = course_of(config, epochs_of(samples), processes=1)
    counted = list(windows(epochs * samples, course.ramp))[:max_steps]
    assert course.total_steps == len(counted)
    assert course.total_samples == counted[-1].stop
    assert [course.window_of(step) for step in range(course.total_steps)] == counted
    assert all(course.step_at(p) == step for step, window in enumerate(counted) for p in (window[0], window[-1]))
    assert course.step_at(course.total_samples) == course.total_steps
    assert [course.consumed(step) for step in range(course.total_steps + 2)] == [
        *(window[0] for window in counted),
        course.total_samples,
        course.total_samples,
    ]
    sizes = [window_samples(window.start, course.ramp) for window in counted]
    changed = [step for step in range(1, len(sizes)) if sizes[step] != sizes[step - 1]]
    assert [step for step in range(course.total_steps) if course.changes_at(step)] == changed


def test_a_course_of_a_billion_samples_is_known_at_once_and_in_little_memory() -> None:
    config = configured(
        {"num_epochs": 1000, "batch_size": 4},
        initial_effective_batch_size=1,
        target_effective_batch_size=512,
        batch_rampup_steps=25_000_000,
    )
    begun = time.process_time()
    course = course_of(config, epochs_of(10_000_000), processes=1)
    last = course.window_of(course.total_steps - 1)
    assert time.process_time() - begun < 1
    assert last.stop == course.total_samples == 10**10
    assert course.total_steps > 19_000_000
    assert len(course.stretches) <= 512


def test_max_steps_ends_the_run_after_so_many_whole_windows() -> None:
    course = course_of(configured({"batch_size": 3, "max_steps": 7}), epochs_of(10), processes=2)
    assert (course.total_steps, course.total_samples) == (7, 42)
    assert course.why == "train.max_steps 7 ends the run"


def test_epochs_end_the_run_where_the_last_epoch_ends_with_a_short_window() -> None:
    course = course_of(configured({"batch_size": 4, "num_epochs": 3}), epochs_of(10), processes=1)
    assert (course.total_steps, course.total_samples) == (8, 30)
    assert course.window_of(7) == range(28, 30)
    assert course.why == "train.num_epochs 3 ends the run"


@pytest.mark.parametrize(
    ("max_steps", "steps", "why"),
    [
        (5, 5, "train.max_steps 5 ends the run, no later than train.num_epochs 3"),
        (8, 8, "train.num_epochs 3 ends the run, before train.max_steps 8"),
        (9, 8, "train.num_epochs 3 ends the run, before train.max_steps 9"),
    ],
)
def test_of_steps_and_epochs_whichever_ends_first_ends_the_run(max_steps: int, steps: int, why: str) -> None:
    config = configured({"batch_size": 4, "num_epochs": 3, "max_steps": max_steps})
    course = course_of(config, epochs_of(10), processes=1)
    assert (course.total_steps, course.why) == (steps, why)


def test_without_steps_and_epochs_the_run_is_one_epoch() -> None:
    course = course_of(configured({"batch_size": 4}), epochs_of(10), processes=1)
    assert (course.total_steps, course.total_samples) == (3, 10)
    assert "one epoch" in course.why


def test_a_constant_window_is_micro_batch_times_accumulation_times_processes() -> None:
    ramp = ramp_of(configured({"batch_size": 2, "gradient_accumulation_steps": 3}), processes=4)
    assert ramp == Ramp(24, 24)
    assert not ramp.grows


def test_a_ramp_without_a_target_ends_at_the_constant_size() -> None:
    ramp = ramp_of(configured({"batch_size": 2, "gradient_accumulation_steps": 8}, initial_effective_batch_size=4), 2)
    assert ramp == Ramp(4, 32, 400 * 2)


def test_a_large_micro_batch_with_a_small_initial_size_begins_with_small_windows() -> None:
    """Seed 002: train_batch_size 32 and initial_effective_batch_size 4."""
    config = configured({"batch_size": 32}, initial_effective_batch_size=4)
    ramp = ramp_of(config, processes=1)
    assert ramp == Ramp(4, 32, 400 * 32)
    assert [len(window) for window in windows(40, ramp)] == [4] * 10
    assert accumulation(4, 32, 1) == 1


def test_another_number_of_processes_sees_the_windows_of_the_ramp_that_names_its_target() -> None:
    config = configured({"batch_size": 2}, initial_effective_batch_size=4, target_effective_batch_size=32)
    assert ramp_of(config, 1) == ramp_of(config, 8)


def test_a_ramp_that_falls_is_a_mistake_of_the_programmer() -> None:
    with pytest.raises(AssertionError, match="goes up"):
        Ramp(8, 4, 100)


@given(ramps(), st.integers(0, 5_000))
def test_stretches_say_the_size_of_any_window(ramp: Ramp, at: int) -> None:
    parts = stretches(ramp)
    begin = 0
    for step in range(at):
        if begin > 5_000:
            break
        part = [p for p in parts if p.step <= step][-1]
        assert part.begin + (step - part.step) * part.size == begin
        assert part.size == window_samples(begin, ramp)
        begin += part.size


@given(st.integers(1, 500), st.integers(0, 50), st.sampled_from(["constant", "cosine", "linear"]))
def test_learning_rates_rise_linearly_and_then_follow_their_curve(total: int, warmup: int, kind: Kind) -> None:
    for step in range(total):
        factor = rate_factor(step, total, kind, warmup)
        if step < warmup:
            assert factor == pytest.approx((step + 1) / warmup)
            continue
        done = (step - warmup) / (total - warmup)
        expected = {"constant": 1.0, "linear": 1 - done, "cosine": math.cos(math.pi * done / 2) ** 2}[kind]
        assert factor == pytest.approx(expected, abs=1e-12)
        assert 0 < factor <= 1  # no step of a run is wasted on a rate of zero


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_falling_rates_are_zero_where_the_run_ends_and_stay_there(kind: Kind) -> None:
    assert rate_factor(100, 100, kind, 10) == pytest.approx(0, abs=1e-15)
    assert rate_factor(150, 100, kind, 10) == pytest.approx(0, abs=1e-15)
    assert rate_factor(10, 100, kind, 10) == 1.0


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert [rate_factor(step, 3, "cosine", 10) for step in range(3)] == [0.1, 0.2, 0.3]


def test_experts_take_turns_of_so_many_steps() -> None:
    assert [active(step, 2, 3) for step in range(9)] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert {active(step, 1, 3) for step in range(9)} == {0}


def test_the_log_says_what_the_seeds_tell_users_to_look_for() -> None:
    assert ramp_text(Ramp(4, 32, 400), batch_size=1, processes=1) == (
        "GH200 gradient accumulation ramp enabled: effective batch size 4 -> 32 over 400 samples "
        "(gradient_accumulation_steps 4 -> 32)"
    )
    assert change_text(9, batch_size=2, processes=2) == (
        "GH200 ramp adjusted effective batch size -> 9 (gradient_accumulation_steps -> 3)"
    )

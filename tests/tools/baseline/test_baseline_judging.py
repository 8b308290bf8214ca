"""Which differences are judged worse, which are not, and which are undecided because of noise."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.tools.baseline.comparison_report import as_json, as_markdown, headline
from supertuner.tools.baseline.confidence_interval import RatioInterval, confidence_interval, quantile, reduce_blocks
from supertuner.tools.baseline.loss_comparison import LossAgreement
from supertuner.tools.baseline.record import MeasuredJob
from supertuner.tools.baseline.regression import ComparisonResult, ComparisonTerms, RegressionVerdict, judge_jobs
from tests.tools.baseline.simulated_jobs import MIB, job, jobs


def judged(
    old: list[MeasuredJob], new: list[MeasuredJob], turn_steps: int = 5, limit: float = 0.05
) -> ComparisonResult:
    return judge_jobs(old, new, ComparisonTerms(turn_steps, limit), precision="fp32", method="simulated")


def verdicts(found: ComparisonResult) -> dict[str, RegressionVerdict]:
    return {one.name: one.verdict for one in found.figures}


@pytest.mark.parametrize("turn_steps", [5, 0, -1])
def test_steps_that_take_a_tenth_longer_are_worse_and_the_same_steps_are_not(turn_steps: int) -> None:
    slow = judged(jobs(seed=1), jobs(seed=2, step_s=0.11), turn_steps)
    assert verdicts(slow)["step"] is verdicts(slow)["time per sample"] is RegressionVerdict.WORSE
    assert slow.verdict is RegressionVerdict.WORSE and not slow.losses_differ
    same = judged(jobs(seed=1), jobs(seed=2), turn_steps)
    assert same.verdict is RegressionVerdict.SAME, headline(same)
    quick = judged(jobs(seed=1), jobs(seed=2, step_s=0.09), turn_steps)
    assert verdicts(quick)["step"] is RegressionVerdict.BETTER and quick.verdict is RegressionVerdict.BETTER


def test_load_that_affects_both_sides_is_no_difference() -> None:
    """The machine is three times slower for a while; in turns, the same steps of both sides are affected."""
    load = [1.0 if at % 50 < 30 else 3.0 for at in range(100)]
    old, new = (jobs(seed=seed, load=load.__getitem__) for seed in (1, 2))
    assert judged(old, new).verdict is RegressionVerdict.SAME


def test_noise_larger_than_the_limit_is_undecided() -> None:
    def noisy(seed: int) -> list[MeasuredJob]:
        return jobs(seed=seed, apart=0.2, noise=0.4, steps=20, windows=tuple(range(1, 21)))

    found = judged(noisy(1), noisy(2))
    assert verdicts(found)["step"] is RegressionVerdict.UNDECIDED
    assert found.verdict is RegressionVerdict.UNDECIDED and "too much noise" in " ".join(headline(found))


def test_the_quickest_steps_decide_where_other_processes_disturb_the_median() -> None:
    """Other processes slow down about every second step, and never speed one up."""

    def disturbed(seed: int, step_s: float) -> list[MeasuredJob]:
        draw = random.Random(seed)
        hit = [[draw.choice((1.0, 1.0, 2.0, 3.5, 5.0)) for _ in range(100)] for _ in range(3)]
        return [job(step_s=step_s, noise=0.01, seed=seed + at, load=hit[at].__getitem__) for at in range(3)]

    found = judged(disturbed(1, 0.1), disturbed(2, 0.12), turn_steps=-1)
    step = next(one for one in found.figures if one.name == "step")
    assert step.verdict is RegressionVerdict.WORSE and "quickest" in step.note
    assert step.interval.ratio == pytest.approx(1.2, rel=0.03)


def test_saves_between_steps_count_in_the_time_per_sample_but_not_in_the_step() -> None:
    found = verdicts(judged(jobs(seed=1), jobs(seed=2, between_s=0.02)))
    assert found["step"] is RegressionVerdict.SAME and found["time per sample"] is RegressionVerdict.WORSE


def test_steps_with_different_window_sizes_are_compared_per_sample() -> None:
    found = judged(jobs(seed=1, windows=(4,)), jobs(seed=2, windows=(8,), step_s=0.2), turn_steps=-1)
    step = next(one for one in found.figures if one.name == "step")
    assert step.unit == "s/sample" and step.verdict is RegressionVerdict.SAME
    assert found.losses.likeness is LossAgreement.INCOMPARABLE and not found.regressed


def test_more_memory_is_worse_unless_the_difference_is_small() -> None:
    def using(*mib: int) -> list[MeasuredJob]:
        return [
            job(seed=at, peaks={"process.resident": m * MIB, "process.shared": 2 * MIB}) for at, m in enumerate(mib)
        ]

    assert (
        verdicts(judged(using(500, 501, 499), using(600, 601, 599)))["peak process.resident"] is RegressionVerdict.WORSE
    )
    assert (
        verdicts(judged(using(100, 101, 99), using(110, 111, 109)))["peak process.resident"] is RegressionVerdict.SAME
    )
    assert "peak process.shared" not in verdicts(judged(using(500, 501), using(500, 501)))


def test_starts_with_ready_data_are_compared_separately_from_cold_ones() -> None:
    def starting(*pairs: tuple[float, bool]) -> list[MeasuredJob]:
        return [job(seed=at, first_step_s=s, cold=cold) for at, (s, cold) in enumerate(pairs)]

    ready = [(8.0, False), (8.1, False), (7.9, False)]
    mixed = [(30.0, True), (8.0, False), (8.1, False)]
    assert verdicts(judged(starting(*ready), starting(*mixed)))["start"] in (
        RegressionVerdict.SAME,
        RegressionVerdict.UNJUDGED,
    )
    slow = starting((12.0, False), (12.1, False), (11.9, False))
    assert verdicts(judged(starting(*ready), slow))["start"] is RegressionVerdict.WORSE
    only_cold = starting((30.0, True), (31.0, True), (29.0, True))
    assert "start" not in verdicts(judged(starting(*ready), only_cold))


def test_a_noisy_start_does_not_affect_the_verdict() -> None:
    old = [job(seed=at, first_step_s=s) for at, s in enumerate((6.0, 9.0, 15.0))]
    new = [job(seed=at + 9, first_step_s=s) for at, s in enumerate((7.0, 16.0, 9.0))]
    found = judged(old, new)
    assert verdicts(found)["start"] is RegressionVerdict.UNJUDGED and found.verdict is RegressionVerdict.SAME


def test_hints_that_fail_now_are_a_separate_finding() -> None:
    found = judged(jobs(seed=1, hints={"applied": 96}), jobs(seed=2, hints={"applied": 90, "refused": 6}))
    assert found.regressed and found.hints == "refused: 6 (0 before)" and not found.worse


def test_different_losses_and_slower_steps_are_separate_findings() -> None:
    other = judged(jobs(seed=1), jobs(seed=2, loss=lambda at: 1.1 / (at + 1)))
    assert other.regressed and other.losses_differ and not other.worse
    assert headline(other)[0].startswith("LOSSES DIFFER") and "WORSE" not in " ".join(headline(other))
    slower = judged(jobs(seed=1), jobs(seed=2, step_s=0.12))
    assert headline(slower)[0].startswith("WORSE: step +") and not slower.losses_differ
    document = as_json("title", other)
    assert document["verdict"] == "worse" and document["learns_otherwise"] is True and not document["slower_or_larger"]


def test_losses_that_differ_by_growing_rounding_errors_agree_and_a_jump_does_not() -> None:
    def drifting(at: int) -> float:
        return (1 + 1e-7 * 1.1**at if at > 10 else 1.0) / (at + 1)

    grown = judged(jobs(seed=1), jobs(seed=2, loss=drifting)).losses
    assert (grown.likeness, grown.first_difference) == (LossAgreement.ROUNDING, 12)
    jump = judged(jobs(seed=1), jobs(seed=2, loss=lambda at: (1 if at < 40 else 1.01) / (at + 1))).losses
    assert (jump.likeness, jump.first_difference) == (LossAgreement.DIFFERENT, 41)
    assert judged(jobs(seed=1), jobs(seed=2)).losses.likeness is LossAgreement.IDENTICAL


def test_a_non_finite_loss_differs_unless_the_old_one_is_non_finite_too() -> None:
    def broken(at: int) -> float | None:
        return None if at == 7 else 1.0

    was = jobs(seed=1, loss=broken)
    assert judged(was, jobs(seed=2, loss=broken)).losses.likeness is LossAgreement.IDENTICAL
    assert judged(was, jobs(seed=2, loss=lambda at: 1.0)).losses.likeness is LossAgreement.DIFFERENT


def test_differences_between_repeats_set_the_tolerance() -> None:
    """Non-deterministic kernels: repeats differ by 0.2 % from the first step on."""

    def nondeterministic(seed: int) -> list[MeasuredJob]:
        repeats = []
        for at in range(3):
            draw = random.Random(seed * 10 + at)
            losses = [draw.gauss(1.0, 0.002) / (step + 1) for step in range(100)]
            repeats.append(job(seed=seed + at, loss=losses.__getitem__))
        return repeats

    assert judged(nondeterministic(1), nondeterministic(2)).losses.likeness is LossAgreement.ROUNDING
    other = judged(nondeterministic(1), jobs(seed=2, loss=lambda at: 1.2 / (at + 1)))
    assert other.losses.likeness is LossAgreement.DIFFERENT


def test_the_report_lists_every_figure_with_its_interval_and_the_method() -> None:
    text = as_markdown("Baseline one, now", judged(jobs(seed=1), jobs(seed=2, step_s=0.11)))
    assert text.startswith("# Baseline one, now\n\nWORSE: step +")
    assert "simulated; 3 rounds" in text and "| peak process.resident |" in text
    lengths = {len(line) for line in text.splitlines() if line.startswith("|")}
    assert len(lengths) == 1, "the table does not line up"


def test_an_interval_contains_the_true_value_in_95_percent_of_cases() -> None:
    """Three repeats with a deviation of 1 %, each of ten blocks with a deviation of 2 %."""
    draw = random.Random(7)
    held = 0
    for _ in range(400):
        middles = [draw.gauss(0.0, 0.01) for _ in range(3)]
        found = confidence_interval([[draw.gauss(middle, 0.02) for _ in range(10)] for middle in middles])
        held += found.low <= 0.0 <= found.high
    assert held >= 0.93 * 400


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=50), st.integers(1, 60))
def test_blocks_are_whole_and_in_order(values: list[float], size: int) -> None:
    found = reduce_blocks(values, size, sums=True)
    assert len(found) == max(1, len(values) // size) if size <= len(values) else len(found) == 1
    assert math.isclose(found[0], math.fsum(values[: min(size, len(values))]))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_quantiles_lie_between_minimum_and_maximum(values: list[float]) -> None:
    assert quantile(values, 0.0) == min(values) and quantile(values, 1.0) == max(values)
    assert min(values) <= quantile(values, 0.37) <= max(values)


def test_the_interval_of_a_difference_combines_those_of_both_sides() -> None:
    found = RatioInterval(0.3, 0.26, 0.34).minus(RatioInterval(0.1, 0.07, 0.13))
    assert found.middle == pytest.approx(0.2) and found.high - found.middle == pytest.approx(0.05)


def nan_from(step: int) -> list[MeasuredJob]:
    return jobs(seed=step, loss=lambda at: None if at + 1 >= step else 1.0 / (at + 1))


def test_losses_that_are_not_finite_at_the_same_steps_agree_and_the_first_is_named() -> None:
    found = judged(nan_from(60), nan_from(60))
    assert found.losses.likeness is LossAgreement.IDENTICAL
    assert "41 before and 41 now of 100 are NaN or infinite, first at steps 60 and 60" in found.losses.words


@pytest.mark.parametrize("step", [1, 7, 60])
def test_losses_that_are_not_finite_on_one_side_are_reported_as_text_and_as_json(step: int) -> None:
    """JSON has no infinity: an infinite difference is null there."""
    for old, new, text in (
        (jobs(seed=1), nan_from(step), f"none before and {101 - step} now of 100"),
        (nan_from(step), jobs(seed=1), f"{101 - step} before and none now of 100"),
    ):
        found = judged(old, new)
        assert found.losses_differ and text in found.losses.words and "inf%" not in as_markdown("", found)
        assert (found.losses.first_difference, found.losses.there) == (step, None)
        json.dumps(as_json("", found), allow_nan=False)


def test_one_repeat_with_a_non_finite_loss_does_not_raise_the_tolerance() -> None:
    old = [*jobs(2, seed=1), nan_from(60)[0]]
    other = judged(old, jobs(seed=2, loss=lambda at: 2.0 / (at + 1)))
    assert other.losses_differ, other.losses.words
    same = judged(old, jobs(seed=2))
    assert same.losses.likeness is LossAgreement.ROUNDING and same.losses.first_difference == 60
    assert "41 before and none now of 100" in same.losses.words

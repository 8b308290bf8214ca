"""Simulated checks: judging again after more rounds gives no more false verdicts than judging once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from supertuner.core.errors import OptionError
from supertuner.tools.baseline.confidence_interval import student_t_quantile
from supertuner.tools.baseline.record import MeasuredJob
from supertuner.tools.baseline.regression import RegressionVerdict, judge_jobs
from supertuner.tools.baseline.rounds import ComparisonOptions, count_looks, is_judged_after
from tests.tools.baseline.simulated_jobs import job

STEPS = 40


def pair(draw: random.Random, slower: float, apart: float) -> list[MeasuredJob]:
    """One round on a busy machine. Its load varies by 10 % from round to round and drifts within a round, equally for
    both sides; processes differ by `apart`; about every seventh step is slowed down by another process."""
    level, drift = draw.lognormvariate(0, 0.1), draw.uniform(-0.2, 0.2)
    measured = []
    for factor in (1.0, slower):
        hit = [draw.choice((1.5, 2.0, 3.0)) if draw.random() < 0.15 else 1.0 for _ in range(STEPS)]
        load = [level * (1 + drift * at / STEPS) * hit[at] for at in range(STEPS)]
        step_s = 0.1 * factor * draw.lognormvariate(0, apart)
        start_s = 8 * draw.lognormvariate(0, apart)
        measured.append(
            job(
                steps=STEPS,
                step_s=step_s,
                noise=0.05,
                seed=draw.randrange(1 << 30),
                load=load.__getitem__,
                first_step_s=start_s,
            )
        )
    return measured


def check(seed: int, *, slower: float, apart: float) -> tuple[RegressionVerdict, int]:
    """What `check` does, on simulated rounds: (the verdict, the number of rounds)."""
    draw, options, pairs = random.Random(seed), ComparisonOptions(), []
    while True:
        pairs.append(pair(draw, slower, apart))
        at = len(pairs)
        if at < options.max_rounds and not is_judged_after(at, options.rounds):
            continue
        old, new = zip(*pairs, strict=True)
        found = judge_jobs(old, new, options.comparison_terms(turn_steps=5), precision="fp32", method="")
        if not found.undecided or at >= options.max_rounds:
            return found.verdict, at


def test_equal_code_is_judged_worse_in_at_most_one_of_twenty_checks() -> None:
    found = Counter(check(seed, slower=1.0, apart=0.07)[0] for seed in range(100))
    assert found[RegressionVerdict.WORSE] <= 5, found


def test_a_step_that_takes_15_percent_longer_is_found_in_few_rounds() -> None:
    found = [check(seed, slower=1.15, apart=0.02) for seed in range(40)]
    assert all(verdict is RegressionVerdict.WORSE for verdict, _ in found)
    assert sum(rounds for _, rounds in found) / len(found) < 5


def test_looks_are_counted_up_to_the_most_rounds_and_a_single_round_is_not_judged() -> None:
    assert count_looks(3, 9) == 3 and count_looks(3, 3) == 1 and count_looks(2, 5) == 3
    assert count_looks(1, 1) == 1 and count_looks(1, 3) == 2
    assert not is_judged_after(1, 1) and is_judged_after(2, 1) and is_judged_after(6, 3) and not is_judged_after(7, 3)


def test_a_maximum_below_the_number_of_rounds_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--most 2 is below --repeats 3; raise it"):
        ComparisonOptions(rounds=3, max_rounds=2)


def test_quantiles_of_students_t_match_published_tables() -> None:
    tables = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 8: (2.306, 3.355), 30: (2.042, 2.750)}
    for freedom, known in tables.items():
        assert [round(student_t_quantile(tail, freedom), 3) for tail in (0.025, 0.005)] == list(known)

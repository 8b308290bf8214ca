"""The grid of learning rates honours start, bump and limits for any settings."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from supertuner.optim.automagic.rate_grid import (
    ALL_DOUBLED,
    MAX_CODE,
    NO_SPLIT,
    TOLERANCE,
    LearningRateLimits,
    RateGrid,
    make_grid,
)

DEFAULTS = LearningRateLimits(start=1e-6, bump=1e-6, lowest=1e-7, highest=1e-3)


def drawn_limits(seed: int) -> LearningRateLimits:
    chance = random.Random(seed)
    lowest = 10 ** chance.uniform(-8, -4)
    highest = lowest * 10 ** chance.uniform(0.05, 4.5)
    start = lowest * (highest / lowest) ** chance.random()
    return LearningRateLimits(start, (highest - lowest) / 10 ** chance.uniform(0, 3.5), lowest, highest)


def kind(grid: RateGrid) -> str:
    if grid.move_probability < 1:
        return "random moves"
    return {NO_SPLIT: "one lattice", ALL_DOUBLED: "two lattices"}.get(grid.split, "two lattices at the bottom")


def walk(grid: RateGrid, limits: LearningRateLimits, moves: list[int]) -> tuple[list[float], list[float]]:
    """The rates of the grid and of fp32 arithmetic, from the start on."""
    code, rate = grid.nearest_code(limits.start), limits.start
    found, expected = [grid.rate(code)], [rate]
    for move in moves:
        code, rate = grid.move(code, move), min(limits.highest, max(limits.lowest, rate + move * limits.bump))
        found.append(grid.rate(code))
        expected.append(rate)
    return found, expected


def test_start_and_limits_are_honoured_for_any_settings() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(2000):
        limits = drawn_limits(seed)
        grid = make_grid(limits)
        kinds[kind(grid)] += 1
        assert grid.max_code <= MAX_CODE, limits
        assert grid.rate(0) == limits.lowest
        assert grid.rate(grid.max_code) == pytest.approx(limits.highest, rel=1e-9)
        assert grid.rate(grid.nearest_code(limits.start)) == pytest.approx(limits.start, rel=TOLERANCE), limits
    assert min(kinds.values()) > 20 and len(kinds) == 4, kinds


def test_every_bump_is_honoured_from_the_start_and_from_the_lowest_rate() -> None:
    for seed in range(2000):
        limits = drawn_limits(seed)
        grid = make_grid(limits)
        if grid.move_probability < 1:
            continue
        rising, expected = walk(grid, limits, [1] * 30)
        assert rising == pytest.approx(expected, rel=TOLERANCE), limits
        down = [-1] * (1 + int((limits.start - limits.lowest) / limits.bump + 1))
        found, expected = walk(grid, limits, [*down, *[1, -1] * 3, *[1] * 30])
        after = len(down)
        assert found[after:] == pytest.approx(expected[after:], rel=TOLERANCE), limits


def test_where_a_range_has_too_many_bumps_the_mean_move_is_one_bump() -> None:
    limits = LearningRateLimits(start=1e-5, bump=1e-6, lowest=1e-7, highest=4e-3)
    grid = make_grid(limits)
    code = grid.nearest_code(limits.start)
    up, down = grid.rate(grid.move(code, 1)) - limits.start, limits.start - grid.rate(grid.move(code, -1))
    assert grid.rate(code) == pytest.approx(1e-5)
    assert (up * grid.move_probability, down * grid.move_probability) == (pytest.approx(1e-6), pytest.approx(1e-6))


@pytest.mark.parametrize(
    ("limits", "first_rates"),
    [
        (DEFAULTS, [1e-6, 2e-6, 3e-6]),
        (LearningRateLimits(1e-6, 5e-7, 1e-7, 5e-4), [1e-6, 1.5e-6, 2e-6]),
        (LearningRateLimits(1.5e-6, 1e-6, 1.5e-6, 4e-6), [1.5e-6, 2.5e-6, 3.5e-6]),
        (LearningRateLimits(2e-6, 1e-5, 1e-7, 1e-3), [2e-6, 1.2e-5, 2.2e-5]),
    ],
)
def test_rates_that_were_once_rounded_are_exact(limits: LearningRateLimits, first_rates: list[float]) -> None:
    assert walk(make_grid(limits), limits, [1, 1])[0] == pytest.approx(first_rates)


def test_codes_ascend_with_rates_and_every_rate_has_its_code() -> None:
    for seed in range(20):
        grid = make_grid(drawn_limits(seed))
        rates = [grid.rate(code) for code in range(grid.max_code + 1)]
        assert rates == sorted(rates)
        found = [grid.rate(grid.nearest_code(rate)) for rate in rates]
        assert found == pytest.approx(rates, rel=1e-9)

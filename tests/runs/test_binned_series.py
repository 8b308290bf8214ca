"""A series in bins: exact while it is short, and of bounded size with every extreme when it is long."""

from __future__ import annotations

import numpy as np
import pytest

from supertuner.runs.binned_series import MAX_BINS, BinnedSeries, Floats, SeriesBinner, smooth_series


def binned(values: Floats) -> BinnedSeries:
    binner = SeriesBinner()
    for step, value in enumerate(values.tolist(), start=1):
        binner.add(step, value)
    return binner.series()


def exact_trend(values: Floats) -> Floats:
    """The definition of the trend, over single values."""
    half_width = max(1, len(values) // 60)

    def mean(terms: Floats) -> Floats:
        sums, place = np.concatenate([[0.0], np.cumsum(terms)]), np.arange(len(terms))
        low, high = np.maximum(0, place - half_width), np.minimum(len(terms), place + half_width + 1)
        return (sums[high] - sums[low]) / (high - low)

    typical = np.exp(mean(np.log(values)))
    return mean(mean(np.minimum(values, 3 * typical)))


def test_the_trend_of_a_constant_is_that_constant_and_keeps_to_its_neighbours() -> None:
    assert np.allclose(smooth_series(binned(np.full(500, 0.3))), 0.3)
    trend = smooth_series(binned(np.concatenate([np.full(300, 1.0), np.full(300, 0.5)])))
    assert np.allclose(trend[:250], 1.0) and np.allclose(trend[350:], 0.5)
    assert smooth_series(binned(np.array([3.0, 1.0]))).tolist() == [3.0, 1.0]


def test_a_short_series_keeps_every_value_and_its_exact_trend() -> None:
    values = np.random.default_rng(1).lognormal(0, 0.7, MAX_BINS)
    series = binned(values)
    for column in (series.first_values, series.lows, series.highs):
        assert np.array_equal(column, values)
    assert np.array_equal(series.steps, np.arange(1, MAX_BINS + 1))
    assert np.allclose(smooth_series(series), exact_trend(values), rtol=1e-12)


@pytest.mark.parametrize("count", [MAX_BINS + 1, 40_003, 150_000])
def test_a_long_series_has_few_bins_all_extremes_and_nearly_the_exact_trend(count: int) -> None:
    rng = np.random.default_rng(count)
    values = (1 + np.cos(np.arange(count) / count * 6) / 2) * rng.lognormal(0, 0.7, count)
    values[[7, count // 2, count - 1]] = 1e5, 1e-7, 1e6
    series = binned(values)
    assert MAX_BINS // 2 <= len(series) <= MAX_BINS + 1024
    assert series.counts.sum() == count
    starts = np.concatenate([[0], np.cumsum(series.counts)[:-1]]).astype(int)
    assert np.array_equal(series.steps, starts + 1) and np.array_equal(series.first_values, values[starts])
    assert np.array_equal(series.lows, np.minimum.reduceat(values, starts))
    assert np.array_equal(series.highs, np.maximum.reduceat(values, starts))
    expected = exact_trend(values)[starts]
    assert np.abs(smooth_series(series) / expected - 1).max() < 0.03


def test_a_series_can_be_read_before_its_end_and_continued() -> None:
    values = np.random.default_rng(2).lognormal(0, 0.7, 30_000)
    binner = SeriesBinner()
    for step, value in enumerate(values.tolist(), start=1):
        binner.add(step, value)
        if step % 7919 == 0:
            assert binner.series().counts.sum() == step
    assert np.array_equal(binner.series().highs, binned(values).highs)


def test_values_that_have_no_logarithm_are_kept() -> None:
    series = binned(np.array([0.0, -2.0, 1e-300, 1e300, 0.0, 3.0] * 4000))
    assert series.lows.min() == -2.0 and series.highs.max() == 1e300
    assert np.isfinite(smooth_series(series)).all()

"""A series of any length in bounded memory: neighbouring values share a bin as soon as there are many.

A bin keeps the lowest and the highest of its values, so no spike is lost, and what the trend of the series needs. While
a series has at most MAX_BINS values, each bin holds one value, and everything computed from the bins is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_BINS = 8192
"""Bins of a series at most; a full series has between half and all of them. Many more than a picture has columns."""
MIN_TREND_VALUES = 8
"""A series with fewer values has no trend: its values are not smoothed."""
_CHUNK_VALUES = 1024
"""Values that are put into bins together: numpy's cost per call outweighs that of one value."""
_OCTAVES = 32
"""The values of a bin are counted and summed by octave, from 2^-16 to 2^16; values beyond belong to the outer ones."""
_SMALLEST = 1e-12
"""Lower values have this logarithm."""


@dataclass(frozen=True, eq=False, slots=True)
class BinnedSeries:
    """Bins of consecutive values, one element per bin in each array."""

    steps: Floats
    """The step of the first value."""
    first_values: Floats
    """The first value. Together they are a regular sample of the series."""
    lows: Floats
    highs: Floats
    counts: Floats
    log_sums: Floats
    """Sum of the natural logarithms."""
    octave_counts: Floats
    """[bins, octaves]: how many values lie in each octave."""
    octave_sums: Floats
    """[bins, octaves]: their sums."""

    def __len__(self) -> int:
        return len(self.steps)

    @classmethod
    def from_values(cls, steps: Floats, values: Floats) -> BinnedSeries:
        """One bin per value."""
        positive = values > 0
        octave = np.where(positive, np.frexp(values)[1], -_OCTAVES)
        row, column = np.arange(len(values)), np.clip(octave + _OCTAVES // 2, 0, _OCTAVES - 1)
        octave_counts, octave_sums = np.zeros((2, len(values), _OCTAVES))
        octave_counts[row, column], octave_sums[row, column] = 1, values
        logs = np.log(np.maximum(values, _SMALLEST))
        return cls(steps, values, values, values, np.ones(len(values)), logs, octave_counts, octave_sums)

    def merge_groups(self, bins: int) -> BinnedSeries:
        """Merge each group of `bins` neighbouring bins; the last group may be smaller."""
        if bins == 1 or not len(self):
            return self
        starts = np.arange(0, len(self), bins)
        return BinnedSeries(
            steps=self.steps[starts],
            first_values=self.first_values[starts],
            lows=np.minimum.reduceat(self.lows, starts),
            highs=np.maximum.reduceat(self.highs, starts),
            counts=np.add.reduceat(self.counts, starts),
            log_sums=np.add.reduceat(self.log_sums, starts),
            octave_counts=np.add.reduceat(self.octave_counts, starts),
            octave_sums=np.add.reduceat(self.octave_sums, starts),
        )

    def join(self, later: BinnedSeries) -> BinnedSeries:
        names = self.__slots__
        return BinnedSeries(*(np.concatenate([getattr(self, name), getattr(later, name)]) for name in names))


class SeriesBinner:
    """Collects a series value by value."""

    def __init__(self) -> None:
        self._bins = BinnedSeries.from_values(np.zeros(0), np.zeros(0))
        self._bin_values = 1
        self._steps: list[float] = []
        self._values: list[float] = []

    def add(self, step: float, value: float) -> None:
        """Append a finite value."""
        self._steps.append(step)
        self._values.append(value)
        if len(self._values) >= max(_CHUNK_VALUES, self._bin_values):
            self._bin_pending(len(self._values) // self._bin_values * self._bin_values)

    def series(self) -> BinnedSeries:
        """The series up to here. More values can be added."""
        return self._bins.join(self._pending_bins(len(self._values)))

    def _bin_pending(self, count: int) -> None:
        """Put the first `count` pending values into bins, and halve the number of bins if they are too many."""
        self._bins = self._bins.join(self._pending_bins(count))
        del self._steps[:count], self._values[:count]
        while len(self._bins) > MAX_BINS:
            self._bins, self._bin_values = self._bins.merge_groups(2), self._bin_values * 2

    def _pending_bins(self, count: int) -> BinnedSeries:
        steps, values = np.array(self._steps[:count], np.float64), np.array(self._values[:count], np.float64)
        return BinnedSeries.from_values(steps, values).merge_groups(self._bin_values)


def smooth_series(series: BinnedSeries) -> Floats:
    """The trend, one value per bin: twice a running mean over about a thirtieth of the series; at the ends over the
    values that exist.

    A value is limited to three times the geometric mean around it, so that one bad step does not look like a trend. In
    bins of several values that is exact except for the octave that contains the limit.
    """
    edges = np.concatenate([[0.0], np.cumsum(series.counts)])
    if edges[-1] < MIN_TREND_VALUES:
        return series.first_values
    half_width = max(1, int(edges[-1]) // 60)
    typical = np.exp(_running_mean(series.log_sums, edges, half_width))
    limited = np.minimum(series.octave_sums, series.octave_counts * (3 * typical)[:, None]).sum(axis=1)
    return _running_mean(_running_mean(limited, edges, half_width) * series.counts, edges, half_width)


def _running_mean(sums: Floats, edges: Floats, half_width: int) -> Floats:
    """The mean over `half_width` values on each side of the centre of each bin. `sums` are the sums of the bins,
    `edges` the numbers of values before each bin and at the end. A bin that is cut counts in proportion."""
    totals = np.concatenate([[0.0], np.cumsum(sums)])
    centres = (edges[:-1] + edges[1:] - 1) / 2
    low, high = np.maximum(0, centres - half_width), np.minimum(edges[-1], centres + half_width + 1)
    means: Floats = (np.interp(high, edges, totals) - np.interp(low, edges, totals)) / (high - low)
    return means

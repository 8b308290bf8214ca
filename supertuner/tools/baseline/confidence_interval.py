"""Confidence intervals for ratios of noisy measurements. Pure: equal inputs give equal intervals.

All computations use logarithms of seconds (or bytes), so that a ratio and its inverse are treated alike. There are two
sources of noise. Within a process, step times are correlated from step to step; therefore neighbouring steps are joined
into blocks, and the blocks are resampled (block bootstrap). Between processes, times differ systematically (because of
memory layout, for example); therefore there is also Student's t interval over the medians of the repeats. The result is
the wider of the two intervals.

A check that is judged after every round, and stops at the first decision, has one chance of a false decision per look.
Therefore the error probability is divided by the largest possible number of `looks` (Bonferroni): each look has a wider
interval, and all looks together have the stated confidence.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95
BOOTSTRAP_DRAWS: Final = 1000


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """A confidence interval of the logarithm of a ratio."""

    middle: float
    low: float
    high: float

    def minus(self, other: RatioInterval) -> RatioInterval:
        """The interval of the difference of two independent measurements."""
        middle = self.middle - other.middle
        down = math.hypot(self.middle - self.low, other.high - other.middle)
        up = math.hypot(self.high - self.middle, other.middle - other.low)
        return RatioInterval(middle, middle - down, middle + up)

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def ratio(self) -> float:
        return math.exp(self.middle)

    @property
    def bounds(self) -> tuple[float, float, float]:
        """The lower end, the middle and the upper end as ratios."""
        return math.exp(self.low), self.ratio, math.exp(self.high)


def confidence_interval(repeats: Sequence[Sequence[float]], looks: int = 1) -> RatioInterval:
    """The median over repeats with its confidence interval; each repeat is a list of one value per block."""
    assert repeats and all(repeats), "nothing was measured"
    middles = [statistics.median(blocks) for blocks in repeats]
    middle = statistics.median(middles)
    tail = (1 - CONFIDENCE) / 2 / looks
    low, high = _bootstrap_interval(repeats, tail)
    half_width = _half_width_of_repeats(middles, tail)
    return RatioInterval(middle, min(low, middle - half_width, middle), max(high, middle + half_width, middle))


def reduce_blocks(values: Sequence[float], size: int, *, sums: bool = False) -> list[float]:
    """The median (or sum) of each block of `size` neighbouring values. An incomplete last block is dropped, unless it
    is the only one."""
    size = min(size, len(values))
    join = math.fsum if sums else statistics.median
    return [join(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile `share` of the values, interpolated linearly."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def _bootstrap_interval(repeats: Sequence[Sequence[float]], tail: float) -> tuple[float, float]:
    """Bootstrap interval of the median of medians, resampling the blocks within each repeat."""
    import numpy as np

    random = np.random.default_rng(len(repeats))
    draws = [np.asarray(values)[random.integers(0, len(values), (BOOTSTRAP_DRAWS, len(values)))] for values in repeats]
    middles = [np.median(values, axis=1) for values in draws]
    resampled = np.median(np.stack(middles), axis=0).tolist()
    return quantile(resampled, tail), quantile(resampled, 1 - tail)


def _half_width_of_repeats(middles: Sequence[float], tail: float) -> float:
    """Half the width of Student's t interval for the mean of repeats; 0 for one repeat, which gives no estimate."""
    if len(middles) < 2:
        return 0.0
    return student_t_quantile(tail, len(middles) - 1) * statistics.stdev(middles) / math.sqrt(len(middles))


def student_t_quantile(tail: float, degrees_of_freedom: int) -> float:
    """The value that Student's t exceeds with probability `tail`, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _student_t_tail(angle, degrees_of_freedom) > tail else (low, angle)
    return math.tan(low) * math.sqrt(degrees_of_freedom)


def _student_t_tail(angle: float, degrees_of_freedom: int) -> float:
    """P(T > tan(angle) √degrees_of_freedom): Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and
    26.7.4."""
    cosine, term, total = math.cos(angle), 1.0, 0.0
    for power in range(degrees_of_freedom % 2, degrees_of_freedom - 1, 2):
        term *= 1.0 if power < 2 else (power - 1) / power
        total += term * cosine**power
    inside = math.sin(angle) * total
    if degrees_of_freedom % 2:
        inside = 2 / math.pi * (angle + inside)
    return (1 - inside) / 2

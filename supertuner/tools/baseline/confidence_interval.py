"""Ratios with the noise in mind: a middle, and where it could as well lie. Pure: same figures, same interval.

What is compared is logarithms of seconds (or bytes), so that a ratio and its inverse are judged alike. Noise has two
sources, and both count. Within a process times wander, and not independently from step to step: so neighbouring steps
are joined to blocks, and blocks are drawn again and again (bootstrap). And no process is quite like another (where its
memory lies, say): so between repeats there is Student's interval over their middles. The wider of the two is told.

Whoever looks after every round, and ends when a look decides, has as many chances to be fooled as looks. So the error
is shared out over all `looks` that there may be (Bonferroni): the interval of each look is the wider for it, and all of
them together hold the truth with the confidence that is told.
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
    """Of a logarithm of ratios."""

    middle: float
    low: float
    high: float

    def minus(self, other: RatioInterval) -> RatioInterval:
        """The difference of two that were measured independently."""
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
    def bounds(self) -> tuple[float, float]:
        return math.exp(self.low), math.exp(self.high)


def confidence_interval(repeats: Sequence[Sequence[float]], looks: int = 1) -> RatioInterval:
    """The middle of what repeats gave; each repeat is a list of blocks, of which each is one figure."""
    assert repeats and all(repeats), "nothing was measured"
    middles = [statistics.median(blocks) for blocks in repeats]
    middle = statistics.median(middles)
    tail = (1 - CONFIDENCE) / 2 / looks
    low, high = _bootstrap_interval(repeats, tail)
    half_width = _half_width_of_repeats(middles, tail)
    return RatioInterval(middle, min(low, middle - half_width, middle), max(high, middle + half_width, middle))


def reduce_blocks(values: Sequence[float], size: int, *, sums: bool = False) -> list[float]:
    """Neighbours joined: the median of each whole block of `size`, or their sum; a rest that is no whole block is left
    out, unless it is all there is."""
    size = min(size, len(values))
    join = math.fsum if sums else statistics.median
    return [join(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]


def log_values(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies, between two neighbours by a straight line."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def _bootstrap_interval(repeats: Sequence[Sequence[float]], tail: float) -> tuple[float, float]:
    """Bootstrap of the blocks within each repeat."""
    import numpy as np

    random = np.random.default_rng(len(repeats))
    middles = []
    for values in repeats:
        count = len(values)
        middles.append(np.median(np.asarray(values)[random.integers(0, count, (BOOTSTRAP_DRAWS, count))], axis=1))
    resampled = np.median(np.stack(middles), axis=0).tolist()
    return quantile(resampled, tail), quantile(resampled, 1 - tail)


def _half_width_of_repeats(middles: Sequence[float], tail: float) -> float:
    """Half of Student's interval for the mean of repeats; nothing is known of it from one repeat."""
    if len(middles) < 2:
        return 0.0
    return student_t_quantile(tail, len(middles) - 1) * statistics.stdev(middles) / math.sqrt(len(middles))


def student_t_quantile(tail: float, degrees_of_freedom: int) -> float:
    """What Student's t with so many degrees of freedom exceeds with the probability `tail`, by halving."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _student_t_tail(angle, degrees_of_freedom) > tail else (low, angle)
    return math.tan(low) * math.sqrt(degrees_of_freedom)


def _student_t_tail(angle: float, degrees_of_freedom: int) -> float:
    """The probability beyond t = tan(angle) √freedom: Abramowitz and Stegun, Handbook, 26.7.3 and 26.7.4."""
    cosine, term, total = math.cos(angle), 1.0, 0.0
    for power in range(degrees_of_freedom % 2, degrees_of_freedom - 1, 2):
        term *= 1.0 if power < 2 else (power - 1) / power
        total += term * cosine**power
    inside = math.sin(angle) * total
    if degrees_of_freedom % 2:
        inside = 2 / math.pi * (angle + inside)
    return (1 - inside) / 2

"""The learning rates that 10 bits can store: start, limits and bump of the settings, exact or within one percent.

fp32 rates `η ← clamp(η ± bump, lowest, highest)` move on two lattices: `start + k · bump` until a rate first meets a
limit, and `lowest + k · bump` after it was at the lowest rate. They coincide only if start - lowest is a whole number
of bumps; with the defaults (1e-6, 1e-7, 1e-6) it is 0.9. A `RateGrid` therefore stores both where they matter:

    code below `split`   even: lowest + unit · code / 2         odd: lowest + unit · ((code - 1) / 2 + offset)
    code from `split` on the lattice of `split`, one unit per code

`offset` is what start - lowest has beyond whole units. A bump is `step` units: 2 · `step` codes below `split`, and one
unit is one code from there on. A rate on the other lattice joins that of `split` when it gets there: it moves by less
than half a unit, at most `TOLERANCE` of a rate of this size. Codes ascend with rates; the highest code is the highest
rate. Which case applies depends on the number of bumps between the limits:

    one lattice suffices for the start      all codes are one lattice (`split` -1)
    at most 511 bumps                       all codes are doubled (`split` 2047), in units of a fraction of the bump
    more, if enough codes are left          the lowest codes are doubled
    otherwise                               a unit is larger than the bump, and a code moves with probability
                                            bump / unit, so that the mean rate moves by one bump
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

MAX_CODE: Final = 1023
"""The largest code of 10 bits."""
NO_SPLIT: Final = -1
ALL_DOUBLED: Final = 2 * MAX_CODE + 1
TOLERANCE: Final = 0.01
"""The largest relative deviation of a start rate, and of a rate that changes its lattice."""
DOUBLED_LEVELS: Final = math.ceil(0.5 / TOLERANCE)
"""At this many units above zero, half a unit is within the tolerance."""
ROUNDING: Final = 1e-9
"""Numbers of units that differ from whole ones by less than this, because of rounding, count as whole."""


@dataclass(frozen=True, slots=True)
class LearningRateLimits:
    """The initial learning rate, the amount by which a rate moves, and the limits between which it moves."""

    start: float
    bump: float
    lowest: float
    highest: float

    def __post_init__(self) -> None:
        assert self.bump > 0 and 0 < self.lowest <= self.start <= self.highest, f"{self}"


@dataclass(frozen=True, slots=True)
class RateGrid:
    """How codes stand for rates, and how they move."""

    lowest: float
    highest: float
    unit: float
    offset: float = 0.0
    """In units, at least 0 and below 1."""
    split: int = NO_SPLIT
    step: int = 1
    """Units per bump."""
    move_probability: float = 1.0
    """The probability with which a code moves in a step."""

    @property
    def doubled_levels(self) -> int:
        """The number of levels that both lattices have, if there is one lattice above them."""
        return (self.split + 1) // 2

    @property
    def max_code(self) -> int:
        """The lowest code that reaches the highest rate."""
        even, odd = self._levels(self.highest, _round_up)
        if self.split == ALL_DOUBLED:
            return min(2 * even, 2 * odd + 1)
        return (odd if self.split % 2 else even) + self.doubled_levels

    def rate(self, code: int) -> float:
        doubled = min(code, self.split)
        units = code - (doubled + 1) // 2 + (doubled % 2) * self.offset
        return min(self.lowest + units * self.unit, self.highest)

    def nearest_code(self, rate: float) -> int:
        """The code whose rate is the nearest one."""
        even, odd = self._levels(rate, round)
        candidates = (2 * even, 2 * odd + 1, (odd if self.split % 2 else even) + self.doubled_levels)
        highest = self.max_code
        return min((max(0, min(highest, code)) for code in candidates), key=lambda code: abs(self.rate(code) - rate))

    def _levels(self, rate: float, rounded: Callable[[float], int]) -> tuple[int, int]:
        """The level of a rate on the lattice of even codes, and on that of odd ones."""
        units = (rate - self.lowest) / self.unit
        return rounded(units), rounded(units - self.offset)

    def move(self, code: int, bumps: int) -> int:
        """The code after a move by -1, 0 or 1 bumps. The kernels compute the same for whole tensors."""
        moved = code + bumps * self.step
        if moved < self.split:
            moved += bumps * self.step
        return max(0, min(self.max_code, moved))


@lru_cache(maxsize=4)  # a run converts the rates of all its parameters in the same way
def converted_codes(saved: RateGrid, grid: RateGrid) -> tuple[int, ...]:
    """For each code of the grid `saved`, the code of the nearest rate of `grid`."""
    return tuple(grid.nearest_code(saved.rate(code)) for code in range(MAX_CODE + 1))


def make_grid(limits: LearningRateLimits) -> RateGrid:
    """The grid that stores these rates with the least deviation."""
    lowest, highest, bump = limits.lowest, limits.highest, limits.bump
    width = highest - lowest
    if not width:
        return RateGrid(lowest, highest, bump)
    bumps = width / bump
    if bumps <= MAX_CODE + ROUNDING:
        step = int((MAX_CODE + ROUNDING) / bumps)
        if _is_near_one_lattice(limits, bump / step):
            return RateGrid(lowest, highest, bump / step, step=step)
    if bumps <= MAX_CODE // 2:
        step = int(MAX_CODE // 2 / bumps)
        return RateGrid(lowest, highest, bump / step, _offset(limits, bump / step), ALL_DOUBLED, step)
    exact = _doubled_at_the_bottom(limits, bump) if bumps < MAX_CODE else None
    if exact is not None:
        return exact
    unit = width / MAX_CODE
    if bump < unit and _is_near_one_lattice(limits, unit):
        return RateGrid(lowest, highest, unit, move_probability=bump / unit)
    unit = width / (MAX_CODE - DOUBLED_LEVELS)
    doubled = _doubled_at_the_bottom(limits, unit)
    assert doubled is not None, f"{limits}"
    return replace(doubled, move_probability=bump / unit)


def _is_near_one_lattice(limits: LearningRateLimits, unit: float) -> bool:
    """Whether the start is a whole number of units above the lowest rate, or near enough."""
    return abs(math.remainder(limits.start - limits.lowest, unit)) <= TOLERANCE * limits.start


def _doubled_at_the_bottom(limits: LearningRateLimits, unit: float) -> RateGrid | None:
    """Both lattices at the lowest rates and one above, if enough codes are left for the lower part.

    The lattice that goes on is chosen such that the other one joins it at the nearest rate.
    """
    offset = _offset(limits, unit)
    levels = (limits.highest - limits.lowest) / unit
    upper_is_odd = offset > 0.5
    doubled_levels = MAX_CODE - _round_up(levels - offset if upper_is_odd else levels)
    deviation = min(offset, 1 - offset)
    if doubled_levels < 1 or deviation > TOLERANCE * (limits.lowest / unit + doubled_levels):
        return None
    split = 2 * doubled_levels - upper_is_odd
    return RateGrid(limits.lowest, limits.highest, unit, offset, split)


def _offset(limits: LearningRateLimits, unit: float) -> float:
    """By how much of a unit the start is above a whole number of units above the lowest rate."""
    units = (limits.start - limits.lowest) / unit
    return max(0.0, units - math.floor(units + ROUNDING))


def _round_up(number: float) -> int:
    return math.ceil(number - ROUNDING)

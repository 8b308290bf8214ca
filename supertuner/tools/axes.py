"""Axes of a chart: where a value lies in pixels, and which values get a tick. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """Values from `low` to `high`, on pixels from `low_px` to `high_px` (which may be the smaller)."""

    low: float
    high: float
    low_px: float
    high_px: float
    ticks: tuple[float, ...]
    scale: Callable[[float], float]
    """linear, or the logarithm."""
    decimals: int | None
    """Of a tick's text; None: as many figures as it takes."""

    def to_pixel(self, value: float) -> float:
        begin, end = self.scale(self.low), self.scale(self.high)
        return self.low_px + (self.scale(value) - begin) / (end - begin) * (self.high_px - self.low_px)

    def to_clamped_pixel(self, value: float) -> float:
        """Where the value lies, or the end that it lies beyond."""
        return self.to_pixel(min(max(value, self.low), self.high))

    def is_above(self, value: float) -> bool:
        return value > self.high

    def tick_label(self, tick: float) -> str:
        return f"{tick:,g}" if self.decimals is None else f"{tick:,.{self.decimals}f}"


def linear_axis(
    low: float, high: float, low_px: float, high_px: float, *, whole_numbers: bool = False, few_ticks: bool = False
) -> ChartAxis:
    """About six ticks (or three) at round values; at whole numbers only, if values are."""
    step = round_step((high - low) / (3 if few_ticks else 6))
    if whole_numbers:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return ChartAxis(low, high, low_px, high_px, ticks, _identity, max(0, -math.floor(math.log10(step) + 1e-9)))


def log_axis(low: float, high: float, low_px: float, high_px: float) -> ChartAxis:
    """Ticks at 1, 2 and 5 times powers of ten, or at the powers alone where there are many."""
    low, high = low * 0.9, high * 1.1
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    every = max(1, len(powers) // 8)
    candidates = (factor * 10.0**power for power in powers[::every] for factor in factors)
    ticks = tuple(tick for tick in candidates if low <= tick <= high)
    return ChartAxis(low, high, low_px, high_px, ticks, math.log10, None)


def round_step(minimum: float) -> float:
    """The round number (1, 2 or 5 times a power of ten) next above `about`."""
    power = 10.0 ** math.floor(math.log10(minimum))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= minimum * (1 - 1e-9))


def _identity(value: float) -> float:
    return value

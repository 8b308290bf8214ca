"""Axes of a chart: where a value lies in pixels, and which values get a tick. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
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

    def at(self, value: float) -> float:
        begin, end = self.scale(self.low), self.scale(self.high)
        return self.low_px + (self.scale(value) - begin) / (end - begin) * (self.high_px - self.low_px)

    def clamped(self, value: float) -> float:
        """Where the value lies, or the end that it lies beyond."""
        return self.at(min(max(value, self.low), self.high))

    def is_above(self, value: float) -> bool:
        return value > self.high

    def text(self, tick: float) -> str:
        return f"{tick:,g}" if self.decimals is None else f"{tick:,.{self.decimals}f}"


def linear(low: float, high: float, low_px: float, high_px: float, *, whole: bool = False, few: bool = False) -> Axis:
    """About six ticks (or three) at round values; at whole numbers only, if values are."""
    step = round_step((high - low) / (3 if few else 6))
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(low, high, low_px, high_px, ticks, _same, max(0, -math.floor(math.log10(step) + 1e-9)))


def logarithmic(low: float, high: float, low_px: float, high_px: float) -> Axis:
    """Ticks at 1, 2 and 5 times powers of ten, or at the powers alone where there are many."""
    low, high = low * 0.9, high * 1.1
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    every = max(1, len(powers) // 8)
    found = (factor * 10.0**power for power in powers[::every] for factor in factors)
    ticks = tuple(tick for tick in found if low <= tick <= high)
    return Axis(low, high, low_px, high_px, ticks, math.log10, None)


def round_step(about: float) -> float:
    """The round number (1, 2 or 5 times a power of ten) next above `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * (1 - 1e-9))


def _same(value: float) -> float:
    return value

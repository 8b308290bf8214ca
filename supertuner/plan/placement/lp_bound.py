"""The best mixture of ways to run a step as a linear program, bounded from below by prices. Pure.

A window has three phases, one after the other: from its forward passes to the moment that is looked at, from there to
the last gradient, and the update. In each, computing and copying go on side by side, so a phase takes at least as long
as either. Every thing (activations of a block, weights, state, …) is treated in one of several ways, or in shares of
them, and each way costs computing or copying in a phase and a place in one of two memories. Put a price on a second of
each and on a byte of each memory: everything at its cheapest, less what the memories are worth, is no more than what
the best mixture takes (weak duality). So any prices give a bound. The best prices are a linear program themselves;
what its solver says is only a guess of them, and the bound is worked out from the guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from supertuner.plan.placement.simplex import FloatArray, maximize

GB: Final = 1e9
"""Bytes are counted in these, so that prices are neither huge nor tiny."""


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One way to treat one thing: seconds of a phase and bytes of a memory that it costs."""

    first_link_s: float = 0.0
    second_work_s: float = 0.0
    second_link_s: float = 0.0
    update_up_s: float = 0.0
    update_down_s: float = 0.0
    gpu_bytes: float = 0.0
    host_bytes: float = 0.0
    update_gpu_bytes: float = 0.0
    """Of the GPU's memory, in the update."""


ItemOptions: TypeAlias = tuple[PlacementOption, ...]


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """What no way avoids, the rooms, and the things."""

    first_work_s: float
    first_link_s: float
    second_work_s: float
    second_link_s: float
    update_s: float
    """The optimizer's work, on the GPU or on the host."""
    min_arrive_s: float
    """To the GPU in the update at least: what cannot have been there before it. At least that, or what ways bring."""
    min_depart_s: float
    """Home in the update at least: what cannot stay after it."""
    gpu_bytes: float
    host_bytes: float
    update_gpu_bytes: float
    """On the GPU in the update, for what stays there between windows."""
    items: tuple[ItemOptions, ...]

    @property
    def feasible(self) -> bool:
        """Whether the memories hold the least that there is. True does not say that there is a plan."""
        least = sum(min(way.gpu_bytes + way.host_bytes for way in thing) for thing in self.items)
        on_gpu = sum(min(way.gpu_bytes for way in thing) for thing in self.items)
        late = sum(min(way.update_gpu_bytes for way in thing) for thing in self.items)
        both = self.gpu_bytes + self.host_bytes
        return self.host_bytes >= 0 and on_gpu <= self.gpu_bytes and least <= both and late <= self.update_gpu_bytes


@dataclass(frozen=True, slots=True)
class PricedBound:
    """The bound, and how long each phase of the best mixture takes."""

    seconds: float
    phases_s: tuple[float, ...]
    by_link: tuple[bool, ...]
    """Of each phase, whether copying is what it takes its time for."""


PHASE_LIMITS: Final = ("first work", "first link", "second work", "second link", "update work",
                 "arrive and depart", "arrive and sent", "brought and depart", "brought and sent")  # fmt: skip
"""What each phase takes at least as long as: two of the first phase, two of the second, five of the update."""
MEMORY_LIMITS: Final = 3
PHASE_SLICES: Final = (slice(0, 2), slice(2, 4), slice(4, 9))


def bound_by_prices(program: BoundProgram) -> PricedBound:
    counted_items = _count_equal_items(program.items)
    prices, phases_s = _guess_prices(program, counted_items)
    for phase in PHASE_SLICES:  # a phase counts once, whatever the solver's last digits say
        prices[phase] /= max(1.0, float(prices[phase].sum()))
    total = float(_fixed_costs(program) @ prices)
    costs = _cost_to_price_matrix() @ prices
    for count, options in counted_items:
        total += count * float((options @ costs).min())
    by_link = tuple(bool(prices[phase][0] < 0.5) for phase in PHASE_SLICES)
    return PricedBound(max(total, 0.0), tuple(float(one) for one in phases_s), by_link)


def _fixed_costs(program: BoundProgram) -> FloatArray:
    """By price: seconds that every schedule spends, and what the rooms are worth."""
    arrive, depart = program.min_arrive_s, program.min_depart_s
    update = [program.update_s, arrive + depart, arrive, depart, 0.0]
    phases = [program.first_work_s, program.first_link_s, program.second_work_s, program.second_link_s]
    rooms = [-program.gpu_bytes / GB, -program.host_bytes / GB, -program.update_gpu_bytes / GB]
    return np.array([*phases, *update, *rooms])


def _count_equal_items(items: tuple[ItemOptions, ...]) -> list[tuple[int, FloatArray]]:
    """Equal things once, with how often they occur; a row for each way."""
    counts: dict[ItemOptions, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return [(many, np.array([_option_costs(way) for way in thing])) for thing, many in counts.items()]


def _option_costs(option: PlacementOption) -> list[float]:
    seconds = [
        option.first_link_s,
        option.second_work_s,
        option.second_link_s,
        option.update_up_s,
        option.update_down_s,
    ]
    return [*seconds, option.gpu_bytes / GB, option.host_bytes / GB, option.update_gpu_bytes / GB]


def _cost_to_price_matrix() -> FloatArray:
    """From a way's costs to the prices that they are paid at."""
    matrix = np.zeros((8, len(PHASE_LIMITS) + MEMORY_LIMITS))
    for cost, price_columns in enumerate(((1,), (2,), (3,), (7, 8), (6, 8), (9,), (10,), (11,))):
        matrix[cost, list(price_columns)] = 1.0
    return matrix


def _guess_prices(program: BoundProgram, counted_items: list[tuple[int, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """The best prices: as large a sum as can be, no thing above the cheapest of its ways, each phase counted once. And
    what it is worth to count a phase: how long it takes."""
    prices, count = len(PHASE_LIMITS) + MEMORY_LIMITS, len(counted_items)
    gain = np.concatenate([_fixed_costs(program), [float(many) for many, _ in counted_items]])
    rows = np.zeros((len(PHASE_SLICES) + sum(len(options) for _, options in counted_items), prices + count))
    for number, phase in enumerate(PHASE_SLICES):
        rows[number, phase] = 1.0
    row = len(PHASE_SLICES)
    for number, (_, ways) in enumerate(counted_items):
        rows[row : row + len(ways), :prices] = -ways @ _cost_to_price_matrix()
        rows[row : row + len(ways), prices + number] = 1.0
        row += len(ways)
    limits = np.zeros(len(rows))
    limits[: len(PHASE_SLICES)] = 1.0
    solution, shadow_prices = maximize(gain, rows, limits)
    return solution[:prices], shadow_prices[: len(PHASE_SLICES)]

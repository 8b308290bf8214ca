"""A lower bound on the time of a step over all placements, by Lagrangian duality: the core of `roofline.py`. Pure.

The primal problem. A window has three phases, one after the other: (1) from the first forward pass to an examined
moment in the backward pass, (2) from there to the last gradient, (3) the update. In a phase, computing and copying run
in parallel, so it takes at least as long as each of them. Every item (activations of a block, weights, state, …) is
treated in one of several ways, its options; an option costs seconds of computing or copying in a phase and bytes of GPU
or host memory. The task: choose an option per item, or a mixture of options, that fits both memories and minimizes the
sum of the phases.

The bound. Put a price on each limit: a second of each phase's computing and copying (the prices of one phase add up to
at most 1), and a byte of each memory. Let every item take the option that is cheapest at these prices. The sum of these
costs and of the unavoidable seconds, minus the value of the memories, is not above the optimum of the primal problem.
This is weak duality (Boyd and Vandenberghe, Convex Optimization, section 5.2), and it holds for ANY prices: a solver
that returns bad prices makes the bound weaker, never wrong. So the prices come from a small simplex method, and the
bound is computed from the prices, not taken from the solver.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]

GB: Final = 1e9
"""The linear program counts bytes in these, so that prices of bytes and of seconds have similar magnitudes."""
EPSILON: Final = 1e-11
"""Coefficients below this count as zero in the simplex method."""
MAX_PIVOTS: Final = 5000
"""Far more than programs of this size need; after that the best solution so far is good enough."""


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One way to treat one item: the seconds of a phase and the bytes of a memory that it costs."""

    first_link_s: float = 0.0
    second_work_s: float = 0.0
    second_link_s: float = 0.0
    update_up_s: float = 0.0
    update_down_s: float = 0.0
    gpu_bytes: float = 0.0
    host_bytes: float = 0.0
    update_gpu_bytes: float = 0.0
    """GPU memory during the update."""


ItemOptions: TypeAlias = tuple[PlacementOption, ...]


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """The primal problem: unavoidable seconds, sizes of the memories, and the options of each item."""

    first_work_s: float
    first_link_s: float
    second_work_s: float
    second_link_s: float
    update_s: float
    """The optimizer's work, on the GPU or on the host."""
    min_arrive_s: float
    """Copying to the GPU in the update takes at least this: what cannot have been there before. The larger of this and
    of the options' `update_up_s` counts."""
    min_depart_s: float
    """Copying to the host in the update takes at least this: what cannot stay on the GPU. As `min_arrive_s`."""
    gpu_bytes: float
    host_bytes: float
    update_gpu_bytes: float
    """GPU memory during the update, for what stays there between windows."""
    items: tuple[ItemOptions, ...]

    @property
    def feasible(self) -> bool:
        """Whether the memories hold the smallest option of every item. Necessary, not sufficient, for a plan."""
        least = sum(min(option.gpu_bytes + option.host_bytes for option in item) for item in self.items)
        on_gpu = sum(min(option.gpu_bytes for option in item) for item in self.items)
        in_update = sum(min(option.update_gpu_bytes for option in item) for item in self.items)
        both = self.gpu_bytes + self.host_bytes
        enough_gpu = on_gpu <= self.gpu_bytes and in_update <= self.update_gpu_bytes
        return enough_gpu and self.host_bytes >= 0 and least <= both


@dataclass(frozen=True, slots=True)
class PricedBound:
    """The bound, and the phases of the best mixture."""

    seconds: float
    phases_s: tuple[float, ...]
    """Length of each phase."""
    by_link: tuple[bool, ...]
    """For each phase, whether copying, not computing, determines its length."""


# Each limit has a price. Columns 0–1 belong to phase 1, 2–3 to phase 2, 4–8 to the update, 9–11 to the memories. One
# link carries both directions, so the update takes at least (time up) + (time down). Each direction takes at least its
# minimum (`arrive`, `depart`) and at least what the options copy (`brought`, `sent`); a maximum of two is not linear,
# so all four combinations are limits.
PHASE_LIMITS: Final = ("first work", "first link", "second work", "second link", "update work",
                 "arrive and depart", "arrive and sent", "brought and depart", "brought and sent")  # fmt: skip
MEMORY_LIMITS: Final = 3
PHASE_SLICES: Final = (slice(0, 2), slice(2, 4), slice(4, 9))
OPTION_COLUMNS: Final = ((1,), (2,), (3,), (7, 8), (6, 8), (9,), (10,), (11,))
"""For each field of `PlacementOption`: the prices that it is multiplied with."""
OPTION_UNITS: Final = np.array([1.0] * 5 + [GB] * 3)
"""For each field of `PlacementOption`: seconds are counted in seconds, bytes in `GB`."""


def bound_by_prices(program: BoundProgram) -> PricedBound:
    """The bound at the best prices that the simplex method finds."""
    counted_items = _count_equal_items(program.items)
    prices, phases_s = _guess_prices(program, counted_items)
    # The prices of a phase must not exceed 1 in sum, or the bound would not hold: rounding of the solver may exceed it.
    for phase in PHASE_SLICES:
        prices[phase] /= max(1.0, float(prices[phase].sum()))
    total = float(_fixed_costs(program) @ prices)
    costs = _cost_to_price_matrix() @ prices
    for count, options in counted_items:
        total += count * float((options @ costs).min())
    by_link = tuple(bool(prices[phase][0] < 0.5) for phase in PHASE_SLICES)
    return PricedBound(max(total, 0.0), tuple(float(one) for one in phases_s), by_link)


def _fixed_costs(program: BoundProgram) -> FloatArray:
    """By price: seconds that every placement spends, and the sizes of the memories with a minus sign."""
    arrive, depart = program.min_arrive_s, program.min_depart_s
    update = [program.update_s, arrive + depart, arrive, depart, 0.0]
    phases = [program.first_work_s, program.first_link_s, program.second_work_s, program.second_link_s]
    memories = [-program.gpu_bytes / GB, -program.host_bytes / GB, -program.update_gpu_bytes / GB]
    return np.array([*phases, *update, *memories])


def _count_equal_items(items: tuple[ItemOptions, ...]) -> list[tuple[int, FloatArray]]:
    """Each distinct item once: how often it occurs, and a row of costs for each option. Keeps the program small,
    because most blocks of a model are equal."""
    return [(count, np.array([*map(astuple, item)]) / OPTION_UNITS) for item, count in Counter(items).items()]


def _cost_to_price_matrix() -> FloatArray:
    """Options' costs @ this matrix @ prices = what the options cost at these prices."""
    matrix = np.zeros((len(OPTION_COLUMNS), len(PHASE_LIMITS) + MEMORY_LIMITS))
    for cost, price_columns in enumerate(OPTION_COLUMNS):
        matrix[cost, list(price_columns)] = 1.0
    return matrix


def _guess_prices(program: BoundProgram, counted_items: list[tuple[int, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """Solves the dual problem: prices p and one value z per distinct item that

        maximize   fixed costs · p + Σ count · z
        subject to Σ p over a phase <= 1   (one row for each phase)
                   z <= cost of each option of the item at prices p   (one row for each option)

    Returns p, and the shadow prices of the phases' rows, which are the lengths of the phases in the primal optimum.
    """
    price_count, item_count = len(PHASE_LIMITS) + MEMORY_LIMITS, len(counted_items)
    gain = np.concatenate([_fixed_costs(program), [float(count) for count, _ in counted_items]])
    rows = np.zeros((len(PHASE_SLICES) + sum(len(options) for _, options in counted_items), price_count + item_count))
    for number, phase in enumerate(PHASE_SLICES):
        rows[number, phase] = 1.0
    row = len(PHASE_SLICES)
    for number, (_, options) in enumerate(counted_items):
        rows[row : row + len(options), :price_count] = -options @ _cost_to_price_matrix()
        rows[row : row + len(options), price_count + number] = 1.0
        row += len(options)
    limits = np.zeros(len(rows))
    limits[: len(PHASE_SLICES)] = 1.0
    solution, shadow_prices = maximize(gain, rows, limits)
    return solution[:price_count], shadow_prices[: len(PHASE_SLICES)]


# ── the simplex method ───────────────────────────────────────────────────────────────────────────────────────────────


def maximize(gain: FloatArray, rows: FloatArray, limits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Maximizes `gain · x` subject to `rows · x <= limits` and x >= 0; `limits` must not be negative.

    Returns the best x found, and for each row how much one more unit of its limit would gain (its shadow price). If the
    maximum is unbounded, it stops where it notices. The result is approximate: callers check what must hold exactly.

    The tableau form of the simplex method with Bland's rule (Bland, 1977), which prevents cycling: of the columns that
    improve the gain the first enters the basis, and of the rows that limit it first, the one with the first variable
    leaves. The last row of the tableau holds the negative gains, the last column the values of the basis.
    """
    assert (limits >= 0).all(), "x = 0 must be allowed"
    row_count, variable_count = rows.shape
    table = np.zeros((row_count + 1, variable_count + row_count + 1))
    table[:row_count, :variable_count] = rows
    table[:row_count, variable_count:-1] = np.eye(row_count)  # slack variables
    table[:row_count, -1] = limits
    table[row_count, :variable_count] = -gain
    basis = list(range(variable_count, variable_count + row_count))  # x = 0: every limit has slack
    for _ in range(MAX_PIVOTS):
        improving = np.flatnonzero(table[row_count, :-1] < -EPSILON)
        if not len(improving):
            break
        column = int(improving[0])
        row = _leaving_row(table, basis, column)
        if row is None:
            break
        _pivot(table, row, column)
        basis[row] = column
    solution = np.zeros(variable_count + row_count)
    solution[basis] = table[:row_count, -1]
    return np.maximum(solution[:variable_count], 0.0), table[row_count, variable_count:-1].copy()


def _leaving_row(table: FloatArray, basis: list[int], column: int) -> int | None:
    """The row whose limit is reached first when the column's variable grows; of several, the first variable's."""
    candidates = np.flatnonzero(table[:-1, column] > EPSILON)
    if not len(candidates):
        return None
    ratios = table[candidates, -1] / table[candidates, column]
    first = candidates[ratios <= ratios.min() + EPSILON]
    return int(min(first, key=lambda row: basis[row]))


def _pivot(table: FloatArray, row: int, column: int) -> None:
    """Gauss–Jordan step: the column becomes a unit vector with its 1 in this row."""
    table[row] /= table[row, column]
    factors = table[:, column].copy()
    factors[row] = 0.0
    table -= factors[:, None] * table[row]

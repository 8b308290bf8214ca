"""Small linear programs, solved exactly enough: the most of `gain · x` where `rows · x <= limits` and x >= 0. Pure.

The limits must not be negative, so that x = 0 is a beginning. Bland's rule for choosing pivots cannot go in circles.
Who needs a proof takes the result as a good guess and checks it: `prices` does.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]

EPSILON: Final = 1e-11
MAX_PIVOTS: Final = 5000
"""Far more than programs of this size take; beyond it the best so far is good enough."""


def maximize(gain: FloatArray, rows: FloatArray, limits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The x that was found best, and what one more of each limit would gain. What has no limit stops where it is."""
    assert (limits >= 0).all(), "x = 0 must be allowed"
    row_count, variable_count = rows.shape
    table = np.zeros((row_count + 1, variable_count + row_count + 1))
    table[:row_count, :variable_count] = rows
    table[:row_count, variable_count : variable_count + row_count] = np.eye(row_count)
    table[:row_count, -1] = limits
    table[row_count, :variable_count] = -gain
    basis = list(range(variable_count, variable_count + row_count))
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
    return np.maximum(solution[:variable_count], 0.0), table[
        row_count, variable_count : variable_count + row_count
    ].copy()


def _leaving_row(table: FloatArray, basis: list[int], column: int) -> int | None:
    """The row whose limit is met first; of several, that of the first variable."""
    candidates = np.flatnonzero(table[:-1, column] > EPSILON)
    if not len(candidates):
        return None
    ratios = table[candidates, -1] / table[candidates, column]
    first = candidates[ratios <= ratios.min() + EPSILON]
    return int(min(first, key=lambda row: basis[row]))


def _pivot(table: FloatArray, row: int, column: int) -> None:
    table[row] /= table[row, column]
    factors = table[:, column].copy()
    factors[row] = 0.0
    table -= factors[:, None] * table[row]

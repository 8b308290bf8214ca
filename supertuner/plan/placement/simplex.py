"""Small linear programs, solved exactly enough: the most of `gain · x` where `rows · x <= limits` and x >= 0. Pure.

The limits must not be negative, so that x = 0 is a beginning. Bland's rule for choosing pivots cannot go in circles.
Who needs a proof takes the result as a good guess and checks it: `prices` does.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

SMALL: Final = 1e-11
PIVOTS: Final = 5000
"""Far more than programs of this size take; beyond it the best so far is good enough."""


def most(gain: Array, rows: Array, limits: Array) -> tuple[Array, Array]:
    """The x that was found best, and what one more of each limit would gain. What has no limit stops where it is."""
    assert (limits >= 0).all(), "x = 0 must be allowed"
    count, many = rows.shape
    table = np.zeros((count + 1, many + count + 1))
    table[:count, :many] = rows
    table[:count, many : many + count] = np.eye(count)
    table[:count, -1] = limits
    table[count, :many] = -gain
    basis = list(range(many, many + count))
    for _ in range(PIVOTS):
        worthwhile = np.flatnonzero(table[count, :-1] < -SMALL)
        if not len(worthwhile):
            break
        column = int(worthwhile[0])
        row = _leaving(table, basis, column)
        if row is None:
            break
        _pivot(table, row, column)
        basis[row] = column
    found = np.zeros(many + count)
    found[basis] = table[:count, -1]
    return np.maximum(found[:many], 0.0), table[count, many : many + count].copy()


def _leaving(table: Array, basis: list[int], column: int) -> int | None:
    """The row whose limit is met first; of several, that of the first variable."""
    above = np.flatnonzero(table[:-1, column] > SMALL)
    if not len(above):
        return None
    ratios = table[above, -1] / table[above, column]
    first = above[ratios <= ratios.min() + SMALL]
    return int(min(first, key=lambda row: basis[row]))


def _pivot(table: Array, row: int, column: int) -> None:
    table[row] /= table[row, column]
    factors = table[:, column].copy()
    factors[row] = 0.0
    table -= factors[:, None] * table[row]

"""Judges whether two runs have the same losses: bit for bit, up to rounding, or not. Pure; ignores step times.

A step whose additions run in another order gives the same loss up to rounding, and the difference grows with training.
Therefore the first steps that differ are judged by a rounding tolerance, and the whole sequence by its running mean. If
repeats of one side differ more than that (non-deterministic kernels), their differences set the tolerance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supertuner.tools.baseline.record import MeasuredJob, finite_or_none

ROUNDING_BY_PRECISION: Final = {"fp32": 1e-5}
DEFAULT_ROUNDING: Final = 1e-3
"""Relative difference of losses that another order of additions explains: in fp32, and in lower precision."""
MAX_RUNNING_MEAN_GAP: Final = 0.05
"""Largest relative difference of running means that growing rounding errors explain."""
RUNNING_MEAN_STEPS: Final = 10
REPEAT_GAP_FACTOR: Final = 3.0
"""The two sides may differ by this multiple of the difference between repeats of one side."""


class LossAgreement(StrEnum):
    IDENTICAL = "identical"
    ROUNDING = "the same up to rounding"
    DIFFERENT = "different"
    INCOMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class LossComparison:
    likeness: LossAgreement
    words: str
    """The finding as text."""
    first_difference: int | None = None
    """The first step whose losses differ."""
    there: float | None = None
    """The relative difference at that step; None if one side is not finite there."""
    largest: float | None = None
    """The largest relative difference of running means; None if one side is not finite there."""


def compare_losses(old: Sequence[MeasuredJob], new: Sequence[MeasuredJob], precision: str) -> LossComparison:
    """Judge the new losses by the old ones. Repeats of a side show how much runs of the same code differ."""
    if not same_schedule(old[0], new[0]):
        text = "the steps have different window sizes or experts: the settings differ"
        return LossComparison(LossAgreement.INCOMPARABLE, text)
    rounding = ROUNDING_BY_PRECISION.get(precision, DEFAULT_ROUNDING)
    return compare_loss_values([loss_values(job) for job in old], [loss_values(job) for job in new], rounding)


def compare_loss_values(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], rounding: float) -> LossComparison:
    """Like `compare_losses`, for lists of losses per repeat; NaN stands for a loss that is not finite."""
    length = min(len(a[0]), len(b[0]))
    not_finite_text = _not_finite_text(a, b, length)
    first = next((at for repeat in (*b, *a) if (at := _first_difference(a[0], repeat, length)) is not None), None)
    if first is None:
        return LossComparison(LossAgreement.IDENTICAL, f"all {length} losses are equal bit for bit{not_finite_text}")
    first_gap, mean_gap = _gaps_between_sides(a, b, length)
    first_gaps, mean_gaps = zip(_gaps_between_repeats(a, length), _gaps_between_repeats(b, length), strict=True)
    tolerance = max(rounding, REPEAT_GAP_FACTOR * max(first_gaps))
    mean_tolerance = max(MAX_RUNNING_MEAN_GAP, REPEAT_GAP_FACTOR * max(mean_gaps))
    at, sizes = first + 1, (finite_or_none(first_gap), finite_or_none(mean_gap))
    if first_gap > tolerance or mean_gap > mean_tolerance:
        text = _difference_text(at, first_gap, mean_gap, tolerance)
        return LossComparison(LossAgreement.DIFFERENT, text + not_finite_text, at, *sizes)
    text = f"first difference at step {at}: {first_gap:.1e} of the loss; {_mean_gap_text(mean_gap)}"
    return LossComparison(LossAgreement.ROUNDING, text + not_finite_text, at, *sizes)


def _gaps_between_sides(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], length: int) -> tuple[float, float]:
    """(relative difference where they first differ, largest of running means), each of the closest pair of runs."""
    pairs = [(one[:length], other[:length]) for one in a for other in b]
    return min(_first_gap(*pair) for pair in pairs), min(_mean_gap(*pair) for pair in pairs)


def _gaps_between_repeats(repeats: Sequence[Sequence[float]], length: int) -> tuple[float, float]:
    """The same for repeats of one side, of the most different pair; 0 for a single run and for non-finite gaps."""
    pairs = [(one[:length], other[:length]) for at, one in enumerate(repeats) for other in repeats[at + 1 :]]
    early, whole = ([finite_or_none(gap(*pair)) or 0.0 for pair in pairs] for gap in (_first_gap, _mean_gap))
    return max(early, default=0.0), max(whole, default=0.0)


def _first_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """The median relative difference of the first losses that differ and those after them; one alone may be chance."""
    gaps = [_relative(x, y) for x, y in zip(a, b, strict=True)]
    first = next((at for at, gap in enumerate(gaps) if gap), None)
    if first is None:
        return 0.0
    near = gaps[first : first + RUNNING_MEAN_STEPS]
    return math.inf if math.inf in near else statistics.median(near)


def _mean_gap(a: Sequence[float], b: Sequence[float]) -> float:
    size = min(RUNNING_MEAN_STEPS, len(a))
    spans = (slice(at, at + size) for at in range(len(a) - size + 1))
    return max((_relative(statistics.fmean(a[span]), statistics.fmean(b[span])) for span in spans), default=0.0)


def _relative(x: float, y: float) -> float:
    if math.isnan(x) or math.isnan(y):
        return 0.0 if math.isnan(x) and math.isnan(y) else math.inf
    return abs(x - y) / max(abs(x), abs(y), 1e-12)


def _first_difference(a: Sequence[float], b: Sequence[float], length: int) -> int | None:
    """The index of the first loss that differs."""
    return next((at for at in range(length) if _relative(a[at], b[at])), None)


def _not_finite_text(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], length: int) -> str:
    """At how many steps a repeat of each side is not finite, and where that begins; empty if all are finite."""
    columns = (list(zip(*(repeat[:length] for repeat in side), strict=True)) for side in (a, b))
    sides = [[at for at, values in enumerate(column, 1) if any(map(math.isnan, values))] for column in columns]
    if not any(sides):
        return ""
    before, now = (str(len(steps) or "none") for steps in sides)
    firsts = [str(steps[0]) for steps in sides if steps]
    where = f"first at step{'s' if len(firsts) > 1 else ''} {' and '.join(firsts)}"
    return f"; {before} before and {now} now of {length} are NaN or infinite, {where}"


def loss_values(job: MeasuredJob) -> list[float]:
    return [math.nan if step.loss is None else step.loss for step in job.steps]


def same_schedule(old: MeasuredJob, new: MeasuredJob) -> bool:
    length = min(len(old.schedule), len(new.schedule))
    return old.schedule[:length] == new.schedule[:length]


def _difference_text(at: int, first_gap: float, mean_gap: float, tolerance: float) -> str:
    if first_gap == math.inf:
        return f"from step {at} on, some losses are finite on one side only"
    if mean_gap == math.inf:
        return f"they differ from step {at} on, and later some losses are finite on one side only"
    if first_gap > tolerance:
        more = f", more than the {tolerance:.0e} that rounding or repeats explain"
        return f"they differ at step {at} by {first_gap:.1e} of the loss{more}; {_mean_gap_text(mean_gap)}"
    return f"they diverge: means of {RUNNING_MEAN_STEPS} losses differ by up to {mean_gap:.1%}"


def _mean_gap_text(mean_gap: float) -> str:
    return f"means of {RUNNING_MEAN_STEPS} losses differ by up to {mean_gap:.1e}"

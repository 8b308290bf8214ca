"""Judges measured jobs: which figures got worse, which did not, and which are too noisy to decide. Pure.

    worse       the ratio is above the limit, and its whole interval is above 1, so it is not noise
    undecided   the interval is too wide to say whether the ratio is above the limit
    no worse    neither of these; `better` if the ratio is below the limit's inverse and its interval below 1
    not judged  a start-up time with too much noise: it is reported and does not affect the verdict

Other processes on the machine can only make steps longer. Where they disturb medians too much for a decision, the
quickest tenth of each kind of step is compared instead. Losses are judged separately from times: a slower step and a
different loss are different findings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supertuner.core.types import MIB
from supertuner.tools.baseline.confidence_interval import (
    RatioInterval,
    confidence_interval,
    log_values,
    quantile,
    reduce_blocks,
)
from supertuner.tools.baseline.loss_comparison import LossAgreement, LossComparison, compare_losses
from supertuner.tools.baseline.record import MeasuredJob, MeasuredStep

DEFAULT_LIMIT: Final = 0.05
START_LIMIT: Final = 0.20
"""The limit for start-up times is coarser: there is one per process, and much of it is reading files."""
MIN_MEMORY_DIFFERENCE: Final = 16 * MIB
"""Smaller differences of peak memory are noise and are ignored."""
WARMUP_SHARE: Final = 0.05
BLOCK_COUNT: Final = 20
QUICKEST_SHARE: Final = 0.1
MIN_STEPS_OF_KIND: Final = 5
"""The quickest tenth of a kind of step (samples, expert) is used only if there are at least this many such steps."""
COLD_TURN_STEPS: Final = 4
"""In turns of at least this many steps the first step of each turn is excluded, because the CPU caches are cold."""


@dataclass(frozen=True, slots=True)
class ComparisonTerms:
    """How two sides are compared."""

    turn_steps: int
    """Positive: job i of both sides ran in turns of this many steps. 0: job i of both sides ran one after the other.
    Negative: the sides were measured independently."""
    limit: float = DEFAULT_LIMIT
    looks: int = 1
    """How many times the result may be judged, with more rounds each time."""
    prefer_quickest: bool = False
    """Compare the quickest steps whenever their interval is narrower than that of the medians."""


class RegressionVerdict(StrEnum):
    WORSE = "worse"
    UNDECIDED = "undecided"
    SAME = "no worse"
    BETTER = "better"
    UNJUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of both sides; a larger value is worse."""

    name: str
    unit: str
    """`s`, `s/sample` or `bytes`; `×` for a ratio of ratios."""
    old: float
    new: float
    interval: RatioInterval
    """New divided by old."""
    limit: float
    verdict: RegressionVerdict
    note: str = ""


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    figures: tuple[ComparedFigure, ...]
    losses: LossComparison
    hints: str | None
    """Outcomes of residency hints that got worse; None if none did."""
    rounds: int
    method: str
    """How both sides were measured."""
    notes: tuple[str, ...] = ()
    times_comparable: bool = True
    """False for measurements from different machines or environments."""

    @property
    def verdict(self) -> RegressionVerdict:
        """The overall verdict."""
        if self.regressed:
            return RegressionVerdict.WORSE
        if self.undecided or not self.times_comparable:
            return RegressionVerdict.UNDECIDED
        return (
            RegressionVerdict.BETTER
            if any(figure.verdict is RegressionVerdict.BETTER for figure in self.figures)
            else RegressionVerdict.SAME
        )

    @property
    def worse(self) -> tuple[ComparedFigure, ...]:
        return tuple(figure for figure in self.figures if figure.verdict is RegressionVerdict.WORSE)

    @property
    def undecided(self) -> tuple[ComparedFigure, ...]:
        return tuple(figure for figure in self.figures if figure.verdict is RegressionVerdict.UNDECIDED)

    @property
    def losses_differ(self) -> bool:
        return self.losses.likeness is LossAgreement.DIFFERENT

    @property
    def regressed(self) -> bool:
        return bool(self.worse) or self.losses_differ or self.hints is not None


def judge_jobs(
    old: Sequence[MeasuredJob],
    new: Sequence[MeasuredJob],
    terms: ComparisonTerms,
    *,
    precision: str,
    method: str,
    notes: tuple[str, ...] = (),
) -> ComparisonResult:
    figures = [compare_step_time(old, new, terms), compare_sample_time(old, new, terms)]
    figures += [*compare_startup(old, new, terms), *compare_memory(old, new, terms)]
    losses = compare_losses(old, new, precision)
    return ComparisonResult(
        tuple(figures), losses, compare_hints(old[-1].hints, new[-1].hints), len(new), method, notes
    )


def judge_interval(ratio_interval: RatioInterval, limit: float) -> RegressionVerdict:
    log_limit = math.log1p(limit)
    if ratio_interval.middle > log_limit:
        return RegressionVerdict.WORSE if ratio_interval.low > 0 else RegressionVerdict.UNDECIDED
    if ratio_interval.high > log_limit and ratio_interval.high - ratio_interval.low > log_limit:
        return RegressionVerdict.UNDECIDED
    return (
        RegressionVerdict.BETTER
        if ratio_interval.middle < -log_limit and ratio_interval.high < 0
        else RegressionVerdict.SAME
    )


def compare_step_time(old: Sequence[MeasuredJob], new: Sequence[MeasuredJob], terms: ComparisonTerms) -> ComparedFigure:
    """The step time: medians over blocks of the ratio between each step and the same step of the other side."""
    unit, value_of = _step_measure(old[0], new[0])
    ratio_interval = _ratio_interval_of_steps(
        old, new, terms, lambda job: [value_of(step) for step in job.steps], sums=False
    )
    a, b = (
        statistics.median([value_of(step) for job in side for step in _steps_after_warmup(job)]) for side in (old, new)
    )
    figure = ComparedFigure(
        "step",
        unit,
        a,
        b,
        ratio_interval,
        terms.limit,
        judge_interval(ratio_interval, terms.limit),
        "median, from the first batch to the weight update",
    )
    return _judge_by_quickest_steps(figure, old, new, terms, value_of)


def compare_sample_time(
    old: Sequence[MeasuredJob], new: Sequence[MeasuredJob], terms: ComparisonTerms
) -> ComparedFigure:
    """The wall time between steps per sample, which determines how long a whole run takes."""
    ratio_interval = _ratio_interval_of_steps(
        old, new, terms, lambda job: [step.wall_s / step.window for step in job.steps], sums=True
    )
    a, b = (statistics.median([1 / job.samples_per_s for job in side]) for side in (old, new))
    note = "includes logging, saving and validation between steps"
    figure = ComparedFigure(
        "time per sample",
        "s/sample",
        a,
        b,
        ratio_interval,
        terms.limit,
        judge_interval(ratio_interval, terms.limit),
        note,
    )
    return _judge_by_quickest_steps(figure, old, new, terms, lambda step: step.wall_s / step.window)


def compare_startup(
    old: Sequence[MeasuredJob], new: Sequence[MeasuredJob], terms: ComparisonTerms
) -> list[ComparedFigure]:
    """Time from the command to the first step; starts with ready data are compared separately from cold ones."""
    limit = max(terms.limit, START_LIMIT)
    for cold in (False, True):
        sides = [[job.start.first_step_s for job in side if job.start.cold is cold] for side in (old, new)]
        if all(sides):
            ratio_interval = _ratio_interval_of_sides(sides, terms.looks)
            note = "from the command to the first step, " + ("with data encoding" if cold else "data ready")
            a, b = (statistics.median(side) for side in sides)
            figure_verdict = (
                judge_interval(ratio_interval, limit) if min(map(len, sides)) > 1 else RegressionVerdict.UNJUDGED
            )
            reported_verdict = (
                RegressionVerdict.UNJUDGED if figure_verdict is RegressionVerdict.UNDECIDED else figure_verdict
            )
            return [ComparedFigure("start", "s", a, b, ratio_interval, limit, reported_verdict, note)]
    return []


def compare_memory(
    old: Sequence[MeasuredJob], new: Sequence[MeasuredJob], terms: ComparisonTerms
) -> list[ComparedFigure]:
    """Peak memory by kind, for kinds that both sides report and that exceed MIN_MEMORY_DIFFERENCE."""
    figures = []
    for kind in dict.fromkeys(kind for job in (*old, *new) for kind in job.peaks):
        sides = [[job.peaks[kind] for job in side if job.peaks.get(kind)] for side in (old, new)]
        if not all(sides) or max(map(max, sides)) < MIN_MEMORY_DIFFERENCE:
            continue
        a, b = (statistics.median(side) for side in sides)
        ratio_interval = _ratio_interval_of_sides(sides, terms.looks)
        figure_verdict = (
            judge_interval(ratio_interval, terms.limit)
            if abs(b - a) >= MIN_MEMORY_DIFFERENCE
            else RegressionVerdict.SAME
        )
        figures.append(ComparedFigure(f"peak {kind}", "bytes", a, b, ratio_interval, terms.limit, figure_verdict))
    return sorted(figures, key=lambda figure: -figure.old)


def compare_hints(old: Mapping[str, int], new: Mapping[str, int]) -> str | None:
    """Residency hints that are refused or fail more often than before, as text; None if there are none."""
    worse = [
        f"{status}: {new[status]:,} ({old.get(status, 0):,} before)"
        for status in ("refused", "error")
        if new.get(status, 0) > old.get(status, 0)
    ]
    return "; ".join(worse) or None


def _ratio_interval_of_steps(
    old: Sequence[MeasuredJob],
    new: Sequence[MeasuredJob],
    terms: ComparisonTerms,
    values: Callable[[MeasuredJob], list[float]],
    *,
    sums: bool,
) -> RatioInterval:
    turn_steps = terms.turn_steps
    length = min(len(job.steps) for job in (*old, *new))
    step_indices = _counted_step_indices(length, turn_steps)
    size = max(turn_steps, 1) if not sums and turn_steps > 0 else max(1, len(step_indices) // BLOCK_COUNT)
    if turn_steps >= 0:
        pairs = [
            _block_log_ratios(values(b), values(a), step_indices, size, sums) for a, b in zip(old, new, strict=True)
        ]
        return confidence_interval(pairs, terms.looks)
    typical = [statistics.median(column) for column in zip(*(values(job)[:length] for job in old), strict=True)]
    sides = [
        confidence_interval(
            [_block_log_ratios(values(job), typical, step_indices, size, sums) for job in side], terms.looks
        )
        for side in (new, old)
    ]
    return sides[0].minus(sides[1])


def _judge_by_quickest_steps(
    figure: ComparedFigure,
    old: Sequence[MeasuredJob],
    new: Sequence[MeasuredJob],
    terms: ComparisonTerms,
    value_of: Callable[[MeasuredStep], float],
) -> ComparedFigure:
    """The figure judged by its quickest steps if its median is undecided (or, with `prefer_quickest`, less precise)."""
    if (figure.verdict is not RegressionVerdict.UNDECIDED and not terms.prefer_quickest) or min(len(old), len(new)) < 2:
        return figure
    sides = [[_quickest_step_time(job, value_of) for job in side] for side in (old, new)]
    if not all(value for side in sides for value in side):
        return figure
    if terms.turn_steps >= 0:
        ratio_interval = confidence_interval([[math.log(b / a)] for a, b in zip(*sides, strict=True)], terms.looks)
    else:
        ratio_interval = _ratio_interval_of_sides(sides, terms.looks)
    figure_verdict = judge_interval(ratio_interval, figure.limit)
    if (
        figure_verdict is RegressionVerdict.UNDECIDED
        if not terms.prefer_quickest
        else ratio_interval.width > figure.interval.width
    ):
        return figure
    a, b = (statistics.median(side) for side in sides)
    note = f"quickest {QUICKEST_SHARE:.0%} of steps" + (
        "" if terms.prefer_quickest else ", because other processes disturbed the median too much"
    )
    return ComparedFigure(figure.name, figure.unit, a, b, ratio_interval, figure.limit, figure_verdict, note)


def _quickest_step_time(job: MeasuredJob, value_of: Callable[[MeasuredStep], float]) -> float:
    """The 10 % quantile of each frequent kind of step, averaged over those kinds by their number of steps; 0 if no kind
    is frequent."""
    kinds: dict[tuple[int, str], list[float]] = {}
    for step in _steps_after_warmup(job):
        kinds.setdefault((step.window, step.expert), []).append(value_of(step))
    frequent = [values for values in kinds.values() if len(values) >= MIN_STEPS_OF_KIND]
    total = sum(map(len, frequent))
    return sum(len(values) * quantile(values, QUICKEST_SHARE) for values in frequent) / total if total else 0.0


def _block_log_ratios(
    new: Sequence[float], old: Sequence[float], step_indices: Iterable[int], size: int, sums: bool
) -> list[float]:
    """Logarithm of the ratio of each block: the median of step-by-step ratios, or the ratio of sums."""
    indices = list(step_indices)
    if not sums:
        return reduce_blocks(log_values([new[at] / old[at] for at in indices]), size)
    above = reduce_blocks([new[at] for at in indices], size, sums=True)
    below = reduce_blocks([old[at] for at in indices], size, sums=True)
    return log_values([a / b for a, b in zip(above, below, strict=True)])


def _counted_step_indices(length: int, turn_steps: int) -> list[int]:
    """Indices of the steps that are compared: without warm-up, and without the cold first step of each turn."""
    cold_turns = turn_steps >= COLD_TURN_STEPS
    indices = [at for at in range(_warmup_steps(length), length) if not (cold_turns and at % turn_steps == 0)]
    return indices or list(range(length))


def _ratio_interval_of_sides(sides: Sequence[Sequence[float]], looks: int) -> RatioInterval:
    """The interval of the ratio for figures with one value per process; the sides are treated as independent."""
    old, new = (confidence_interval([[math.log(value)] for value in side], looks) for side in sides)
    return new.minus(old)


def _step_measure(old: MeasuredJob, new: MeasuredJob) -> tuple[str, Callable[[MeasuredStep], float]]:
    """(unit, value of a step): seconds per step if both sides have the same schedule, otherwise seconds per sample."""
    length = min(len(old.steps), len(new.steps))
    if old.schedule[:length] == new.schedule[:length]:
        return "s", lambda step: step.seconds
    return "s/sample", lambda step: step.seconds / step.window


def _steps_after_warmup(job: MeasuredJob) -> tuple[MeasuredStep, ...]:
    return job.steps[_warmup_steps(len(job.steps)) :]


def _warmup_steps(length: int) -> int:
    """Number of steps at the beginning that are excluded."""
    return min(max(1, math.ceil(length * WARMUP_SHARE)), length - 1)

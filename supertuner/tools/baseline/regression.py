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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from supertuner.core.types import MIB
from supertuner.tools.baseline.confidence_interval import RatioInterval, confidence_interval, quantile, reduce_blocks
from supertuner.tools.baseline.loss_comparison import LossAgreement, LossComparison, compare_losses, same_schedule
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
    verdict: RegressionVerdict = RegressionVerdict.UNJUDGED
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
        return RegressionVerdict.BETTER if self.better else RegressionVerdict.SAME

    @property
    def worse(self) -> list[ComparedFigure]:
        return self._figures_judged(RegressionVerdict.WORSE)

    @property
    def undecided(self) -> list[ComparedFigure]:
        return self._figures_judged(RegressionVerdict.UNDECIDED)

    @property
    def better(self) -> list[ComparedFigure]:
        return self._figures_judged(RegressionVerdict.BETTER)

    def _figures_judged(self, verdict: RegressionVerdict) -> list[ComparedFigure]:
        return [figure for figure in self.figures if figure.verdict is verdict]

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
    sides = JobSides(old, new, terms)
    figures = (sides.step_time(), sides.sample_time(), *sides.startup(), *sides.peak_memory())
    hints = compare_hints(old[-1].hints, new[-1].hints)
    return ComparisonResult(figures, compare_losses(old, new, precision), hints, len(new), method, notes)


def judge_interval(interval: RatioInterval, limit: float) -> RegressionVerdict:
    log_limit = math.log1p(limit)
    if interval.middle > log_limit:
        return RegressionVerdict.WORSE if interval.low > 0 else RegressionVerdict.UNDECIDED
    if interval.high > log_limit and interval.width > log_limit:
        return RegressionVerdict.UNDECIDED
    is_better = interval.middle < -log_limit and interval.high < 0
    return RegressionVerdict.BETTER if is_better else RegressionVerdict.SAME


@dataclass(frozen=True, slots=True)
class JobSides:
    """The jobs of both sides, and the figures of their comparison."""

    old: Sequence[MeasuredJob]
    new: Sequence[MeasuredJob]
    terms: ComparisonTerms

    @property
    def both(self) -> tuple[Sequence[MeasuredJob], Sequence[MeasuredJob]]:
        return self.old, self.new

    def step_time(self) -> ComparedFigure:
        """The step time: medians over blocks of the ratio between each step and the same step of the other side.

        In seconds per step if both sides have the same schedule, otherwise in seconds per sample.
        """

        def value_of(step: MeasuredStep) -> float:
            return step.seconds if unit == "s" else step.seconds / step.window

        unit = "s" if same_schedule(self.old[0], self.new[0]) else "s/sample"
        interval = self._interval_of_steps(value_of, sums=False)
        values = ([value_of(step) for job in side for step in _steps_after_warmup(job)] for side in self.both)
        a, b = map(statistics.median, values)
        note = "median, from the first batch to the weight update"
        return self._judge_steps(ComparedFigure("step", unit, a, b, interval, self.terms.limit, note=note), value_of)

    def sample_time(self) -> ComparedFigure:
        """The wall time between steps per sample, which determines how long a whole run takes."""

        def value_of(step: MeasuredStep) -> float:
            return step.wall_s / step.window

        interval = self._interval_of_steps(value_of, sums=True)
        a, b = (statistics.median([1 / job.samples_per_s for job in side]) for side in self.both)
        note = "includes logging, saving and validation between steps"
        figure = ComparedFigure("time per sample", "s/sample", a, b, interval, self.terms.limit, note=note)
        return self._judge_steps(figure, value_of)

    def startup(self) -> list[ComparedFigure]:
        """Time from the command to the first step; starts with ready data are compared separately from cold ones."""
        limit = max(self.terms.limit, START_LIMIT)
        for cold in (False, True):
            sides = [[job.start.first_step_s for job in side if job.start.cold is cold] for side in self.both]
            if all(sides):
                note = "from the command to the first step, " + ("with data encoding" if cold else "data ready")
                figure = self._figure_of_values("start", "s", sides, limit, note)
                if min(map(len, sides)) < 2 or figure.verdict is RegressionVerdict.UNDECIDED:
                    figure = replace(figure, verdict=RegressionVerdict.UNJUDGED)
                return [figure]
        return []

    def peak_memory(self) -> list[ComparedFigure]:
        """Peak memory by kind, for kinds that both sides report and that exceed MIN_MEMORY_DIFFERENCE."""
        figures = []
        for kind in dict.fromkeys(kind for job in (*self.old, *self.new) for kind in job.peaks):
            sides = [[job.peaks[kind] for job in side if job.peaks.get(kind)] for side in self.both]
            if not all(sides) or max(map(max, sides)) < MIN_MEMORY_DIFFERENCE:
                continue
            figure = self._figure_of_values(f"peak {kind}", "bytes", sides, self.terms.limit)
            if abs(figure.new - figure.old) < MIN_MEMORY_DIFFERENCE:
                figure = replace(figure, verdict=RegressionVerdict.SAME)
            figures.append(figure)
        return sorted(figures, key=lambda figure: -figure.old)

    def _figure_of_values(
        self, name: str, unit: str, sides: Sequence[Sequence[float]], limit: float, note: str = ""
    ) -> ComparedFigure:
        """A figure with one value per process; the sides are treated as independent."""
        a, b = (statistics.median(side) for side in sides)
        interval = self._interval_of_values(sides)
        return ComparedFigure(name, unit, a, b, interval, limit, judge_interval(interval, limit), note)

    def _interval_of_values(self, sides: Sequence[Sequence[float]]) -> RatioInterval:
        logs = ([[math.log(value)] for value in side] for side in sides)
        old, new = (confidence_interval(values, self.terms.looks) for values in logs)
        return new.minus(old)

    def _interval_of_steps(self, value_of: Callable[[MeasuredStep], float], *, sums: bool) -> RatioInterval:
        turn_steps, looks = self.terms.turn_steps, self.terms.looks
        length = min(len(job.steps) for job in (*self.old, *self.new))
        indices = _counted_step_indices(length, turn_steps)
        size = turn_steps if not sums and turn_steps > 0 else max(1, len(indices) // BLOCK_COUNT)
        old, new = ([[value_of(step) for step in job.steps] for job in side] for side in self.both)
        if turn_steps >= 0:
            pairs = zip(new, old, strict=True)
            return confidence_interval([_block_log_ratios(b, a, indices, size, sums) for b, a in pairs], looks)
        typical = [statistics.median(column) for column in zip(*(values[:length] for values in old), strict=True)]
        intervals = [
            confidence_interval([_block_log_ratios(values, typical, indices, size, sums) for values in side], looks)
            for side in (new, old)
        ]
        return intervals[0].minus(intervals[1])

    def _judge_steps(self, figure: ComparedFigure, value_of: Callable[[MeasuredStep], float]) -> ComparedFigure:
        """The figure judged by its median, or by its quickest steps if the median is undecided (or, with
        `prefer_quickest`, less precise)."""
        figure = replace(figure, verdict=judge_interval(figure.interval, figure.limit))
        prefer_quickest = self.terms.prefer_quickest
        is_undecided = figure.verdict is RegressionVerdict.UNDECIDED
        if not (is_undecided or prefer_quickest) or min(len(self.old), len(self.new)) < 2:
            return figure
        sides = [[_quickest_step_time(job, value_of) for job in side] for side in self.both]
        if not all(value for side in sides for value in side):
            return figure
        if self.terms.turn_steps >= 0:
            log_ratios = [[math.log(b / a)] for a, b in zip(*sides, strict=True)]
            interval = confidence_interval(log_ratios, self.terms.looks)
        else:
            interval = self._interval_of_values(sides)
        verdict = judge_interval(interval, figure.limit)
        is_wider = interval.width > figure.interval.width
        if is_wider if prefer_quickest else verdict is RegressionVerdict.UNDECIDED:
            return figure
        a, b = (statistics.median(side) for side in sides)
        reason = "" if prefer_quickest else ", because other processes disturbed the median too much"
        note = f"quickest {QUICKEST_SHARE:.0%} of steps{reason}"
        return replace(figure, old=a, new=b, interval=interval, verdict=verdict, note=note)


def compare_hints(old: Mapping[str, int], new: Mapping[str, int]) -> str | None:
    """Residency hints that are refused or fail more often than before, as text; None if there are none."""
    worse = [
        f"{status}: {new[status]:,} ({old.get(status, 0):,} before)"
        for status in ("refused", "error")
        if new.get(status, 0) > old.get(status, 0)
    ]
    return "; ".join(worse) or None


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
    new: Sequence[float], old: Sequence[float], indices: Sequence[int], size: int, sums: bool
) -> list[float]:
    """Logarithm of the ratio of each block: the median of step-by-step ratios, or the ratio of sums."""
    if not sums:
        return reduce_blocks([math.log(new[at] / old[at]) for at in indices], size)
    above, below = (reduce_blocks([values[at] for at in indices], size, sums=True) for values in (new, old))
    return [math.log(a / b) for a, b in zip(above, below, strict=True)]


def _counted_step_indices(length: int, turn_steps: int) -> list[int]:
    """Indices of the steps that are compared: without warm-up, and without the cold first step of each turn."""
    cold_turns = turn_steps >= COLD_TURN_STEPS
    indices = [at for at in range(_warmup_steps(length), length) if not (cold_turns and at % turn_steps == 0)]
    return indices or list(range(length))


def _steps_after_warmup(job: MeasuredJob) -> tuple[MeasuredStep, ...]:
    return job.steps[_warmup_steps(len(job.steps)) :]


def _warmup_steps(length: int) -> int:
    """Number of steps at the beginning that are excluded."""
    return min(max(1, math.ceil(length * WARMUP_SHARE)), length - 1)

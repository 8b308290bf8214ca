"""What got worse, what did not, and what the noise does not let tell: measured jobs in, judged figures out. Pure.

    worse       the ratio is above the limit, and its interval lies above 1: it is not noise
    undecided   it may be above the limit and may not: the interval is too wide
    no worse    neither; `better` where it is below the limit's inverse, and surely below 1
    not judged  a start, where the noise is too large: it is told, and decides nothing

Others on the machine make steps longer and never shorter. So where they disturb so much that medians cannot tell, the
quickest tenth of steps does, of each kind of step. Losses are judged apart from times: a step that is slower and one
that learns something else are different findings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supertuner.core.types import MIB
from supertuner.tools.baseline.losses import Likeness, Losses, compare
from supertuner.tools.baseline.record import Job, Step
from supertuner.tools.baseline.statistics import Interval, blocks, interval, logs, quantile

LIMIT: Final = 0.05
START_LIMIT: Final = 0.20
"""Of a start there is one figure per process, and much of it is files that are read: it is judged more coarsely."""
LEAST_BYTES: Final = 16 * MIB
"""Memory that comes and goes without a reason of ours; a difference below is none."""
WARM_UP_SHARE: Final = 0.05
BLOCKS: Final = 20
QUICK_SHARE: Final = 0.1
ALIKE: Final = 5
"""Steps of one kind (samples, expert) that there must be for their quickest tenth to say anything."""
COLD_TURN_STEPS: Final = 4
"""In turns of at least so many steps the first of each is left out: the other process had the CPU's caches."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How two sides are held against each other."""

    turn_steps: int
    """Both ran in pairs, the first with the first, in turns of so many steps (0: one after the other, in pairs all the
    same; below 0: not together)."""
    limit: float = LIMIT
    looks: int = 1
    """How many times it may be judged, with more rounds each time, until it is decided."""
    quick: bool = False
    """By the quickest steps wherever these are the better known."""


class Verdict(StrEnum):
    WORSE = "worse"
    UNDECIDED = "undecided"
    SAME = "no worse"
    BETTER = "better"
    UNJUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both sides; more of it is worse."""

    name: str
    unit: str
    """`s`, `s/sample` or `bytes`; `×` for a ratio of ratios."""
    old: float
    new: float
    found: Interval
    """New over old."""
    limit: float
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    figures: tuple[Figure, ...]
    losses: Losses
    hints: str | None
    """What became worse of residency hints, if anything did."""
    rounds: int
    how: str
    """How both sides were measured."""
    notes: tuple[str, ...] = ()
    times: bool = True
    """Whether times could be compared at all: they cannot between machines."""

    @property
    def verdict(self) -> Verdict:
        """Of all together."""
        if self.regressed:
            return Verdict.WORSE
        if self.undecided or not self.times:
            return Verdict.UNDECIDED
        return Verdict.BETTER if any(one.verdict is Verdict.BETTER for one in self.figures) else Verdict.SAME

    @property
    def worse(self) -> tuple[Figure, ...]:
        return tuple(one for one in self.figures if one.verdict is Verdict.WORSE)

    @property
    def undecided(self) -> tuple[Figure, ...]:
        return tuple(one for one in self.figures if one.verdict is Verdict.UNDECIDED)

    @property
    def learns_otherwise(self) -> bool:
        return self.losses.likeness is Likeness.DIFFERENT

    @property
    def regressed(self) -> bool:
        return bool(self.worse) or self.learns_otherwise or self.hints is not None


def judge(
    old: Sequence[Job],
    new: Sequence[Job],
    terms: Terms,
    *,
    precision: str,
    how: str,
    notes: tuple[str, ...] = (),
) -> Judged:
    figures = [step_time(old, new, terms), sample_time(old, new, terms)]
    figures += [*start_up(old, new, terms), *memory(old, new, terms)]
    losses = compare(old, new, precision)
    return Judged(tuple(figures), losses, hints(old[-1].hints, new[-1].hints), len(new), how, notes)


def verdict(found: Interval, limit: float) -> Verdict:
    most = math.log1p(limit)
    if found.middle > most:
        return Verdict.WORSE if found.low > 0 else Verdict.UNDECIDED
    if found.high > most and found.high - found.low > most:
        return Verdict.UNDECIDED
    return Verdict.BETTER if found.middle < -most and found.high < 0 else Verdict.SAME


def step_time(old: Sequence[Job], new: Sequence[Job], terms: Terms) -> Figure:
    """The step itself: medians of blocks, step by step against the same step of the other side."""
    unit, of = _per_step(old[0], new[0])
    found = _both(old, new, terms, lambda job: [of(step) for step in job.steps], sums=False)
    a, b = (statistics.median([of(step) for job in side for step in _warm(job)]) for side in (old, new))
    figure = Figure(
        "step", unit, a, b, found, terms.limit, verdict(found, terms.limit), "median, from first batch to update"
    )
    return _settled(figure, old, new, terms, of)


def sample_time(old: Sequence[Job], new: Sequence[Job], terms: Terms) -> Figure:
    """All of the time between two steps, by sample: what a whole run takes."""
    found = _both(old, new, terms, lambda job: [step.wall_s / step.window for step in job.steps], sums=True)
    a, b = (statistics.median([1 / job.samples_per_s for job in side]) for side in (old, new))
    note = "with logs, saves and validations between steps"
    figure = Figure("time per sample", "s/sample", a, b, found, terms.limit, verdict(found, terms.limit), note)
    return _settled(figure, old, new, terms, lambda step: step.wall_s / step.window)


def start_up(old: Sequence[Job], new: Sequence[Job], terms: Terms) -> list[Figure]:
    """From the command to the first step, with like against like: data that were ready, or that were not."""
    limit = max(terms.limit, START_LIMIT)
    for cold in (False, True):
        sides = [[job.start.first_step_s for job in side if job.start.cold is cold] for side in (old, new)]
        if all(sides):
            found = _of_each(sides, terms.looks)
            note = "from the command to the first step, " + ("data encoded on the way" if cold else "data ready")
            a, b = (statistics.median(side) for side in sides)
            judged = verdict(found, limit) if min(map(len, sides)) > 1 else Verdict.UNJUDGED
            known = Verdict.UNJUDGED if judged is Verdict.UNDECIDED else judged
            return [Figure("start", "s", a, b, found, limit, known, note)]
    return []


def memory(old: Sequence[Job], new: Sequence[Job], terms: Terms) -> list[Figure]:
    """Peaks by kind, of kinds that both sides know and that are large enough to speak of."""
    found = []
    for kind in dict.fromkeys(kind for job in (*old, *new) for kind in job.peaks):
        sides = [[job.peaks[kind] for job in side if job.peaks.get(kind)] for side in (old, new)]
        if not all(sides) or max(map(max, sides)) < LEAST_BYTES:
            continue
        a, b = (statistics.median(side) for side in sides)
        ratio = _of_each(sides, terms.looks)
        judged = verdict(ratio, terms.limit) if abs(b - a) >= LEAST_BYTES else Verdict.SAME
        found.append(Figure(f"peak {kind}", "bytes", a, b, ratio, terms.limit, judged))
    return sorted(found, key=lambda figure: -figure.old)


def hints(old: Mapping[str, int], new: Mapping[str, int]) -> str | None:
    """Residency hints that are refused, or fail, and were not before."""
    worse = [
        f"{status}: {new[status]:,} ({old.get(status, 0):,} before)"
        for status in ("refused", "error")
        if new.get(status, 0) > old.get(status, 0)
    ]
    return "; ".join(worse) or None


def _both(
    old: Sequence[Job], new: Sequence[Job], terms: Terms, values: Callable[[Job], list[float]], *, sums: bool
) -> Interval:
    turn_steps = terms.turn_steps
    length = min(len(job.steps) for job in (*old, *new))
    kept = _kept(length, turn_steps)
    size = max(turn_steps, 1) if not sums and turn_steps > 0 else max(1, len(kept) // BLOCKS)
    if turn_steps >= 0:
        pairs = [_joined(values(b), values(a), kept, size, sums) for a, b in zip(old, new, strict=True)]
        return interval(pairs, terms.looks)
    typical = [statistics.median(column) for column in zip(*(values(job)[:length] for job in old), strict=True)]
    sides = [
        interval([_joined(values(job), typical, kept, size, sums) for job in side], terms.looks) for side in (new, old)
    ]
    return sides[0].minus(sides[1])


def _settled(
    figure: Figure, old: Sequence[Job], new: Sequence[Job], terms: Terms, of: Callable[[Step], float]
) -> Figure:
    """The figure, judged by undisturbed steps if its median does not let tell, or, if `quick`, tells less well."""
    if (figure.verdict is not Verdict.UNDECIDED and not terms.quick) or min(len(old), len(new)) < 2:
        return figure
    sides = [[_undisturbed(job, of) for job in side] for side in (old, new)]
    if not all(value for side in sides for value in side):
        return figure
    if terms.turn_steps >= 0:
        found = interval([[math.log(b / a)] for a, b in zip(*sides, strict=True)], terms.looks)
    else:
        found = _of_each(sides, terms.looks)
    judged = verdict(found, figure.limit)
    if judged is Verdict.UNDECIDED if not terms.quick else found.width > figure.found.width:
        return figure
    a, b = (statistics.median(side) for side in sides)
    note = f"of the quickest {QUICK_SHARE:.0%} of steps" + (
        "" if terms.quick else ": others disturbed the median too much"
    )
    return Figure(figure.name, figure.unit, a, b, found, figure.limit, judged, note)


def _undisturbed(job: Job, of: Callable[[Step], float]) -> float:
    """The quickest tenth of each kind of step, on average over all steps of kinds that are frequent; 0: none is."""
    kinds: dict[tuple[int, str], list[float]] = {}
    for step in _warm(job):
        kinds.setdefault((step.window, step.expert), []).append(of(step))
    frequent = [values for values in kinds.values() if len(values) >= ALIKE]
    total = sum(map(len, frequent))
    return sum(len(values) * quantile(values, QUICK_SHARE) for values in frequent) / total if total else 0.0


def _joined(new: Sequence[float], old: Sequence[float], kept: Iterable[int], size: int, sums: bool) -> list[float]:
    """Logarithms of ratios by block: of medians step by step, or of sums."""
    places = list(kept)
    if not sums:
        return blocks(logs([new[at] / old[at] for at in places]), size)
    above = blocks([new[at] for at in places], size, sums=True)
    below = blocks([old[at] for at in places], size, sums=True)
    return logs([a / b for a, b in zip(above, below, strict=True)])


def _kept(length: int, turn_steps: int) -> list[int]:
    """Places of the steps that count."""
    cold_turns = turn_steps >= COLD_TURN_STEPS
    found = [at for at in range(_warm_up(length), length) if not (cold_turns and at % turn_steps == 0)]
    return found or list(range(length))


def _of_each(sides: Sequence[Sequence[float]], looks: int) -> Interval:
    """Of figures of which each process has one; both sides by themselves."""
    old, new = (interval([[math.log(value)] for value in side], looks) for side in sides)
    return new.minus(old)


def _per_step(old: Job, new: Job) -> tuple[str, Callable[[Step], float]]:
    """By step where both were given the same steps, by sample where not."""
    length = min(len(old.steps), len(new.steps))
    if old.schedule[:length] == new.schedule[:length]:
        return "s", lambda step: step.seconds
    return "s/sample", lambda step: step.seconds / step.window


def _warm(job: Job) -> tuple[Step, ...]:
    return job.steps[_warm_up(len(job.steps)) :]


def _warm_up(length: int) -> int:
    """Steps at the beginning that are left out."""
    return min(max(1, math.ceil(length * WARM_UP_SHARE)), length - 1)

"""What steps and a whole run take on a machine: modelled from tables, traces and the machine's rates. Pure.

Times are at least what is said: rates are the maker's, work is counted and not measured, and nothing waits for files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from supertuner.memory.machines import Machine
from supertuner.optim.schedule import Course
from supertuner.plan.forecast.context import plain_seconds
from supertuner.plan.forecast.duration import StepTime, Windows, between, mean_time, training_s, windows
from supertuner.plan.forecast.model import Pace, Timing
from supertuner.plan.placement.choice import Choice
from supertuner.plan.placement.plan import Plan
from supertuner.plan.placement.plan_step import judged
from supertuner.plan.placement.roofline import bound
from supertuner.plan.placement.step_table import StepTable, Work
from supertuner.plan.placement.throughput import Limits, Rates
from supertuner.plan.trace.record import Trace

UNLIMITED = 1 << 60
"""Of a machine whose memory nobody knows, the bound of a step in which everything fits."""


@dataclass(frozen=True, slots=True)
class Steps:
    """One expert's steps, and how they are run."""

    table: StepTable
    """At the shape that needs the most, for the largest window."""
    choice: Choice
    """Without a plan."""
    plan: Plan | None = None
    """With one."""
    tokens: int = 1
    others: Mapping[int, StepTable] = field(default_factory=dict)
    """Tokens → tables of other shapes."""

    def seconds(self, table: StepTable, machine: Machine, limits: Limits | None, rates: Rates) -> float:
        """Of a window. What does not fit is timed as if it did."""
        if self.plan is not None and self.plan.fits and limits is not None:
            found = judged(table, self.plan, machine, limits, rates).seconds
            if math.isfinite(found):
                return found
        return plain_seconds(table, self.choice, rates)

    def time(self, table: StepTable, machine: Machine, limits: Limits | None, rates: Rates) -> StepTime:
        one = self.seconds(replace(table, micro_batches=1), machine, limits, rates)
        two = self.seconds(replace(table, micro_batches=2), machine, limits, rates)
        micro = min(one, max(0.0, two - one))
        return StepTime(micro, one - micro)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Work that is done so many times in a run: pieces one after the other."""

    pieces: tuple[Work, ...]
    times: float

    @classmethod
    def of(cls, trace: Trace, times: float) -> Repeated:
        return cls(tuple(stretch.work for stretch in trace.stretches), times)

    def seconds(self, rates: Rates) -> float:
        return self.times * sum(map(rates.seconds, self.pieces))


@dataclass(frozen=True, eq=False, slots=True)
class Whole:
    """Everything that a run does."""

    experts: tuple[Steps, ...]
    shares: Mapping[int, float]
    """Tokens of a sample → how much of the draws; together 1."""
    course: Course | None
    batch_size: int
    encoding: tuple[Repeated, ...] | None
    """None: how often is not known."""
    sampling: tuple[Repeated, ...] | None
    switch_every: int = 1
    """Steps after which another expert has its turn."""
    left_out: tuple[str, ...] = ()


def timing(whole: Whole, machine: Machine, limits: Limits | None, rates: Rates, shares: Sequence[float]) -> Timing:
    """At each of `shares` of the machine's rates."""
    course = whole.course
    parts = () if course is None else windows(course, whole.batch_size)
    table = whole.experts[0].table
    window = max((part.samples for part in parts), default=table.micro_batches * whole.batch_size)
    return Timing(
        paces=tuple(_pace(whole, parts, machine, limits, replace(rates, compute_share=share)) for share in shares),
        window=window,
        micro_batches=table.micro_batches,
        first_window=parts[0].samples if parts else window,
        steps=None if course is None else course.total_steps,
        samples=None if course is None else course.total_samples,
        left_out=whole.left_out,
    )


def _pace(whole: Whole, parts: Sequence[Windows], machine: Machine, limits: Limits | None, rates: Rates) -> Pace:
    slowest = max(whole.experts, key=lambda steps: steps.seconds(steps.table, machine, limits, rates))
    least = bound(slowest.table, rates, limits or Limits(UNLIMITED, None))
    times = [_mean(steps, whole.shares, machine, limits, rates) for steps in whole.experts]
    bounded = math.isfinite(least.seconds)
    return Pace(
        compute_share=rates.compute_share,
        step_s=slowest.seconds(slowest.table, machine, limits, rates),
        bound_s=least.seconds if bounded else least.compute_s,
        bounded_by=least.by if bounded else "compute, if there were room",
        training_s=None if whole.course is None else training_s(parts, times) + _switching_s(whole, rates),
        encoding_s=_seconds(whole.encoding, rates),
        sampling_s=_seconds(whole.sampling, rates),
    )


def _mean(steps: Steps, shares: Mapping[int, float], machine: Machine, limits: Limits | None, rates: Rates) -> StepTime:
    """Over the shapes that are drawn: some were traced, the others lie between them."""
    known = {steps.tokens: steps.table, **steps.others}
    times = {tokens: steps.time(table, machine, limits, rates) for tokens, table in known.items()}
    micro = {tokens: time.micro_batch_s for tokens, time in times.items()}
    update = times[steps.tokens].update_s
    found = [StepTime(between(micro, tokens), update) for tokens in shares]
    return mean_time(found, list(shares.values()))


def _seconds(repeated: Sequence[Repeated] | None, rates: Rates) -> float | None:
    return None if repeated is None else sum(one.seconds(rates) for one in repeated)


def _switching_s(whole: Whole, rates: Rates) -> float:
    """Where experts wait in host memory, whoever has its turn is fetched first; what is frozen does not go back."""
    first = whole.experts[0]
    waits = first.plan is not None and first.plan.idle_at_home
    if not waits or len(whole.experts) < 2 or whole.course is None or not rates.to_device_bytes_s:
        return 0.0
    changes = whole.course.total_steps // whole.switch_every
    return changes * first.table.idle_bytes / (len(whole.experts) - 1) / rates.to_device_bytes_s

"""Modelled times of steps and of a whole run, from step tables, traces and the machine's rates. Pure.

The times are lower limits: the rates are the vendor's, work is counted instead of measured, and nothing waits for
files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from supertuner.optim.schedule import TrainingSchedule
from supertuner.plan.forecast import duration
from supertuner.plan.forecast.duration import StepTime, WindowGroup
from supertuner.plan.forecast.results import RunTiming, TimingScenario
from supertuner.plan.forecast.suggestion_baseline import seconds_without_plan
from supertuner.plan.placement.choice import PlacementChoice
from supertuner.plan.placement.make_plan import evaluate_plan
from supertuner.plan.placement.plan import MemoryPlan
from supertuner.plan.placement.roofline import step_time_bound
from supertuner.plan.placement.step_table import OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from supertuner.plan.trace.execution_trace import ExecutionTrace

UNLIMITED_BYTES = 1 << 60
"""GPU memory that is assumed for the time bound if its size is unknown: everything fits."""


@dataclass(frozen=True, slots=True)
class ExpertSteps:
    """The step tables of one expert, and how its steps run."""

    table: StepTable
    """The shape that needs the most memory, with the micro-batches of the largest window."""
    choice: PlacementChoice
    """How a step runs without a plan."""
    plan: MemoryPlan | None = None
    """The plan that the run follows; None: it follows none."""
    tokens: int = 1
    """Tokens of a sample in `table`."""
    tables_by_tokens: Mapping[int, StepTable] = field(default_factory=dict)
    """Tokens of a sample → tables of other shapes."""

    def window_seconds(self, table: StepTable, limits: MemoryLimits | None, rates: MachineRates) -> float:
        """Time of a window: under the plan, or without one if the plan does not fit this table. Memory is not checked
        without a plan."""
        if self.plan is not None and self.plan.fits and limits is not None:
            planned_seconds = evaluate_plan(table, self.plan, limits, rates).seconds
            if math.isfinite(planned_seconds):
                return planned_seconds
        return seconds_without_plan(table, self.choice, rates)

    def step_time(self, table: StepTable, limits: MemoryLimits | None, rates: MachineRates) -> StepTime:
        """The times of windows with one and with two micro-batches, split into a part per micro-batch and the rest."""
        one_s, two_s = (self.window_seconds(replace(table, micro_batches=n), limits, rates) for n in (1, 2))
        micro = min(one_s, max(0.0, two_s - one_s))
        return StepTime(micro, one_s - micro)

    def mean_step_time(
        self, token_shares: Mapping[int, float], limits: MemoryLimits | None, rates: MachineRates
    ) -> StepTime:
        """The mean over the shapes that are drawn: some were traced, the times of the others are interpolated."""
        tables = {self.tokens: self.table, **self.tables_by_tokens}
        times = {tokens: self.step_time(table, limits, rates) for tokens, table in tables.items()}
        micro = {tokens: time.micro_batch_s for tokens, time in times.items()}
        update = times[self.tokens].update_s
        drawn_times = [StepTime(duration.interpolate_by_tokens(micro, tokens), update) for tokens in token_shares]
        return duration.mean_step_time(drawn_times, list(token_shares.values()))


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """Work that a run repeats `repeats` times; its pieces run one after the other."""

    pieces: tuple[OperatorWork, ...]
    repeats: float

    @classmethod
    def from_trace(cls, trace: ExecutionTrace, repeats: float) -> RepeatedWork:
        return cls(tuple(span.work for span in trace.spans), repeats)

    def seconds(self, rates: MachineRates) -> float:
        return self.repeats * sum(map(rates.seconds, self.pieces))


@dataclass(frozen=True, eq=False, slots=True)
class RunWork:
    """Everything that a run computes."""

    experts: tuple[ExpertSteps, ...]
    token_shares: Mapping[int, float]
    """Tokens of a sample → share of the draws; the shares add up to 1."""
    schedule: TrainingSchedule | None
    batch_size: int
    encoding: tuple[RepeatedWork, ...] | None
    """None: the number of repetitions is unknown."""
    sampling: tuple[RepeatedWork, ...] | None
    switch_every: int = 1
    """Steps after which training switches to another expert."""
    left_out: tuple[str, ...] = ()


def forecast_timing(
    work: RunWork, limits: MemoryLimits | None, rates: MachineRates, compute_shares: Sequence[float]
) -> RunTiming:
    """One scenario for each of `compute_shares` of the machine's rates."""
    schedule = work.schedule
    groups = () if schedule is None else duration.group_windows(schedule, work.batch_size)
    table = work.experts[0].table
    window = max((group.samples for group in groups), default=table.micro_batches * work.batch_size)
    slower_rates = (replace(rates, compute_share=share) for share in compute_shares)
    return RunTiming(
        paces=tuple(_timing_scenario(work, groups, limits, slower) for slower in slower_rates),
        window=window,
        micro_batches=table.micro_batches,
        first_window=groups[0].samples if groups else window,
        steps=None if schedule is None else schedule.total_steps,
        samples=None if schedule is None else schedule.total_samples,
        left_out=work.left_out,
    )


def _timing_scenario(
    work: RunWork, groups: Sequence[WindowGroup], limits: MemoryLimits | None, rates: MachineRates
) -> TimingScenario:
    step_s, slowest = max(
        ((steps.window_seconds(steps.table, limits, rates), steps) for steps in work.experts), key=itemgetter(0)
    )
    bound = step_time_bound(slowest.table, rates, limits or MemoryLimits(UNLIMITED_BYTES, None))
    bounded = math.isfinite(bound.seconds)
    training_s = None
    if work.schedule is not None:
        times = [steps.mean_step_time(work.token_shares, limits, rates) for steps in work.experts]
        training_s = duration.training_seconds(groups, times) + _expert_switching_s(work, work.schedule, rates)
    return TimingScenario(
        compute_share=rates.compute_share,
        step_s=step_s,
        bound_s=bound.seconds if bounded else bound.compute_s,
        bounded_by=bound.limited_by if bounded else "compute, if it did fit",
        training_s=training_s,
        encoding_s=_total_seconds(work.encoding, rates),
        sampling_s=_total_seconds(work.sampling, rates),
    )


def _total_seconds(repeated_work: Sequence[RepeatedWork] | None, rates: MachineRates) -> float | None:
    return None if repeated_work is None else sum(one.seconds(rates) for one in repeated_work)


def _expert_switching_s(work: RunWork, schedule: TrainingSchedule, rates: MachineRates) -> float:
    """Time to fetch experts that the plan keeps in host memory, at every switch. Frozen weights are not copied back."""
    first, others = work.experts[0], len(work.experts) - 1
    if first.plan is None or not first.plan.idle_at_home or not others or not rates.to_device_bytes_s:
        return 0.0
    return schedule.total_steps // work.switch_every * first.table.idle_bytes / others / rates.to_device_bytes_s

"""Modelled times of steps and of a whole run, from step tables, traces and the machine's rates. Pure.

The times are lower limits: the rates are the vendor's, work is counted instead of measured, and nothing waits for
files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from supertuner.memory.machines import MachineSpec
from supertuner.optim.schedule import TrainingSchedule
from supertuner.plan.forecast.duration import (
    StepTime,
    WindowGroup,
    group_windows,
    interpolate_by_tokens,
    mean_step_time,
    training_seconds,
)
from supertuner.plan.forecast.results import RunTiming, TimingScenario
from supertuner.plan.forecast.suggestion_baseline import window_seconds_without_plan
from supertuner.plan.placement.choice import PlacementChoice
from supertuner.plan.placement.plan import MemoryPlan
from supertuner.plan.placement.plan_step import evaluate_plan
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

    def window_seconds(
        self, table: StepTable, machine: MachineSpec, limits: MemoryLimits | None, rates: MachineRates
    ) -> float:
        """Time of a window: under the plan, or without one if the plan does not fit this table. Memory is not checked
        without a plan."""
        if self.plan is not None and self.plan.fits and limits is not None:
            planned_seconds = evaluate_plan(table, self.plan, machine, limits, rates).seconds
            if math.isfinite(planned_seconds):
                return planned_seconds
        return window_seconds_without_plan(table, self.choice, rates)

    def step_time(
        self, table: StepTable, machine: MachineSpec, limits: MemoryLimits | None, rates: MachineRates
    ) -> StepTime:
        """The times of windows with one and with two micro-batches, split into a part per micro-batch and the rest."""
        one_micro_batch_s = self.window_seconds(replace(table, micro_batches=1), machine, limits, rates)
        two_micro_batches_s = self.window_seconds(replace(table, micro_batches=2), machine, limits, rates)
        micro = min(one_micro_batch_s, max(0.0, two_micro_batches_s - one_micro_batch_s))
        return StepTime(micro, one_micro_batch_s - micro)


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
    run_work: RunWork,
    machine: MachineSpec,
    limits: MemoryLimits | None,
    rates: MachineRates,
    compute_shares: Sequence[float],
) -> RunTiming:
    """One scenario for each of `compute_shares` of the machine's rates."""
    schedule = run_work.schedule
    window_groups = () if schedule is None else group_windows(schedule, run_work.batch_size)
    table = run_work.experts[0].table
    window = max((part.samples for part in window_groups), default=table.micro_batches * run_work.batch_size)
    return RunTiming(
        paces=tuple(
            _timing_scenario(run_work, window_groups, machine, limits, replace(rates, compute_share=share))
            for share in compute_shares
        ),
        window=window,
        micro_batches=table.micro_batches,
        first_window=window_groups[0].samples if window_groups else window,
        steps=None if schedule is None else schedule.total_steps,
        samples=None if schedule is None else schedule.total_samples,
        left_out=run_work.left_out,
    )


def _timing_scenario(
    run_work: RunWork,
    window_groups: Sequence[WindowGroup],
    machine: MachineSpec,
    limits: MemoryLimits | None,
    rates: MachineRates,
) -> TimingScenario:
    slowest = max(run_work.experts, key=lambda steps: steps.window_seconds(steps.table, machine, limits, rates))
    time_bound = step_time_bound(slowest.table, rates, limits or MemoryLimits(UNLIMITED_BYTES, None))
    times = [_mean_step_time(steps, run_work.token_shares, machine, limits, rates) for steps in run_work.experts]
    bounded = math.isfinite(time_bound.seconds)
    return TimingScenario(
        compute_share=rates.compute_share,
        step_s=slowest.window_seconds(slowest.table, machine, limits, rates),
        bound_s=time_bound.seconds if bounded else time_bound.compute_s,
        bounded_by=time_bound.limited_by if bounded else "compute, if it did fit",
        training_s=None
        if run_work.schedule is None
        else training_seconds(window_groups, times) + _expert_switching_s(run_work, rates),
        encoding_s=_total_seconds(run_work.encoding, rates),
        sampling_s=_total_seconds(run_work.sampling, rates),
    )


def _mean_step_time(
    steps: ExpertSteps,
    shares: Mapping[int, float],
    machine: MachineSpec,
    limits: MemoryLimits | None,
    rates: MachineRates,
) -> StepTime:
    """The mean over the shapes that are drawn: some were traced, the times of the others are interpolated."""
    tables = {steps.tokens: steps.table, **steps.tables_by_tokens}
    times = {tokens: steps.step_time(table, machine, limits, rates) for tokens, table in tables.items()}
    micro = {tokens: time.micro_batch_s for tokens, time in times.items()}
    update = times[steps.tokens].update_s
    drawn_times = [StepTime(interpolate_by_tokens(micro, tokens), update) for tokens in shares]
    return mean_step_time(drawn_times, list(shares.values()))


def _total_seconds(repeated_work: Sequence[RepeatedWork] | None, rates: MachineRates) -> float | None:
    return None if repeated_work is None else sum(one.seconds(rates) for one in repeated_work)


def _expert_switching_s(run_work: RunWork, rates: MachineRates) -> float:
    """Time to fetch experts that the plan keeps in host memory, at every switch. Frozen weights are not copied back."""
    first = run_work.experts[0]
    swaps_experts = first.plan is not None and first.plan.idle_at_home
    if not swaps_experts or len(run_work.experts) < 2 or run_work.schedule is None or not rates.to_device_bytes_s:
        return 0.0
    changes = run_work.schedule.total_steps // run_work.switch_every
    return changes * first.table.idle_bytes / (len(run_work.experts) - 1) / rates.to_device_bytes_s

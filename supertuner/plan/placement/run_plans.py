"""The plans of a run: what the search found, with the `plan.*` settings applied, at the start and when re-planning.

This is the only place that applies `plan.*` settings to a plan: the forecast and the trainer both read plans from here.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from supertuner.config.settings.plan import PlanSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.memory.machines import MachineSpec
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.make_plan import evaluate_plan, make_plan, plan_estimate
from supertuner.plan.placement.plan import (
    ActivationPolicy,
    BlockPlan,
    MemoryPlan,
    OptimizerPlacement,
    ReservedBytesModel,
    WeightPlacement,
)
from supertuner.plan.placement.replan import PlanAssumptions, PlanObservation, observed_rates
from supertuner.plan.placement.roofline import step_time_bound
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

CONFIGURED_REASON = "as configured"
OFFLOADING_CHOICES: Final = {
    "weights": ("streamed",),
    "activations": ("send",),
    "optimizer": ("streamed", "host"),
    "idle_experts": ("host",),
}
"""Values of `plan.*` that keep something in host memory."""
ONE_POOL_REASON: Final = "CPU and GPU share one memory: a copy in host memory would free nothing and take as much again"


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The plan that an expert is trained by, and the figures that it assumes."""

    plan: MemoryPlan
    assumptions: PlanAssumptions
    max_ahead: int
    """The largest prefetch distance, in blocks: memory has no space for more slots."""


def loads_to_host(config: RunConfig, plan: MemoryPlan) -> bool:
    """Whether an expert with this plan is loaded into host memory: one that is streamed or swapped may not fit into GPU
    memory as a whole.

    Also if averages of all weights are kept there: they are created next to the weights, and both may not fit.
    """
    streamed = any(row.weights is WeightPlacement.STREAMED for row in plan.blocks)
    averaged = config.adapter.type == "full" and config.train.ema_decay is not None
    return streamed or plan.idle_at_home or (averaged and plan.stepping is not OptimizerPlacement.GPU)


@dataclass(frozen=True, eq=False, slots=True)
class RunPlanner:
    """The plan of each expert: what `make_plan` found, overridden by the `plan.*` settings; made again when
    re-planning."""

    machine: MachineSpec
    limits: MemoryLimits
    rates: MachineRates
    settings: PlanSettings
    batch_size: int
    tables: Mapping[str, StepTable]
    """By expert."""
    searched_plans: Mapping[str, MemoryPlan]
    """By expert, as the search made them before the run: without `settings`."""
    reserved_models: Mapping[str, ReservedBytesModel] = field(default_factory=dict)
    """By expert: what the caching allocator reserves under a plan. Experts that are absent: live bytes are counted."""

    def forecast_plan(self, expert: str) -> MemoryPlan:
        """The plan that the forecast shows: with `settings` applied, and its time and memory modelled."""
        table, searched = self.tables[expert], self.searched_plans[expert]
        plan = self._apply_settings(expert, searched) or searched
        if plan.modelled is searched.modelled or self.rates.unknown_rates:
            return plan
        evaluation = evaluate_plan(table, plan, self.limits, self.rates)
        modelled = plan_estimate(evaluation, step_time_bound(table, self.rates, self.limits))
        fits, model = evaluation.simulated is not None, self.reserved_models.get(expert)
        if model is not None:
            modelled = replace(modelled, gpu_reserved_bytes=model(plan, None))
            fits = fits and model(plan, self.limits.gpu_bytes) is not None
        return replace(plan, fits=fits, modelled=modelled)

    def initial_plan(self, expert: str) -> ExpertPlan | None:
        """The plan that training starts with; None: the search found none that fits, or `plan.act` is "never"."""
        searched = self.searched_plans.get(expert)
        return None if searched is None or not searched.fits else self._expert_plan(expert, searched, self.rates)

    def replan(self, expert: str, assumptions: PlanAssumptions, observation: PlanObservation) -> ExpertPlan | None:
        """A new plan from observed rates; None: no plan fits."""
        if expert not in self.tables:
            return None
        rates = observed_rates(self.rates, assumptions, observation)
        model = self.reserved_models.get(expert)
        searched = make_plan(self.tables[expert], self.machine, self.limits, rates=rates, reserved_bytes=model)
        return self._expert_plan(expert, searched, rates) if searched.fits else None

    def _apply_settings(self, expert: str, searched: MemoryPlan) -> MemoryPlan | None:
        table = self.tables[expert]
        blocks = [block.name for block in table.blocks if block.recomputable]
        return apply_plan_settings(self.settings, searched, blocks, phase=table.phase, recompute=False)

    def _expert_plan(self, expert: str, searched: MemoryPlan, rates: MachineRates) -> ExpertPlan | None:
        """`searched` with `settings` applied. The assumptions are those of `searched`."""
        plan = self._apply_settings(expert, searched)
        if plan is None:
            return None
        assumptions, max_ahead = self._assumptions(self.tables[expert], searched, rates)
        return ExpertPlan(plan, assumptions, max_ahead if self.settings.ahead is None else plan.ahead)

    def _assumptions(self, table: StepTable, plan: MemoryPlan, rates: MachineRates) -> tuple[PlanAssumptions, int]:
        """The figures that the plan assumes, and the largest prefetch distance that fits beside it."""
        assumptions = PlanAssumptions(rates.to_device_bytes_s, rates.to_host_bytes_s)
        if plan.modelled is None or rates.unknown_rates:
            return assumptions, plan.ahead
        step = TimedStep.from_table(table, rates)
        compute_s = step.passes_s(block.activations for block in plan.blocks) + step.update_s
        assumptions = replace(
            assumptions,
            waiting_share=max(0.0, 1.0 - compute_s / plan.modelled.seconds),
            peak_sample_s=compute_s * rates.compute_share / (table.micro_batches * self.batch_size),
        )
        spare = self.limits.gpu_bytes - plan.modelled.gpu_bytes
        return assumptions, plan.ahead + max(0, spare // max(1, _bytes_per_block_ahead(table, plan)))


def plan_settings_on_machine(settings: PlanSettings, one_pool: bool) -> tuple[PlanSettings, tuple[str, ...]]:
    """`settings` without the choices that have no effect on the machine, and a message for each of those.

    On a one-pool machine nothing is offloaded: everything stays where the GPU has put it.
    """
    ignored = [name for name, value in settings.explicit_choices.items() if value in OFFLOADING_CHOICES[name]]
    if not one_pool or not ignored:
        return settings, ()
    messages = tuple(f'plan.{name}: "{getattr(settings, name)}" has no effect: {ONE_POOL_REASON}' for name in ignored)
    return settings.model_copy(update=dict.fromkeys(ignored, "auto")), messages


def plan_without_forecast(
    settings: PlanSettings, blocks: Sequence[str], *, phase: str, recompute: bool
) -> ExpertPlan | None:
    """The plan of an expert for which no searched plan fits or none was made; None: `settings` ask for nothing.

    `blocks` are the names of the module's blocks. What `settings` leave open stays on the GPU; activations are
    recomputed if `recompute`.
    """
    plan = apply_plan_settings(settings, None, blocks, phase=phase, recompute=recompute)
    if plan is None:
        return None
    return ExpertPlan(plan, PlanAssumptions(), len(plan.blocks) if settings.ahead is None else plan.ahead)


def apply_plan_settings(
    settings: PlanSettings, searched: MemoryPlan | None, blocks: Sequence[str], *, phase: str, recompute: bool
) -> MemoryPlan | None:
    """`searched` with the choices of `settings` for these blocks; None: nothing is offloaded.

    If a setting changes the plan, its modelled figures become None: they described the unchanged plan. `phase` and
    `recompute` describe the plan that is assumed where `searched` is None: everything stays on the GPU, activations are
    recomputed if `recompute`.
    """
    overrides = settings.explicit_choices
    if settings.act == "never" or (searched is None and not overrides):
        return None
    plan = searched or _all_on_gpu_plan(blocks, phase, recompute)
    block_names = set(blocks)
    changed = {**overrides, **({} if settings.ahead is None else {"ahead": str(settings.ahead)})}
    override_reasons = tuple(f"plan.{name}: {value}, {CONFIGURED_REASON}" for name, value in changed.items())
    searched_reason = () if searched is None else ("the rest as planned; the planner's figures no longer apply",)
    return replace(
        plan,
        blocks=tuple(_override_block(one, settings) if one.name in block_names else one for one in plan.blocks),
        ahead=plan.ahead if settings.ahead is None else settings.ahead,
        stepping=plan.stepping if settings.optimizer == "auto" else OptimizerPlacement(settings.optimizer),
        idle_at_home=plan.idle_at_home if settings.idle_experts == "auto" else settings.idle_experts == "host",
        modelled=None if changed else plan.modelled,
        reasons=(*override_reasons, *searched_reason) if changed else plan.reasons,
    )


def _all_on_gpu_plan(blocks: Sequence[str], phase: str, recompute: bool) -> MemoryPlan:
    policy = ActivationPolicy.RECOMPUTE if recompute else ActivationPolicy.KEEP
    block_plans = tuple(BlockPlan(name, WeightPlacement.GPU, policy, "not planned") for name in blocks)
    return MemoryPlan(phase, "this machine", True, block_plans, 1, OptimizerPlacement.GPU, False, None)


def _override_block(block: BlockPlan, settings: PlanSettings) -> BlockPlan:
    weights = block.weights if settings.weights == "auto" else WeightPlacement(settings.weights)
    activations = block.activations if settings.activations == "auto" else ActivationPolicy(settings.activations)
    changed = (weights, activations) != (block.weights, block.activations)
    return BlockPlan(block.name, weights, activations, CONFIGURED_REASON if changed else block.reason)


def _bytes_per_block_ahead(table: StepTable, plan: MemoryPlan) -> int:
    """GPU memory that prefetching one block further ahead takes."""
    rows = list(zip(table.blocks, plan.blocks, strict=True))
    slots = [b.frozen_bytes + b.trained_bytes for b, row in rows if row.weights is WeightPlacement.STREAMED]
    sent = [block.saved_bytes for block, row in rows if row.activations is ActivationPolicy.SEND]
    # Activations of one more block are on their way to the host, and of one more on their way back.
    return max(slots, default=0) + 2 * max(sent, default=0)

"""What plans of a run are made from, kept so that they can be made anew from what was observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from supertuner.memory.machines import MachineSpec
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, WeightPlacement
from supertuner.plan.placement.plan_step import plan_step
from supertuner.plan.placement.replan import PlanAssumptions, PlanObservation, observed_rates
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """A plan and what it rests on."""

    plan: MemoryPlan
    assumptions: PlanAssumptions
    max_ahead: int
    """How far ahead blocks may be fetched: more slots would not fit."""


@dataclass(frozen=True, eq=False, slots=True)
class RunPlanner:
    machine: MachineSpec
    limits: MemoryLimits
    rates: MachineRates
    batch_size: int
    tables: Mapping[str, StepTable]
    """By expert."""
    plans: Mapping[str, MemoryPlan]
    """By expert, as they were made before the run."""

    def initial_plan(self, expert: str) -> ExpertPlan | None:
        """The plan that was made; None: there is none that fits."""
        plan = self.plans.get(expert)
        return None if plan is None or not plan.fits else self._with_assumptions(expert, plan, self.rates)

    def replan(self, expert: str, assumptions: PlanAssumptions, observation: PlanObservation) -> ExpertPlan | None:
        """A plan from what was observed; None: nothing fits by it."""
        if expert not in self.tables:
            return None
        rates = observed_rates(self.rates, assumptions, observation)
        plan = plan_step(self.tables[expert], self.machine, self.limits, rates=rates)
        return self._with_assumptions(expert, plan, rates) if plan.fits else None

    def _with_assumptions(self, expert: str, plan: MemoryPlan, rates: MachineRates) -> ExpertPlan:
        table = self.tables[expert]
        assumptions = PlanAssumptions(rates.to_device_bytes_s, rates.to_host_bytes_s)
        if plan.modelled is None or rates.unknown_rates:
            return ExpertPlan(plan, assumptions, plan.ahead)
        step = TimedStep.from_table(table, rates)
        recompute_s = sum(
            one
            for one, row in zip(step.forward_s, plan.blocks, strict=True)
            if row.activations is ActivationPolicy.RECOMPUTE
        )
        compute_s = table.micro_batches * (step.micro_batch_s + recompute_s) + step.update_s
        assumptions = replace(
            assumptions,
            waiting_share=max(0.0, 1.0 - compute_s / plan.modelled.seconds),
            peak_sample_s=compute_s * rates.compute_share / (table.micro_batches * self.batch_size),
        )
        spare = self.limits.gpu_bytes - plan.modelled.gpu_peak_bytes
        return ExpertPlan(plan, assumptions, plan.ahead + max(0, spare // max(1, _bytes_per_block_ahead(table, plan))))


def _bytes_per_block_ahead(table: StepTable, plan: MemoryPlan) -> int:
    """What fetching one block further ahead takes on the device."""
    rows = list(zip(table.blocks, plan.blocks, strict=True))
    slot = max(
        (b.frozen_bytes + b.trained_bytes for b, row in rows if row.weights is WeightPlacement.STREAMED), default=0
    )
    sent = max((block.saved_bytes for block, row in rows if row.activations is ActivationPolicy.SEND), default=0)
    return slot + 2 * sent  # on its way home, and on its way back

"""What plans of a run are made from, kept so that they can be made anew from what was observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from supertuner.memory.machines import Machine
from supertuner.plan.placement.choice import Step
from supertuner.plan.placement.plan import Fate, Plan, Residence
from supertuner.plan.placement.plan_step import place
from supertuner.plan.placement.replan import Basis, Observed, rates_seen
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import Limits, Rates


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it rests on."""

    plan: Plan
    basis: Basis
    most_ahead: int
    """How far ahead blocks may be fetched: more slots would not fit."""


@dataclass(frozen=True, eq=False, slots=True)
class Planning:
    machine: Machine
    limits: Limits
    rates: Rates
    batch_size: int
    tables: Mapping[str, StepTable]
    """By expert."""
    plans: Mapping[str, Plan]
    """By expert, as they were made before the run."""

    def planned(self, expert: str) -> Planned | None:
        """The plan that was made; None: there is none that fits."""
        plan = self.plans.get(expert)
        return None if plan is None or not plan.fits else self._with_basis(expert, plan, self.rates)

    def anew(self, expert: str, basis: Basis, seen: Observed) -> Planned | None:
        """A plan from what was observed; None: nothing fits by it."""
        if expert not in self.tables:
            return None
        rates = rates_seen(self.rates, basis, seen)
        plan = place(self.tables[expert], self.machine, self.limits, rates=rates)
        return self._with_basis(expert, plan, rates) if plan.fits else None

    def _with_basis(self, expert: str, plan: Plan, rates: Rates) -> Planned:
        table = self.tables[expert]
        basis = Basis(rates.to_device_bytes_s, rates.to_host_bytes_s)
        if plan.modelled is None or rates.unknown:
            return Planned(plan, basis, plan.ahead)
        step = Step.of(table, rates)
        recomputed = sum(
            one for one, row in zip(step.forward_s, plan.blocks, strict=True) if row.activations is Fate.RECOMPUTE
        )
        computing = table.micro_batches * (step.micro_s + recomputed) + step.update_s
        basis = replace(
            basis,
            waiting=max(0.0, 1.0 - computing / plan.modelled.seconds),
            peak_sample_s=computing * rates.compute_share / (table.micro_batches * self.batch_size),
        )
        spare = self.limits.gpu_bytes - plan.modelled.gpu_peak_bytes
        return Planned(plan, basis, plan.ahead + max(0, spare // max(1, _per_block(table, plan))))


def _per_block(table: StepTable, plan: Plan) -> int:
    """What fetching one block further ahead takes on the device."""
    rows = list(zip(table.blocks, plan.blocks, strict=True))
    slot = max((b.frozen_bytes + b.trained_bytes for b, row in rows if row.weights is Residence.STREAMED), default=0)
    sent = max((block.saved_bytes for block, row in rows if row.activations is Fate.SEND), default=0)
    return slot + 2 * sent  # on its way home, and on its way back

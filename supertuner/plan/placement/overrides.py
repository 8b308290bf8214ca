"""The plan that an expert is run by: what was planned, with what the settings ask for instead. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from supertuner.config.settings.plan import PlanSettings
from supertuner.plan.placement.plan import BlockPlan, Fate, Plan, Residence, Stepping

WHY = "as configured"
RESIDENCES = {"gpu": Residence.GPU, "streamed": Residence.STREAMED}


def wished(
    settings: PlanSettings, planned: Plan | None, blocks: Sequence[str], *, phase: str, recomputing: bool
) -> Plan | None:
    """The plan of an expert with these blocks; None: nothing is moved.

    Without a plan, activations are recomputed if `recomputing`, and everything that nobody asks for stays on the GPU.
    """
    asked = settings.wishes
    if settings.act == "never" or (planned is None and not asked):
        return None
    plan = planned or _plain(blocks, phase, recomputing)
    own = set(blocks)
    changed = {**asked, **({} if settings.ahead is None else {"ahead": str(settings.ahead)})}
    told = tuple(f"plan.{name}: {value}, {WHY}" for name, value in changed.items())
    rest = () if planned is None else ("the rest as planned, whose figures hold no more",)
    rows = tuple(_asked(row, settings) if row.name in own else row for row in plan.blocks)
    return replace(
        plan,
        blocks=rows,
        ahead=plan.ahead if settings.ahead is None else settings.ahead,
        stepping=plan.stepping if settings.optimizer == "auto" else Stepping(settings.optimizer),
        idle_at_home=plan.idle_at_home if settings.idle_experts == "auto" else settings.idle_experts == "host",
        modelled=None if changed else plan.modelled,
        reasons=(*told, *rest) if changed else plan.reasons,
    )


def _plain(blocks: Sequence[str], phase: str, recomputing: bool) -> Plan:
    fate = Fate.RECOMPUTE if recomputing else Fate.KEEP
    rows = tuple(BlockPlan(name, Residence.GPU, fate, "nothing was planned") for name in blocks)
    return Plan(phase, "this machine", True, rows, 1, Stepping.GPU, False, None)


def _asked(row: BlockPlan, settings: PlanSettings) -> BlockPlan:
    weights = row.weights if settings.weights == "auto" else RESIDENCES[settings.weights]
    fate = row.activations if settings.activations == "auto" else Fate(settings.activations)
    changed = (weights, fate) != (row.weights, row.activations)
    return BlockPlan(row.name, weights, fate, WHY if changed else row.reason)

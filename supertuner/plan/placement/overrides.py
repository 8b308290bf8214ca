"""The plan that an expert is run by: what was planned, with what the settings ask for instead. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from supertuner.config.settings.plan import PlanSettings
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement

CONFIGURED_REASON = "as configured"
WEIGHT_PLACEMENTS = {"gpu": WeightPlacement.GPU, "streamed": WeightPlacement.STREAMED}


def apply_plan_settings(
    settings: PlanSettings, base_plan: MemoryPlan | None, blocks: Sequence[str], *, phase: str, recompute: bool
) -> MemoryPlan | None:
    """The plan of an expert with these blocks; None: nothing is moved.

    Without a plan, activations are recomputed if `recomputing`, and everything that nobody asks for stays on the GPU.
    """
    overrides = settings.explicit_choices
    if settings.act == "never" or (base_plan is None and not overrides):
        return None
    plan = base_plan or _default_plan(blocks, phase, recompute)
    block_names = set(blocks)
    changed = {**overrides, **({} if settings.ahead is None else {"ahead": str(settings.ahead)})}
    override_reasons = tuple(f"plan.{name}: {value}, {CONFIGURED_REASON}" for name, value in changed.items())
    base_reason = () if base_plan is None else ("the rest as planned, whose figures hold no more",)
    rows = tuple(_override_block(row, settings) if row.name in block_names else row for row in plan.blocks)
    return replace(
        plan,
        blocks=rows,
        ahead=plan.ahead if settings.ahead is None else settings.ahead,
        stepping=plan.stepping if settings.optimizer == "auto" else OptimizerPlacement(settings.optimizer),
        idle_at_home=plan.idle_at_home if settings.idle_experts == "auto" else settings.idle_experts == "host",
        modelled=None if changed else plan.modelled,
        reasons=(*override_reasons, *base_reason) if changed else plan.reasons,
    )


def _default_plan(blocks: Sequence[str], phase: str, recompute: bool) -> MemoryPlan:
    policy = ActivationPolicy.RECOMPUTE if recompute else ActivationPolicy.KEEP
    rows = tuple(BlockPlan(name, WeightPlacement.GPU, policy, "nothing was planned") for name in blocks)
    return MemoryPlan(phase, "this machine", True, rows, 1, OptimizerPlacement.GPU, False, None)


def _override_block(row: BlockPlan, settings: PlanSettings) -> BlockPlan:
    weights = row.weights if settings.weights == "auto" else WEIGHT_PLACEMENTS[settings.weights]
    activations = row.activations if settings.activations == "auto" else ActivationPolicy(settings.activations)
    changed = (weights, activations) != (row.weights, row.activations)
    return BlockPlan(row.name, weights, activations, CONFIGURED_REASON if changed else row.reason)

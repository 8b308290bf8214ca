"""The plans of a run, from what was forecast and what its settings ask for; and the run's experts put under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import Sink
from supertuner.models import loading
from supertuner.models.blocks import named_blocks
from supertuner.models.spec import Expert, ModelDescription
from supertuner.plan.placement.overrides import apply_plan_settings
from supertuner.plan.placement.plan import OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.planner import ExpertPlan, RunPlanner
from supertuner.plan.placement.replan import PlanAssumptions, PlanObservation
from supertuner.step.precision import ComputePrecision
from supertuner.step.window import ExpertState
from supertuner.train.run.memory_engine import MemoryEngine
from supertuner.train.offload.manager import OffloadManager
from supertuner.step.parameter_state import HOST
from supertuner.train.offload.transfer import create_transfer
from supertuner.memory.out_of_memory import explain_out_of_memory


def plan_experts(
    config: RunConfig, model: ModelDescription, experts: Sequence[Expert], planning: RunPlanner | None
) -> dict[str, ExpertPlan]:
    """Expert → the plan that it is run by. Experts without one are left as they are."""
    planned_by_expert = {}
    for expert in experts:
        blocks = list(named_blocks(loading.build_meta_module(model, expert.component)))
        forecast_plan = None if planning is None else planning.initial_plan(expert.name)
        planned = _apply_overrides(config, forecast_plan, expert.name, blocks)
        if planned is not None:
            planned_by_expert[expert.name] = planned
    return planned_by_expert


def loading_device(config: RunConfig, planned: ExpertPlan | None, device: torch.device) -> torch.device:
    """Where an expert is loaded to: what only visits the device is never on it as a whole. Averages of all weights are
    made beside them, and may be too much together."""
    if planned is None:
        return device
    streamed = any(row.weights is WeightPlacement.STREAMED for row in planned.plan.blocks)
    averaged = config.adapter.type == "full" and config.train.ema_decay is not None
    averages_on_host = averaged and planned.plan.stepping is not OptimizerPlacement.GPU
    return HOST if streamed or planned.plan.idle_at_home or averages_on_host else device


def create_offload_manager(
    config: RunConfig,
    expert_states: Sequence[ExpertState],
    planned: Mapping[str, ExpertPlan],
    planning: RunPlanner | None,
    precision: ComputePrecision,
    memory: MemoryEngine,
    sink: Sink,
) -> OffloadManager | None:
    """The experts under their plans; None: nothing is planned."""
    if not planned:
        return None
    with explain_out_of_memory(
        "what the plan keeps on the device does", partial(memory.out_of_memory_remedy, 'set plan.weights: "streamed"')
    ):
        return OffloadManager(
            expert_states,
            planned,
            create_transfer(precision.device),
            sink,
            check_every=config.plan.check_every_windows,
            replan=None
            if planning is None
            else partial(_replan, config, planning, list(named_blocks(expert_states[0].module))),
        )


def _replan(
    config: RunConfig,
    planning: RunPlanner,
    blocks: Sequence[str],
    expert: str,
    basis: PlanAssumptions,
    observed: PlanObservation,
) -> ExpertPlan | None:
    planned = planning.replan(expert, basis, observed)
    return None if planned is None else _apply_overrides(config, planned, expert, blocks)


def _apply_overrides(
    config: RunConfig, planned: ExpertPlan | None, expert: str, blocks: Sequence[str]
) -> ExpertPlan | None:
    """The plan with what the settings ask for."""
    plan = apply_plan_settings(
        config.plan,
        None if planned is None else planned.plan,
        blocks,
        phase=f"train {expert}",
        recompute=config.train.gradient_checkpointing,
    )
    if plan is None:
        return None
    if planned is None:
        return ExpertPlan(plan, PlanAssumptions(), len(plan.blocks) if config.plan.ahead is None else plan.ahead)
    max_ahead = planned.max_ahead if config.plan.ahead is None else plan.ahead
    return replace(planned, plan=plan, max_ahead=max_ahead)

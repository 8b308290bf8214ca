"""`plan.*` settings override a plan: in the forecast, in the plan that training starts with, and when re-planning."""

from __future__ import annotations

from typing import Any

import pytest

from supertuner.config.settings.plan import PlanSettings
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.replan import PlanAssumptions, PlanObservation, TransferCounters
from supertuner.plan.placement.run_plans import RunPlanner, apply_plan_settings, plan_without_forecast
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from supertuner.train.offload.manager import plan_summary
from tests.plan.making_forecasts import a_table

BLOCKS = ("blocks.0", "blocks.1")
PLANNED = MemoryPlan(
    "train",
    "gh200-96",
    True,
    (
        BlockPlan("(before)", WeightPlacement.GPU, ActivationPolicy.KEEP, "small"),
        BlockPlan("blocks.0", WeightPlacement.STREAMED, ActivationPolicy.SEND, "hidden"),
        BlockPlan("blocks.1", WeightPlacement.GPU, ActivationPolicy.KEEP, "fits"),
    ),
    2,
    OptimizerPlacement.GPU,
    True,
    None,
    ("a reason",),
)


def overridden(planned: MemoryPlan | None, recompute: bool = False, **settings: Any) -> MemoryPlan | None:
    return apply_plan_settings(PlanSettings(**settings), planned, BLOCKS, phase="train model", recompute=recompute)


def test_without_a_plan_and_without_settings_nothing_is_offloaded() -> None:
    assert overridden(None) is None and overridden(None, recompute=True) is None
    assert overridden(PLANNED, act="never") is None


def test_without_settings_a_plan_stays_as_it_is() -> None:
    assert overridden(PLANNED) == PLANNED


def test_a_setting_overrides_the_plan_and_is_given_as_the_reason() -> None:
    plan = overridden(PLANNED, activations="recompute", idle_experts="gpu", ahead=0)
    assert plan is not None
    before, first, second = plan.blocks
    assert before == PLANNED.blocks[0], "what is outside the blocks is not overridden"
    assert (first.weights, first.activations, first.reason) == (
        WeightPlacement.STREAMED,
        ActivationPolicy.RECOMPUTE,
        "as configured",
    )
    assert second.activations is ActivationPolicy.RECOMPUTE
    assert (plan.ahead, plan.idle_at_home, plan.modelled) == (0, False, None)
    assert "plan.activations: recompute" in plan.reasons[0] and "plan.ahead: 0" in plan.reasons[2]
    assert "a reason" not in plan.reasons, "the planner's reasons describe another plan"


def test_a_setting_without_a_searched_plan_keeps_everything_else_as_configured() -> None:
    planned = plan_without_forecast(PlanSettings(optimizer="host"), BLOCKS, phase="train model", recompute=True)
    assert planned is not None and planned.plan.stepping is OptimizerPlacement.HOST
    assert {block.activations for block in planned.plan.blocks} == {ActivationPolicy.RECOMPUTE}
    assert plan_summary(planned.plan) == "activations of 2 blocks recomputed; optimizer: host"
    assert planned.max_ahead == 2 and planned.assumptions == PlanAssumptions()
    assert plan_without_forecast(PlanSettings(), BLOCKS, phase="train model", recompute=True) is None


def test_settings_without_effect_give_a_warning() -> None:
    warnings = list(PlanSettings(act="never", weights="streamed").warnings())
    assert [warning.field for warning in warnings] == ["weights"]


def a_planner(**settings: Any) -> RunPlanner:
    machine, table = MACHINES["gh200-96"], a_table(saved=30)
    limits, rates = MemoryLimits(90 * GIB, 400 * GIB), MachineRates.from_machine(machine)
    plans = {"model": make_plan(table, machine, limits, rates=rates)}
    return RunPlanner(machine, limits, rates, PlanSettings(**settings), 1, {"model": table}, plans)


@pytest.mark.parametrize("settings", [{}, {"activations": "recompute"}, {"optimizer": "gpu", "ahead": 2}])
def test_forecast_and_training_follow_the_same_overridden_plan(settings: dict[str, Any]) -> None:
    planner = a_planner(**settings)
    forecast, initial = planner.forecast_plan("model"), planner.initial_plan("model")
    assert initial is not None and forecast.modelled is not None
    assert (initial.plan.blocks, initial.plan.ahead, initial.plan.stepping, initial.plan.reasons) == (
        forecast.blocks,
        forecast.ahead,
        forecast.stepping,
        forecast.reasons,
    )
    assert settings.get("ahead") in (None, initial.max_ahead), "a configured distance is not increased"
    observed = PlanObservation(4, 8, 10.0, TransferCounters())
    again = planner.replan("model", initial.assumptions, observed)
    assert again is not None and ("activations" not in settings or again.plan.blocks == initial.plan.blocks)


def test_a_run_that_follows_no_plans_gets_none_and_the_forecast_shows_the_searched_one() -> None:
    planner = a_planner(act="never", activations="recompute")
    assert planner.initial_plan("model") is None
    assert planner.forecast_plan("model") == planner.searched_plans["model"]

"""The time of a run is the sum of the times of its parts, at the machine's rates and at shares of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.optim.schedule import build_training_schedule
from supertuner.plan.forecast.suggestion_baseline import configured_choice, seconds_without_plan
from supertuner.plan.forecast.suggestions import scale_tokens
from supertuner.plan.forecast.timing import ExpertSteps, RepeatedWork, RunWork, forecast_timing
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.step_table import OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_forecasts import a_table

GH200 = MACHINES["gh200-96"]
RATES = MachineRates.from_machine(GH200)
LIMITS = MemoryLimits.from_machine(GH200)


def steps_of(table: StepTable, planned: bool = False) -> ExpertSteps:
    plan = make_plan(table, GH200, LIMITS) if planned else None
    return ExpertSteps(table, configured_choice(table, False), plan, tokens=1000)


def a_run_work(*experts: ExpertSteps, steps: int = 10, every: int = 1) -> RunWork:
    config = RunConfig.model_validate({"train": {"max_steps": steps, "gradient_accumulation_steps": 2}})
    encoding = (RepeatedWork((OperatorWork(990e12, 0.0, 0.0, 1), OperatorWork(0.0, 0.0, 3705e9, 1)), 5),)
    return RunWork(experts, {1000: 1.0}, build_training_schedule(config, lambda epochs: 0, 1), 1, encoding, (), every)


def test_a_run_takes_the_time_of_its_windows_and_of_encoding() -> None:
    table = a_table(saved=2, micro_batches=2)
    found = forecast_timing(a_run_work(steps_of(table)), LIMITS, RATES, (1.0, 0.5))
    full, half = found.paces
    assert full.step_s == pytest.approx(seconds_without_plan(table, configured_choice(table, False), RATES))
    assert full.training_s == pytest.approx(10 * full.step_s)
    assert full.encoding_s == pytest.approx(5 * (1.0 + 1.0)), "compute limits one piece, memory the other"
    assert half.training_s == pytest.approx(2 * (full.training_s or 0))
    assert full.total_s == pytest.approx((full.training_s or 0) + 10.0)
    assert full.bound_s <= full.step_s


def test_the_plan_that_is_followed_determines_the_time_of_a_step() -> None:
    table = a_table(saved=30, micro_batches=2)
    steps = steps_of(table, planned=True)
    assert steps.plan is not None and steps.plan.modelled is not None and not steps.plan.keeps_all_on_gpu
    found = forecast_timing(a_run_work(steps), LIMITS, RATES, (1.0,)).paces[0]
    assert found.step_s == pytest.approx(steps.plan.modelled.seconds)


def test_an_expert_in_host_memory_is_fetched_at_every_switch() -> None:
    table = a_table(blocks=2, frozen=20, saved=10, idle=37)
    planned = steps_of(table, planned=True)
    assert planned.plan is not None and planned.plan.idle_at_home
    stays = replace(planned, plan=replace(planned.plan, idle_at_home=False))
    often, seldom, never = (
        forecast_timing(a_run_work(one, one, every=every), LIMITS, RATES, (1.0,)).paces[0].training_s or 0.0
        for one, every in ((planned, 1), (planned, 5), (stays, 1))
    )
    once = 37 * GIB / 375e9
    assert often - never == pytest.approx(10 * once, rel=0.01)
    assert seldom - never == pytest.approx(2 * once, rel=0.01)


def test_a_run_of_unknown_length_has_a_step_time_and_no_total() -> None:
    unknown = replace(a_run_work(steps_of(a_table(saved=2))), schedule=None, encoding=None)
    found = forecast_timing(unknown, LIMITS, RATES, (1.0,))
    assert found.steps is None and found.paces[0].step_s > 0
    assert found.paces[0].training_s is None and found.paces[0].encoding_s is None and found.paces[0].total_s is None


def test_batches_of_several_sizes_take_their_mean_time() -> None:
    large = a_table(saved=4)
    small = scale_tokens(large, 0.5)
    steps = ExpertSteps(large, configured_choice(large, False), None, 2000, {1000: small})
    mixed = replace(a_run_work(steps), token_shares={2000: 0.5, 1000: 0.5})
    times = [
        forecast_timing(replace(mixed, token_shares={n: 1.0}), LIMITS, RATES, (1.0,)).paces[0] for n in (2000, 1000)
    ]
    both = forecast_timing(mixed, LIMITS, RATES, (1.0,)).paces[0]
    assert both.training_s == pytest.approx(sum(one.training_s or 0 for one in times) / 2, rel=0.02)

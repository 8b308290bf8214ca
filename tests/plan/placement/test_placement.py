"""Plans are optimal for small steps, near the bound for large ones, always within their limits, and have reasons."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan_replay import replay_plan
from benchmarks.workloads import WORKLOADS, table
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.fast_simulate import evaluate_choice
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.search import evenly_spread_order, search_placement
from supertuner.plan.placement.step_table import OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_steps import PLAIN, ROUND, a_step, rates, tables

GH200 = MACHINES["gh200-96"]
LARGE = replace(
    PLAIN,
    frozen_bytes=GIB,
    saved_bytes=8 * GIB,
    input_bytes=GIB // 2,
    forward=OperatorWork(1e14),
    backward=OperatorWork(2e14),
    forward_peak_bytes=GIB,
    backward_peak_bytes=GIB,
)
"""0.1 s forward on a GH200; its activations go to the host and back in 50 ms."""


def fates(plan: MemoryPlan) -> Counter[ActivationPolicy]:
    return Counter(block.activations for block in plan.blocks)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_for_a_small_step_no_placement_is_better_than_the_one_found(data: st.DataObject) -> None:
    # Without optimizer work on the GPU: a host that steps faster than the GPU is not a machine we plan for.
    small, speeds = replace(data.draw(tables(most=2)), update=OperatorWork()), data.draw(rates())
    limits = MemoryLimits(data.draw(st.integers(60, 300)), data.draw(st.integers(0, 400)))
    step = TimedStep.from_table(small, speeds)
    found = search_placement(step, limits, 0.0)
    best = math.inf
    per_block = [
        list(
            product(
                [False, True],
                list(ActivationPolicy) if block.recomputable else [ActivationPolicy.KEEP, ActivationPolicy.SEND],
            )
        )
        for block in small.blocks
    ]
    places = list(OptimizerPlacement) if any(step.trained_bytes) else [OptimizerPlacement.GPU]
    for blocks in product(*per_block):
        for ahead, stepping, idle in product(range(4), places, (False, True)):
            choice = PlacementChoice(tuple(b[0] for b in blocks), tuple(b[1] for b in blocks), ahead, stepping, idle)
            best = min(best, evaluate_choice(step, choice, limits).seconds)
    took = math.inf if found is None else found.seconds
    # The search also weighs traffic: it may prefer a placement that takes a thousandth of its traffic longer.
    assert took <= best * 1.02 + 0.01 if math.isfinite(best) else took == math.inf


@settings(max_examples=25, deadline=None)
@given(tables(most=12), rates(), st.integers(50, 600), st.integers(0, 900))
def test_a_plan_never_needs_more_than_its_limits(drawn: StepTable, speeds: MachineRates, gpu: int, host: int) -> None:
    limits = MemoryLimits(gpu, host)
    plan = make_plan(drawn, GH200, limits, rates=speeds)
    assert plan.modelled is not None
    if plan.fits:
        assert plan.modelled.gpu_peak_bytes <= gpu and plan.modelled.host_peak_bytes <= host
        replayed = replay_plan(drawn, plan, GH200, limits, rates=speeds)
        assert replayed.gpu_peak_bytes <= gpu
        assert replayed.seconds == pytest.approx(plan.modelled.seconds)
        assert plan.modelled.seconds >= plan.modelled.bound_s * (1 - 1e-9)


def test_if_everything_fits_the_plan_moves_nothing_and_costs_no_time() -> None:
    plan = make_plan(a_step(LARGE, LARGE, LARGE, update_s=0.0, idle_bytes=4 * GIB), GH200)
    assert plan.keeps_all_on_gpu and plan.modelled is not None
    assert plan.modelled.seconds == pytest.approx(plan.modelled.bound_s)


def test_an_idle_expert_is_offloaded_before_anything_else() -> None:
    plan = make_plan(a_step(*[LARGE] * 8, update_s=0.0, idle_bytes=40 * GIB), GH200)
    assert plan.idle_at_home and fates(plan) == {ActivationPolicy.KEEP: 8}
    assert any("fetching them takes 115 ms" in reason for reason in plan.reasons)


def test_activations_are_sent_and_not_recomputed_if_the_copies_are_hidden() -> None:
    plan = make_plan(a_step(*[LARGE] * 40), GH200)
    assert fates(plan)[ActivationPolicy.SEND] >= 25 and not fates(plan)[ActivationPolicy.RECOMPUTE]
    assert plan.modelled is not None and plan.modelled.seconds <= 1.002 * plan.modelled.bound_s
    assert "recomputing them would take" in next(
        b.reason for b in plan.blocks if b.activations is ActivationPolicy.SEND
    )


def test_activations_that_do_not_fit_in_host_memory_are_recomputed() -> None:
    plan = make_plan(a_step(*[LARGE] * 40), GH200, MemoryLimits(96 * GIB, 100 * GIB))
    assert fates(plan)[ActivationPolicy.SEND] in (11, 12) and fates(plan)[ActivationPolicy.RECOMPUTE] >= 15
    assert plan.modelled is not None and plan.modelled.seconds <= 1.03 * plan.modelled.bound_s


def test_activations_are_recomputed_if_the_link_is_slower() -> None:
    slow = replace(MachineRates.from_machine(GH200), to_host_bytes_s=5e9, to_device_bytes_s=5e9)
    plan = make_plan(a_step(*[LARGE] * 40), GH200, rates=slow)
    assert fates(plan)[ActivationPolicy.RECOMPUTE] >= 25


def test_weights_that_exceed_gpu_memory_are_streamed_ahead() -> None:
    heavy = replace(LARGE, frozen_bytes=4 * GIB, saved_bytes=GIB, input_bytes=GIB // 8)
    plan = make_plan(a_step(*[heavy] * 30), GH200)
    streamed = [block for block in plan.blocks if block.weights is WeightPlacement.STREAMED]
    assert 5 <= len(streamed) < 30 and plan.ahead >= 1
    assert "never copied back" in streamed[0].reason


def test_an_optimizer_too_large_for_the_gpu_steps_where_it_is_fastest() -> None:
    plan = make_plan(table("flux-full"), GH200)
    assert plan.stepping is OptimizerPlacement.STREAMED and any(
        "and back in 576 ms" in reason for reason in plan.reasons
    )
    quick = replace(MachineRates.from_machine(GH200), host_bytes_s=1e15)
    assert make_plan(table("flux-full"), GH200, rates=quick).stepping is OptimizerPlacement.HOST


def test_an_optimizer_that_cannot_step_in_pieces_needs_memory_for_all_parameters() -> None:
    full = table("flux-full")
    assert make_plan(full, GH200).stepping is OptimizerPlacement.STREAMED
    assert make_plan(replace(full, by_pieces=False), GH200).stepping is OptimizerPlacement.HOST


def test_what_is_outside_the_blocks_is_never_moved() -> None:
    around = replace(LARGE, name="(before)", frozen_bytes=6 * GIB, recomputable=False)
    step = a_step(*[replace(LARGE, frozen_bytes=4 * GIB)] * 30)
    plan = make_plan(replace(step, blocks=(around, *step.blocks, replace(around, name="(after)"))), GH200)
    assert plan.fits and any(block.weights is WeightPlacement.STREAMED for block in plan.blocks)
    for block in (plan.blocks[0], plan.blocks[-1]):
        assert (block.weights, block.activations) == (WeightPlacement.GPU, ActivationPolicy.KEEP)


def test_on_a_one_pool_machine_nothing_is_sent_or_streamed() -> None:
    plan = make_plan(a_step(*[LARGE] * 40, idle_bytes=GIB), MACHINES["gb10"])
    assert plan.fits and not fates(plan)[ActivationPolicy.SEND] and not plan.idle_at_home
    assert all(block.weights is WeightPlacement.GPU for block in plan.blocks)


def test_a_plan_that_does_not_fit_has_the_missing_bytes_as_its_reason() -> None:
    plan = make_plan(a_step(*[replace(LARGE, saved_bytes=200 * GIB)] * 4), GH200)
    assert not plan.fits and plan.modelled is not None and plan.modelled.seconds == math.inf
    assert plan.modelled.gpu_peak_bytes > 200 * GIB
    assert "it lacks 1" in plan.reasons[0] and "GiB of GPU memory" in plan.reasons[0]


def test_nothing_is_offloaded_to_a_host_of_unknown_size() -> None:
    plan = make_plan(a_step(*[LARGE] * 40), MACHINES["h100-80-pcie"])
    assert plan.modelled is not None and plan.modelled.host_peak_bytes == 0
    assert any("not known" in reason for reason in plan.reasons)


def test_a_machine_with_an_unknown_rate_gets_a_plan_without_a_time() -> None:
    plan = make_plan(a_step(*[LARGE] * 60), MACHINES["gb200"])
    assert plan.fits and plan.modelled is None
    assert any("to_device_bytes_s" in reason for reason in plan.reasons)


def test_planning_is_deterministic() -> None:
    assert make_plan(table("wan-full"), GH200) == make_plan(table("wan-full"), GH200)


@pytest.mark.parametrize("name", WORKLOADS)
def test_full_size_plans_on_a_gh200_are_near_the_bound_and_take_seconds(name: str) -> None:
    begin = time.process_time()
    plan = make_plan(table(name), GH200)
    assert time.process_time() - begin < 5
    assert plan.modelled is not None and plan.modelled.seconds <= 1.10 * plan.modelled.bound_s


def test_every_prefix_of_an_evenly_spread_order_is_spread() -> None:
    order = evenly_spread_order(range(8))
    assert sorted(order) == list(range(8)) and order[:4] == [0, 4, 2, 6]
    assert sorted(evenly_spread_order(range(5))) == list(range(5))


def test_a_link_that_slows_down_changes_the_plan() -> None:
    """Counters of a run become rates, and the plan is made again from them."""
    step = a_step(*[LARGE] * 40)
    before, after = (
        make_plan(step, GH200),
        make_plan(step, GH200, rates=replace(ROUND, **_slower(MachineRates.from_machine(GH200), 20))),
    )
    assert fates(after)[ActivationPolicy.SEND] < fates(before)[ActivationPolicy.SEND]


def _slower(known: MachineRates, times: float) -> dict[str, float | None]:
    up, down = known.to_device_bytes_s, known.to_host_bytes_s
    assert up is not None and down is not None
    fields = {name: getattr(known, name) for name in MachineRates.__slots__}
    return {**fields, "to_device_bytes_s": up / times, "to_host_bytes_s": down / times}

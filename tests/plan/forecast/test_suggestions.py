"""Suggested changes are ranked by their cost, and their memory and time follow from the step table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.core.types import GIB
from supertuner.plan.forecast.results import SuggestedChange
from supertuner.plan.forecast.suggestion_baseline import configured_choice, seconds_without_plan
from supertuner.plan.forecast.suggestions import scale_tokens, suggest_changes
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import MemoryPlan, OptimizerPlacement, PlanEstimate
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_forecasts import a_baseline, a_capacity, a_table

VIDEO = [{"id": "clips", "dataset_type": "video", "frames": [81], "instance_data_dir": "/data"}]


def named(found: tuple[SuggestedChange, ...], what: str) -> SuggestedChange:
    return next(change for change in found if change.what.startswith(what))


def test_checkpointing_costs_a_third_more_time_and_keeps_only_inputs_of_blocks() -> None:
    now = a_baseline(a_table(blocks=8, frozen=3, saved=20))
    found = named(suggest_changes(now), "train.gradient_checkpointing=true")
    assert found.fits and found.exact and found.same_result
    assert found.time == pytest.approx(4 / 3)
    # 8 × 3 of weights, 1 of batch, 7 × 1 of inputs, 20 of one block's activations, 2 of temporaries
    assert found.gpu_bytes == (24 + 1 + 7 + 20 + 2) * GIB


def test_a_run_that_fits_gets_only_changes_that_make_it_faster() -> None:
    (found,) = suggest_changes(a_baseline(a_table(saved=2), train={"gradient_checkpointing": True}, datasets=VIDEO))
    assert found.what == "train.gradient_checkpointing=false"
    assert found.fits and found.time == pytest.approx(3 / 4)
    assert suggest_changes(a_baseline(a_table(saved=2), datasets=VIDEO)) == ()


def test_a_run_that_needs_checkpointing_to_fit_is_not_advised_to_stop_it() -> None:
    now = a_baseline(a_table(saved=30), train={"gradient_checkpointing": True})
    assert not any("checkpointing" in change.what for change in suggest_changes(now))


def test_training_one_expert_at_a_time_frees_the_memory_of_the_other() -> None:
    now = a_baseline(a_table(frozen=7, saved=15, idle=28))
    assert named(suggest_changes(now), "model.experts").gpu_bytes == now.peak_bytes - 28 * GIB
    assert not any("experts" in change.what for change in suggest_changes(a_baseline(a_table(saved=30))))


def test_overflow_costs_the_transfer_of_every_byte_that_does_not_fit() -> None:
    now = a_baseline(a_table(saved=30))
    found = named(suggest_changes(now), "memory.overflow")
    over = now.peak_bytes - 96 * GIB
    assert found.gpu_bytes == 96 * GIB and found.host_bytes == over and found.fits
    assert found.time is not None and found.time == pytest.approx(
        1 + (over / 375e9 + over / 296e9) / (1200e12 / 990e12)
    )


def test_overflow_is_not_suggested_for_one_pool_or_if_everything_fits() -> None:
    for now in (a_baseline(a_table(saved=40), a_capacity("gb10")), a_baseline(a_table(saved=2))):
        assert not any("overflow" in change.what for change in suggest_changes(now))


def test_the_largest_number_of_frames_that_fits_is_suggested() -> None:
    now = a_baseline(a_table(saved=25), datasets=VIDEO)
    found = named(suggest_changes(now), "datasets[0].frames=")
    frames = int(found.what.split("=")[1])
    assert found.fits and not found.exact and not found.same_result and frames % 4 == 1
    share = ((frames - 1) // 4 + 1) / 21
    assert found.gpu_bytes == needed(scale_tokens(now.table, share))
    assert needed(scale_tokens(now.table, share + 1 / 21)) > 96 * GIB


def needed(table) -> int:  # type: ignore[no-untyped-def]
    return compute_memory_needs(
        TimedStep.from_table(table, MachineRates.from_machine(a_capacity().machine)), configured_choice(table, False)
    ).gpu_bytes


def test_a_full_fine_tune_gets_8_bit_state_and_an_adapter_suggested() -> None:
    now = a_baseline(a_table(blocks=8, frozen=0, trained=7, saved=1), adapter={"type": "full"})
    found = suggest_changes(now)
    assert not any("base_weights" in change.what for change in found)
    adamw8bit = named(found, "optimizer.name=adamw8bit")
    assert adamw8bit.gpu_bytes == now.peak_bytes - 8 * 7 * 2 * GIB * 3 // 4
    assert named(found, "adapter.type=lora").fits


def test_the_smallest_machine_that_the_run_fits_is_suggested() -> None:
    found = named(suggest_changes(a_baseline(a_table(saved=20))), "--machine")
    assert found.what == "--machine gh200-144" and found.time == pytest.approx(1.0, rel=0.05)
    nowhere = suggest_changes(a_baseline(a_table(saved=100)))
    assert not any("--machine" in change.what for change in nowhere)


def test_following_a_plan_is_suggested_with_the_figures_of_the_plan() -> None:
    now = a_baseline(a_table(saved=30))
    modelled = PlanEstimate(1.3, 1.25, "compute", 90 * GIB, 60 * GIB)
    plan = MemoryPlan("train model", "gh200-96", True, (), 1, OptimizerPlacement.GPU, False, modelled)
    found = named(suggest_changes(replace(now, plan=plan)), "plan.act=auto")
    assert found.gpu_bytes == 90 * GIB and found.host_bytes == 60 * GIB
    assert found.time == pytest.approx(1.3 / (1200 / 990))


def test_for_a_run_that_follows_plans_each_change_is_planned_again() -> None:
    now = a_baseline(a_table(frozen=60, saved=30, idle=7), a_capacity(host_gib=100), datasets=VIDEO)
    limits = MemoryLimits(96 * GIB, 100 * GIB)
    unplannable = replace(
        now, plan=make_plan(now.table, now.capacity.machine, limits), follows_plans=True, limits=limits
    )
    assert not unplannable.follows_this_plan and not unplannable.fits
    found = suggest_changes(unplannable)
    assert not any("checkpointing" in one.what or "plan." in one.what for one in found)
    int8 = named(found, "model.base_weights=int8")
    assert int8.fits, "with half the weights a plan fits, though everything on the GPU would not"
    easy = a_baseline(a_table(saved=30), datasets=VIDEO)
    limits = MemoryLimits.from_machine(easy.capacity.machine)
    planned = replace(
        easy, plan=make_plan(easy.table, easy.capacity.machine, limits), follows_plans=True, limits=limits
    )
    assert planned.follows_this_plan and planned.fits and not easy.fits
    assert all(one.time is not None and one.time < 1 for one in suggest_changes(planned))


def test_changes_with_the_same_result_come_before_changes_of_the_result() -> None:
    found = suggest_changes(a_baseline(a_table(saved=25, idle=7), datasets=VIDEO, train={"batch_size": 2}))
    order = [(not change.fits, not change.same_result) for change in found]
    assert order == sorted(order)
    assert found[0].fits and found[0].same_result


@given(st.integers(2, 8), st.integers(1, 60), st.integers(0, 40), st.booleans(), st.integers(1, 8))
def test_every_suggested_change_fits_or_needs_less_memory(
    blocks: int, saved: int, idle: int, checkpointing: bool, batch: int
) -> None:
    table = a_table(blocks, saved=saved, idle=idle)
    now = a_baseline(table, train={"gradient_checkpointing": checkpointing, "batch_size": batch}, datasets=VIDEO)
    for change in suggest_changes(now):
        assert change.fits or (change.gpu_bytes is not None and change.gpu_bytes < now.peak_bytes)
        assert change.time is None or change.time > 0
        assert now.peak_bytes > 96 * GIB or (change.time is not None and change.time < 1)


def test_the_time_of_a_window_is_the_sum_over_its_micro_batches() -> None:
    table = a_table(micro_batches=3)
    rates = MachineRates.from_machine(a_capacity().machine)
    assert seconds_without_plan(table, configured_choice(table, False), rates) == pytest.approx(3 * 4 * 300 / 990)
    assert seconds_without_plan(table, configured_choice(table, True), rates) == pytest.approx(3 * 4 * 400 / 990)


def test_a_change_after_which_no_plan_fits_has_no_time() -> None:
    now = a_baseline(
        a_table(blocks=2, frozen=0, trained=60, saved=5), a_capacity(host_gib=50), adapter={"type": "full"}
    )
    limits = MemoryLimits(96 * GIB, 50 * GIB)
    found = suggest_changes(
        replace(now, plan=make_plan(now.table, now.capacity.machine, limits), follows_plans=True, limits=limits)
    )
    assert found
    assert all(change.fits or change.time is None or change.time < 100 for change in found)


def test_a_run_that_follows_plans_gets_a_machine_suggested_where_a_plan_fits() -> None:
    now = a_baseline(
        a_table(blocks=8, frozen=0, trained=7, saved=2), a_capacity("h100-80-pcie"), adapter={"type": "full"}
    )
    limits = MemoryLimits(76 * GIB, None)
    found = named(
        suggest_changes(
            replace(now, plan=make_plan(now.table, now.capacity.machine, limits), follows_plans=True, limits=limits)
        ),
        "--",
    )
    assert found.what == "--machine gh200-96" and found.fits and found.host_bytes > 0

"""Changes are ranked by what they cost, and what they promise is what the table says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.core.types import GIB
from supertuner.plan.forecast.results import SuggestedChange
from supertuner.plan.forecast.suggestion_baseline import configured_choice, scale_tokens, window_seconds_without_plan
from supertuner.plan.forecast.suggestions import suggest_changes
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import MemoryPlan, OptimizerPlacement, PlanEstimate
from supertuner.plan.placement.plan_step import plan_step
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_forecasts import a_baseline, a_capacity, a_table

VIDEO = [{"id": "clips", "dataset_type": "video", "frames": [81], "instance_data_dir": "/data"}]


def named(found: tuple[SuggestedChange, ...], what: str) -> SuggestedChange:
    return next(change for change in found if change.what.startswith(what))


def test_checkpointing_costs_a_third_and_keeps_only_what_blocks_start_from() -> None:
    now = a_baseline(a_table(blocks=8, frozen=3, saved=20))
    found = named(suggest_changes(now), "train.gradient_checkpointing=true")
    assert found.fits and found.exact and found.same_result
    assert found.time == pytest.approx(4 / 3)
    # 8 × 3 weights, 1 batch, 7 × 1 inputs, one block's 20 of activations, 2 of temporaries
    assert found.gpu_bytes == (24 + 1 + 7 + 20 + 2) * GIB


def test_a_run_that_has_room_is_told_what_would_make_it_faster_and_nothing_else() -> None:
    (found,) = suggest_changes(a_baseline(a_table(saved=2), train={"gradient_checkpointing": True}, datasets=VIDEO))
    assert found.what == "train.gradient_checkpointing=false"
    assert found.fits and found.time == pytest.approx(3 / 4)
    assert suggest_changes(a_baseline(a_table(saved=2), datasets=VIDEO)) == ()


def test_a_run_that_checkpoints_for_want_of_room_is_not_told_to_stop() -> None:
    now = a_baseline(a_table(saved=30), train={"gradient_checkpointing": True})
    assert not any("checkpointing" in change.what for change in suggest_changes(now))


def test_one_expert_at_a_time_frees_the_other() -> None:
    now = a_baseline(a_table(frozen=7, saved=15, idle=28))
    assert named(suggest_changes(now), "model.experts").gpu_bytes == now.peak_bytes - 28 * GIB
    assert not any("experts" in change.what for change in suggest_changes(a_baseline(a_table(saved=30))))


def test_overflow_pays_for_every_byte_that_crosses_the_link() -> None:
    now = a_baseline(a_table(saved=30))
    found = named(suggest_changes(now), "memory.overflow")
    over = now.peak_bytes - 96 * GIB
    assert found.gpu_bytes == 96 * GIB and found.host_bytes == over and found.fits
    assert found.time is not None and found.time == pytest.approx(
        1 + (over / 375e9 + over / 296e9) / (1200e12 / 990e12)
    )


def test_overflow_is_no_answer_where_there_is_one_pool_or_where_all_fits() -> None:
    for now in (a_baseline(a_table(saved=40), a_capacity("gb10")), a_baseline(a_table(saved=2))):
        assert not any("overflow" in change.what for change in suggest_changes(now))


def test_the_most_frames_that_fit_are_found() -> None:
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


def test_a_full_fine_tune_is_told_of_smaller_state_and_of_an_adapter() -> None:
    now = a_baseline(a_table(blocks=8, frozen=0, trained=7, saved=1), adapter={"type": "full"})
    found = suggest_changes(now)
    assert not any("base_weights" in change.what for change in found)
    eight = named(found, "optimizer.name=adamw8bit")
    assert eight.gpu_bytes == now.peak_bytes - 8 * 7 * 2 * GIB * 3 // 4
    assert named(found, "adapter.type=lora").fits


def test_a_larger_machine_is_named_if_one_takes_the_run_as_it_is() -> None:
    found = named(suggest_changes(a_baseline(a_table(saved=20))), "--machine")
    assert found.what == "--machine gh200-144" and found.time == pytest.approx(1.0, rel=0.05)
    nowhere = suggest_changes(a_baseline(a_table(saved=100)))
    assert not any("--machine" in change.what for change in nowhere)


def test_a_plan_that_fits_stands_with_its_own_figures() -> None:
    now = a_baseline(a_table(saved=30))
    modelled = PlanEstimate(1.3, 1.25, "compute", 90 * GIB, 60 * GIB)
    plan = MemoryPlan("train model", "gh200-96", True, (), 1, OptimizerPlacement.GPU, False, modelled)
    found = named(suggest_changes(replace(now, plan=plan)), "plan.act=auto")
    assert found.gpu_bytes == 90 * GIB and found.host_bytes == 60 * GIB
    assert found.time == pytest.approx(1.3 / (1200 / 990))


def test_a_run_that_follows_a_plan_is_compared_with_it_and_planned_anew_after_a_change() -> None:
    now = a_baseline(a_table(frozen=60, saved=30, idle=7), a_capacity(host_gib=100), datasets=VIDEO)
    limits = MemoryLimits(96 * GIB, 100 * GIB)
    nowhere = replace(now, plan=plan_step(now.table, now.capacity.machine, limits), follows_plans=True, limits=limits)
    assert not nowhere.follows_this_plan and not nowhere.fits
    found = suggest_changes(nowhere)
    assert not any("checkpointing" in one.what or "plan." in one.what for one in found)
    eight = named(found, "model.base_weights=int8")
    assert eight.fits, "half the weights find room by a plan, and would not without one"
    easy = a_baseline(a_table(saved=30), datasets=VIDEO)
    limits = MemoryLimits.from_machine(easy.capacity.machine)
    planned = replace(easy, plan=plan_step(easy.table, easy.capacity.machine, limits), follows_plans=True, limits=limits)
    assert planned.follows_this_plan and planned.fits and not easy.fits
    assert all(one.time is not None and one.time < 1 for one in suggest_changes(planned))


def test_what_changes_only_time_and_memory_comes_before_what_changes_the_result() -> None:
    found = suggest_changes(a_baseline(a_table(saved=25, idle=7), datasets=VIDEO, train={"batch_size": 2}))
    order = [(not change.fits, not change.same_result) for change in found]
    assert order == sorted(order)
    assert found[0].fits and found[0].same_result


@given(st.integers(2, 8), st.integers(1, 60), st.integers(0, 40), st.booleans(), st.integers(1, 8))
def test_no_change_is_offered_that_neither_fits_nor_helps(
    blocks: int, saved: int, idle: int, checkpointing: bool, batch: int
) -> None:
    table = a_table(blocks, saved=saved, idle=idle)
    now = a_baseline(table, train={"gradient_checkpointing": checkpointing, "batch_size": batch}, datasets=VIDEO)
    for change in suggest_changes(now):
        assert change.fits or (change.gpu_bytes is not None and change.gpu_bytes < now.peak_bytes)
        assert change.time is None or change.time > 0
        assert now.peak_bytes > 96 * GIB or (change.time is not None and change.time < 1)


def test_the_time_of_a_window_is_that_of_its_micro_batches() -> None:
    table = a_table(micro_batches=3)
    rates = MachineRates.from_machine(a_capacity().machine)
    assert window_seconds_without_plan(table, configured_choice(table, False), rates) == pytest.approx(
        3 * 4 * 300 / 990
    )
    assert window_seconds_without_plan(table, configured_choice(table, True), rates) == pytest.approx(3 * 4 * 400 / 990)


def test_a_change_by_which_no_plan_fits_has_no_time() -> None:
    now = a_baseline(
        a_table(blocks=2, frozen=0, trained=60, saved=5), a_capacity(host_gib=50), adapter={"type": "full"}
    )
    limits = MemoryLimits(96 * GIB, 50 * GIB)
    found = suggest_changes(
        replace(now, plan=plan_step(now.table, now.capacity.machine, limits), follows_plans=True, limits=limits)
    )
    assert found
    assert all(change.fits or change.time is None or change.time < 100 for change in found)


def test_a_run_that_follows_plans_is_sent_to_a_machine_where_one_fits() -> None:
    now = a_baseline(
        a_table(blocks=8, frozen=0, trained=7, saved=2), a_capacity("h100-80-pcie"), adapter={"type": "full"}
    )
    limits = MemoryLimits(76 * GIB, None)
    found = named(
        suggest_changes(
            replace(now, plan=plan_step(now.table, now.capacity.machine, limits), follows_plans=True, limits=limits)
        ),
        "--",
    )
    assert found.what == "--machine gh200-96" and found.fits and found.host_bytes > 0

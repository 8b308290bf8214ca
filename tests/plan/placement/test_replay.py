"""The simulation of a step: small cases against arithmetic by hand, and equal results on the emulated superchip."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan_replay import PAGE_BYTES, SuperchipMachine, build_superchip, replay_plan
from supertuner.memory.driver import DriverError
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.fast_simulate import evaluate_choice
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.simulate import simulate_window
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_steps import AMPLE, PLAIN, ROUND, a_choice, a_step, choices, rates, tables

THREE = a_step(PLAIN, PLAIN, PLAIN)
"""18 s of blocks and 1 s of update."""


def timed(
    table: StepTable, choice: PlacementChoice, speeds: MachineRates = ROUND, limits: MemoryLimits = AMPLE
) -> float:
    return evaluate_choice(TimedStep.from_table(table, speeds), choice, limits).seconds


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_blocks_that_keep_everything_take_the_time_of_their_work() -> None:
    assert timed(THREE, a_choice("KKK")) == 3 * 2 + 3 * 4 + 1


def test_a_recomputed_block_runs_its_forward_pass_twice() -> None:
    assert timed(THREE, a_choice("RKR")) == 19 + 2 + 2


def test_copies_of_activations_are_hidden_behind_the_work() -> None:
    # Block 0 is sent from 2 to 4 s while block 1 runs, block 1 from 4 to 6 s while block 2 runs; block 1 stays on the
    # GPU, because no further block is sent. The fetch of block 0 starts with the backward pass of block 1, at 10 s, and
    # is done at 11 s; block 0 needs it at 14 s.
    assert timed(THREE, a_choice("SSK")) == 19


def test_blocks_wait_for_a_slow_link_as_computed_by_hand() -> None:
    # At 20 bytes/s sending a block takes 5 s: block 0 leaves from 2 to 7 s, and block 2 can begin only then, at 7 s
    # instead of 4 s. Block 1 leaves until 12 s. The backward passes start at 9 s; the fetch of block 0 starts at 13 s,
    # is done at 14 s and needed at 17 s. So the step takes 3 s longer.
    slow = replace(ROUND, to_host_bytes_s=20.0)
    assert timed(THREE, a_choice("SSK"), slow) == 19 + 3


def test_without_prefetch_each_pass_waits_for_streamed_weights() -> None:
    assert timed(THREE, a_choice("KKK", ".x.", ahead=0)) == 19 + 1 + 1


def test_weights_prefetched_one_block_ahead_cause_no_wait() -> None:
    assert timed(THREE, a_choice("KKK", ".x.", ahead=1)) == 19


def test_weights_of_the_last_block_stay_in_their_slot_for_its_backward_pass() -> None:
    # Without prefetch they are dropped and fetched again; with it, no other block needs the slot.
    assert timed(THREE, a_choice("KKK", "..x", ahead=0)) == 19 + 2
    assert timed(THREE, a_choice("KKK", "..x", ahead=1)) == 19


def test_a_link_slower_than_the_work_bounds_a_step_that_streams_all_weights() -> None:
    # 10 s to fetch a block's weights, two slots. Forward: block 0 arrives at 10 and ends at 12 s, block 1 arrives at 20
    # and ends at 22 s, block 2 at 30 and 32 s; its backward pass ends at 36 s. Block 1 was dropped: its fetch starts at
    # 32 s, it arrives at 42 s and ends its backward pass at 46 s. The fetch of block 0 takes from 42 to 52 s.
    slow = replace(ROUND, to_device_bytes_s=10.0)
    assert timed(THREE, a_choice("KKK", "xxx", ahead=1), slow) == pytest.approx(52 + 4 + 1)


TRAINED = replace(PLAIN, frozen_bytes=0, trained_bytes=100, gradient_bytes=100, state_bytes=200)


def test_an_optimizer_step_on_the_host_waits_for_gradients_and_copies_weights_back() -> None:
    # Sending a gradient takes 2 s: the last arrives at 18 + 2 s. The host reads and writes 2 × (100 + 200) + 100 bytes
    # per block: 2.1 s. 300 bytes of weights are copied back in 3 s.
    table = a_step(TRAINED, TRAINED, TRAINED)
    assert timed(table, a_choice("KKK", stepping=OptimizerPlacement.HOST)) == pytest.approx(20 + 2.1 + 3)


def test_streamed_state_shares_the_link_in_both_directions() -> None:
    # Pieces of 200 bytes arrive in 2 s, are stepped in 1/3 s, and leave in 4 s. The link: piece 0 arrives until 2 s,
    # piece 1 until 4 s, piece 0 leaves until 8 s, piece 2 arrives until 10 s, piece 1 leaves until 14 s, piece 2 until
    # 18 s. No copy is running when the window ends.
    table = a_step(TRAINED, TRAINED, TRAINED)
    simulated = evaluate_choice(
        TimedStep.from_table(table, ROUND), a_choice("RRR", stepping=OptimizerPlacement.STREAMED), AMPLE
    ).simulated
    assert simulated is not None and simulated.update_s == pytest.approx(18)


def test_gradients_of_streamed_weights_are_fetched_to_accumulate() -> None:
    # One block of 100 bytes in host memory, two micro-batches. The weights are fetched once, in 1 s, and stay in their
    # slot. Forward and backward take 6 s. The gradient leaves in 2 s, during the next forward pass. The second
    # micro-batch's gradient waits 1 s for the first to return, and the sum leaves in 2 s. Then weights, gradient and
    # state arrive in 4 s, are stepped in 1 s, and weights and state leave in 6 s.
    table = a_step(TRAINED, micro_batches=2)
    assert timed(table, a_choice("K", "x", stepping=OptimizerPlacement.STREAMED)) == pytest.approx(
        1 + 6 + 6 + 1 + 2 + 4 + 1 + 6
    )


def test_further_micro_batches_take_equally_long() -> None:
    many = replace(THREE, micro_batches=7)
    assert timed(many, a_choice("SSK")) == pytest.approx(7 * 18 + 1)


# ── the emulated superchip ───────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_emulated_superchip_and_the_fast_clock_give_equal_results(data: st.DataObject) -> None:
    table, speeds = data.draw(tables()), data.draw(rates())
    choice = data.draw(choices(table)).without_immediate_refetches()
    step = TimedStep.from_table(table, speeds)
    needed = compute_memory_needs(step, choice)
    limits = MemoryLimits(needed.gpu_bytes + data.draw(st.integers(0, 50)), needed.host_bytes)
    chip = SuperchipMachine(build_superchip(MACHINES["gh200-96"], speeds, MemoryLimits(PAGE_BYTES, 10**6)))
    slow = simulate_window(step, choice, needed, limits.gpu_bytes, chip)
    assert slow is not None
    assert slow == evaluate_choice(step, choice, limits).simulated
    assert chip.peak_bytes <= limits.gpu_bytes


def test_the_emulated_superchip_raises_for_a_plan_that_does_not_fit() -> None:
    large = replace(PLAIN, frozen_bytes=60 << 30)
    table = a_step(large, large)
    blocks = tuple(BlockPlan(b.name, WeightPlacement.GPU, a_choice("K").activations[0], "") for b in table.blocks)
    plan = MemoryPlan("train model", "gh200-96", True, blocks, 1, OptimizerPlacement.GPU, False, None)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        replay_plan(table, plan, MACHINES["gh200-96"], MemoryLimits.from_machine(MACHINES["gh200-96"]))


def test_copies_on_the_superchip_run_one_after_the_other_and_not_before_their_start_time() -> None:
    chip: EmulatedSuperchip = build_superchip(MACHINES["gh200-96"], ROUND, MemoryLimits(PAGE_BYTES, PAGE_BYTES))
    assert chip.copy_async(100, True) == 1.0
    assert chip.copy_async(100, False) == 3.0
    assert chip.copy_async(100, True, not_before=10.0) == 11.0
    chip.wait_until(5.0)
    assert chip.seconds == 5.0

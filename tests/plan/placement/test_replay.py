"""A step on the modelled clock: small cases against arithmetic by hand, and the same answer from the superchip."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.memory.driver import DriverError
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.fast_simulate import evaluate_choice
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.replay import PAGE_BYTES, SuperchipMachine, build_superchip, replay_plan
from supertuner.plan.placement.simulate import simulate_window
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_steps import AMPLE, PLAIN, ROUND, a_choice, a_step, choices, rates, tables

THREE = a_step(PLAIN, PLAIN, PLAIN)
"""18 seconds of blocks and one of update."""


def timed(
    table: StepTable, choice: PlacementChoice, speeds: MachineRates = ROUND, limits: MemoryLimits = AMPLE
) -> float:
    return evaluate_choice(TimedStep.from_table(table, speeds), choice, limits).seconds


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_three_blocks_that_stay_take_their_own_time() -> None:
    assert timed(THREE, a_choice("KKK")) == 3 * 2 + 3 * 4 + 1


def test_a_block_that_is_recomputed_runs_forward_once_more() -> None:
    assert timed(THREE, a_choice("RKR")) == 19 + 2 + 2


def test_three_blocks_whose_activations_are_sent_hide_the_link_behind_their_work() -> None:
    # Block 0 is sent from 2 to 4 while block 1 runs, block 1 from 4 to 6 while block 2 does, and stays until another
    # is sent. Block 0 is asked for when the backward pass of block 1 begins, at 10, is there at 11, and needed at 14.
    assert timed(THREE, a_choice("SSK")) == 19


def test_three_blocks_on_a_slow_link_wait_exactly_where_arithmetic_says() -> None:
    # At 20 bytes a second a block takes 5 s to leave: block 0 leaves from 2 to 7, and block 2 may begin only when it
    # is gone: 7 instead of 4, three seconds late. Block 1 leaves until 12. The backward passes run from 9; block 0 is
    # asked for at 13, there at 14, needed at 17. So 3 seconds in all.
    slow = replace(ROUND, to_host_bytes_s=20.0)
    assert timed(THREE, a_choice("SSK"), slow) == 19 + 3


def test_weights_that_come_when_they_are_used_are_waited_for_twice() -> None:
    assert timed(THREE, a_choice("KKK", ".x.", ahead=0)) == 19 + 1 + 1


def test_weights_that_come_one_block_ahead_are_not_waited_for() -> None:
    assert timed(THREE, a_choice("KKK", ".x.", ahead=1)) == 19


def test_weights_of_the_last_block_stay_for_its_backward_pass() -> None:
    # Without a distance they go and come again; with one, the slot is needed for nothing else.
    assert timed(THREE, a_choice("KKK", "..x", ahead=0)) == 19 + 2
    assert timed(THREE, a_choice("KKK", "..x", ahead=1)) == 19


def test_weights_that_all_stream_over_a_link_slower_than_the_work_are_bound_by_it() -> None:
    # 10 s for each block's weights, two slots. Forward: block 0 comes until 10 and runs until 12, block 1 comes until
    # 20 and runs until 22, block 2 until 30 and 32, and backward until 36. Block 1 was dropped; it is asked for when
    # that begins, at 32, comes until 42, and runs backward until 46. Block 0 is asked for at 42 and comes until 52.
    slow = replace(ROUND, to_device_bytes_s=10.0)
    assert timed(THREE, a_choice("KKK", "xxx", ahead=1), slow) == pytest.approx(52 + 4 + 1)


TRAINED = replace(PLAIN, frozen_bytes=0, trained_bytes=100, gradient_bytes=100, state_bytes=200)


def test_a_step_on_the_host_takes_gradients_there_weights_both_ways_and_the_hosts_memory() -> None:
    # Gradients leave in 2 s each: the last at 18 + 2. The host reads and writes 2 × (100 + 200) + 100 bytes a block:
    # 2.1 s. 300 bytes of weights come back in 3 s.
    table = a_step(TRAINED, TRAINED, TRAINED)
    assert timed(table, a_choice("KKK", stepping=OptimizerPlacement.HOST)) == pytest.approx(20 + 2.1 + 3)


def test_state_that_streams_comes_in_turn_with_what_goes_home() -> None:
    # Pieces of 200 bytes come in 2 s, are stepped in a third of one, and go home in 4 s. The link: piece 0 until 2,
    # piece 1 until 4, piece 0 home until 8, piece 2 until 10, piece 1 home until 14; piece 2 was stepped long before
    # and goes home until 18. Nothing is on its way when the window is over.
    table = a_step(TRAINED, TRAINED, TRAINED)
    played = evaluate_choice(
        TimedStep.from_table(table, ROUND), a_choice("RRR", stepping=OptimizerPlacement.STREAMED), AMPLE
    ).simulated
    assert played is not None and played.update_s == pytest.approx(18)


def test_gradients_of_weights_at_home_leave_and_come_to_be_added_to() -> None:
    # One block of 100 bytes at home, two micro-batches. The weights come once, 1 s, and stay in their slot. Forward and
    # backward 6 s. Its gradient leaves in 2 s, behind the next forward pass. That micro-batch's gradient waits for the
    # old one to come, 1 s, and leaves in 2 s. Then weights, gradient and state come in 4 s, are stepped in one, and
    # weights and state go home in 6 s.
    table = a_step(TRAINED, micro_batches=2)
    assert timed(table, a_choice("K", "x", stepping=OptimizerPlacement.STREAMED)) == pytest.approx(
        1 + 6 + 6 + 1 + 2 + 4 + 1 + 6
    )


def test_micro_batches_beyond_the_first_take_as_long_as_one_another() -> None:
    many = replace(THREE, micro_batches=7)
    assert timed(many, a_choice("SSK")) == pytest.approx(7 * 18 + 1)


# ── the software superchip ───────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_software_superchip_and_the_quick_clock_say_the_same(data: st.DataObject) -> None:
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


def test_the_software_superchip_refuses_a_plan_that_does_not_fit() -> None:
    large = replace(PLAIN, frozen_bytes=60 << 30)
    table = a_step(large, large)
    blocks = tuple(BlockPlan(b.name, WeightPlacement.GPU, a_choice("K").activations[0], "") for b in table.blocks)
    plan = MemoryPlan("train model", "gh200-96", True, blocks, 1, OptimizerPlacement.GPU, False, None)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        replay_plan(table, plan, MACHINES["gh200-96"], MemoryLimits.from_machine(MACHINES["gh200-96"]))


def test_copies_on_the_superchip_take_the_link_in_turn_and_never_before_they_may() -> None:
    chip: EmulatedSuperchip = build_superchip(MACHINES["gh200-96"], ROUND, MemoryLimits(PAGE_BYTES, PAGE_BYTES))
    assert chip.copy_async(100, True) == 1.0
    assert chip.copy_async(100, False) == 3.0
    assert chip.copy_async(100, True, not_before=10.0) == 11.0
    chip.wait_until(5.0)
    assert chip.seconds == 5.0

"""The bound: what arithmetic by hand says in small cases, and that no schedule whatsoever is quicker."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.paging_model import simulate_paging
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.fast_simulate import evaluate_choice
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import OptimizerPlacement
from supertuner.plan.placement.roofline import step_time_bound
from supertuner.plan.placement.lp_bound import maximize
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_steps import AMPLE, PLAIN, ROUND, a_step, choices, rates, tables
from tests.plan.random_schedules import RandomSchedule, ScheduleStuck

FOUR = a_step(PLAIN, PLAIN, PLAIN, PLAIN)
"""24 seconds of blocks, one of update; 400 bytes of weights, 400 of activations."""
TRAINED = replace(
    PLAIN, frozen_bytes=0, trained_bytes=100, gradient_bytes=100, state_bytes=200, saved_bytes=0, input_bytes=0
)


def test_where_everything_fits_the_bound_is_the_work() -> None:
    found = step_time_bound(FOUR, ROUND, AMPLE)
    assert (
        found.seconds == pytest.approx(25)
        and found.limited_by == "compute"
        and found.optimizer is OptimizerPlacement.GPU
    )


def test_where_neither_memory_holds_the_activations_the_rest_is_done_again() -> None:
    # 500 bytes on the GPU, none with the host. While block 3 is in its backward pass its 100 bytes of weights and 100
    # of activations are there, and 300 of other weights: nothing is left but for three inputs of 10, which do not fit.
    assert step_time_bound(FOUR, ROUND, MemoryLimits(500, 0)).seconds == math.inf
    # With 530 they fit: three blocks run forward again. With 620 one of them may stay: 90 bytes more than its input.
    assert step_time_bound(FOUR, ROUND, MemoryLimits(530, 0)).seconds == pytest.approx(25 + 3 * 2)
    assert step_time_bound(FOUR, ROUND, MemoryLimits(620, 0)).seconds == pytest.approx(25 + 2 * 2)


def test_what_the_link_must_carry_bounds_the_phase_in_which_it_must() -> None:
    # Nothing can be recomputed, and the GPU holds one block's activations. So those of three leave until block 3's
    # backward pass begins: 300 bytes at 10 a second, 30 s instead of 8 s of forward work; and they come back in 3 s
    # behind 16 s of backward work.
    fixed = a_step(*[replace(PLAIN, frozen_bytes=0, recomputable=False)] * 4)
    slow = replace(ROUND, to_host_bytes_s=10.0)
    found = step_time_bound(fixed, slow, MemoryLimits(100, 300))
    assert found.seconds == pytest.approx(30 + 16 + 1) and found.limited_by == "link to host"


def test_frozen_weights_that_are_dropped_make_room_for_activations() -> None:
    # The same with weights of 100 a block: dropping those of three blocks costs nothing, and they come again in 3 s
    # behind the backward passes. So nothing is sent.
    fixed = a_step(*[replace(PLAIN, recomputable=False)] * 4)
    assert step_time_bound(fixed, replace(ROUND, to_host_bytes_s=1.0), MemoryLimits(500, 300)).seconds == pytest.approx(
        25
    )


def test_recomputing_is_cheaper_than_a_very_slow_link_and_the_bound_knows() -> None:
    # 8 bytes leave behind 8 s of forward work; of the 270 that have no room, 262 are made again: 2 s for each 90.
    slow = replace(ROUND, to_host_bytes_s=1.0)
    table = a_step(*[replace(PLAIN, frozen_bytes=0)] * 4)
    assert step_time_bound(table, slow, MemoryLimits(130, 10**6)).seconds == pytest.approx(25 + 2 * 262 / 90, rel=1e-3)


def test_state_that_has_no_room_comes_and_goes_in_the_update() -> None:
    # 400 of state, the GPU has 390: it comes in 4 s and goes home in 8 s, for nothing is on its way between windows.
    # Nor is there room for 400 of weights and gradients: 5 of each come in 0.1 s, and the weights go home in 0.1 s.
    table = a_step(TRAINED, TRAINED, update_s=0.0)
    no_host = replace(ROUND, host_bytes_s=None)
    found = step_time_bound(table, no_host, MemoryLimits(390, 10**6))
    assert found.optimizer is OptimizerPlacement.STREAMED and found.seconds == pytest.approx(12 + 4 + 8 + 0.2)


def test_a_host_that_is_quick_enough_steps() -> None:
    # 2 × (100 + 200) + 100 bytes for each of two blocks: 1.4 s.
    found = step_time_bound(a_step(TRAINED, TRAINED, update_s=0.0), ROUND, MemoryLimits(390, 10**6))
    assert found.optimizer is OptimizerPlacement.HOST and found.seconds == pytest.approx(12 + 1.4)


def test_a_step_that_no_memory_holds_has_no_finite_bound() -> None:
    found = step_time_bound(FOUR, ROUND, MemoryLimits(100, 100))
    assert found.seconds == math.inf and found.limited_by == "does not fit" and found.compute_s == 25


def test_memory_is_what_bounds_work_that_reads_more_than_it_computes() -> None:
    hungry = replace(PLAIN, forward=OperatorWork(1.0, 0.0, 5e9), backward=OperatorWork(1.0, 0.0, 5e9))
    found = step_time_bound(a_step(hungry), ROUND, AMPLE)
    assert found.limited_by == "gpu memory" and found.seconds == pytest.approx(5 + 5 + 1)


def test_arithmetic_of_unknown_speed_is_left_out_and_not_taken_for_slow() -> None:
    spark = MachineRates.from_machine(MACHINES["gb10"])
    assert spark.other_flops is None and spark.unknown_rates == ()
    assert spark.seconds(OperatorWork(other_flops=1e15, gpu_bytes=273e9)) == pytest.approx(1.0)


def test_a_copy_is_no_faster_than_the_host_memory_at_its_end() -> None:
    machine = MACHINES["gh200-96"]
    slow = replace(machine, host_bytes_s=replace(machine.host_bytes_s, value=200e9))
    assert MachineRates.from_machine(slow).to_device_bytes_s == 200e9


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_random_choice_is_quicker_than_the_bound(data: st.DataObject) -> None:
    table, speeds = data.draw(tables()), data.draw(rates())
    step, choice = TimedStep.from_table(table, speeds), data.draw(choices(table)).without_immediate_refetches()
    needed = compute_memory_needs(step, choice)
    limits = MemoryLimits(
        needed.gpu_bytes + data.draw(st.integers(0, 30)), needed.host_bytes + data.draw(st.integers(0, 30))
    )
    assert evaluate_choice(step, choice, limits).seconds >= step_time_bound(table, speeds, limits).seconds * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 10**9))
def test_no_wild_schedule_is_quicker_than_the_bound(data: st.DataObject, seed: int) -> None:
    table, speeds = data.draw(tables(trained=False)), data.draw(rates())
    step = TimedStep.from_table(table, speeds)
    largest = max(step.weight_bytes[b] + step.saved_bytes[b] + 20 for b in range(len(step.weight_bytes)))
    limits = MemoryLimits(
        largest + table.batch_bytes + data.draw(st.integers(0, 200)), data.draw(st.integers(100, 800))
    )
    try:
        took = RandomSchedule(step, limits, seed).seconds()
    except ScheduleStuck:
        assume(False)
    assert took >= step_time_bound(table, speeds, limits).seconds * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(tables(most=4), st.integers(0, 200), st.integers(0, 200))
def test_more_memory_never_raises_the_bound(table: object, gpu: int, host: int) -> None:
    step = TimedStep.from_table(table, ROUND)  # type: ignore[arg-type]
    little, much = MemoryLimits(150 + gpu, 100 + host), MemoryLimits(200 + gpu, 150 + host)
    assert step_time_bound(step.table, ROUND, much).seconds <= step_time_bound(step.table, ROUND, little).seconds * (
        1 + 1e-6
    )


def test_paging_on_a_machine_too_small_is_slower_than_the_bound() -> None:
    machine, gib = MACHINES["gh200-96"], 1 << 30
    block = replace(PLAIN, frozen_bytes=2 * gib, saved_bytes=3 * gib, input_bytes=gib // 4)
    table = a_step(*[replace(block, forward=OperatorWork(1e13), backward=OperatorWork(2e13))] * 6)
    limits, speeds = MemoryLimits(16 * gib, 64 * gib), MachineRates.from_machine(machine)
    found = simulate_paging(TimedStep.from_table(table, speeds), machine, limits)
    assert found is not None and found.link_s > 0
    assert found.seconds > step_time_bound(table, speeds, limits).seconds


def test_the_solver_finds_the_corner_that_arithmetic_finds() -> None:
    # 3x + 2y where x + y <= 4, x + 3y <= 6, x <= 3: at x = 3, y = 1.
    # One more of the first limit would be worth 2, of the second nothing, of the third 1.
    rows = np.array([[1.0, 1.0], [1.0, 3.0], [1.0, 0.0]])
    found, worth = maximize(np.array([3.0, 2.0]), rows, np.array([4.0, 6.0, 3.0]))
    assert found == pytest.approx([3.0, 1.0])
    assert worth == pytest.approx([2.0, 0.0, 1.0])


def test_the_solver_does_not_go_in_circles() -> None:
    # Beale's example, on which the usual rule for pivots does.
    rows = np.array([[0.25, -60.0, -0.04, 9.0], [0.5, -90.0, -0.02, 3.0], [0.0, 0.0, 1.0, 0.0]])
    found, _ = maximize(np.array([0.75, -150.0, 0.02, -6.0]), rows, np.array([0.0, 0.0, 1.0]))
    assert found @ np.array([0.75, -150.0, 0.02, -6.0]) == pytest.approx(0.05)

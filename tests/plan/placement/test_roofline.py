"""The lower bound equals arithmetic by hand in small cases, and no schedule, not even a random one, is faster."""

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
from supertuner.plan.placement.lp_bound import maximize
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import OptimizerPlacement
from supertuner.plan.placement.roofline import step_time_bound
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_steps import AMPLE, PLAIN, ROUND, a_step, choices, rates, tables
from tests.plan.random_schedules import RandomSchedule, ScheduleStuck

FOUR = a_step(PLAIN, PLAIN, PLAIN, PLAIN)
"""24 s of blocks and 1 s of update; 400 bytes of weights, 400 of activations."""
TRAINED = replace(
    PLAIN, frozen_bytes=0, trained_bytes=100, gradient_bytes=100, state_bytes=200, saved_bytes=0, input_bytes=0
)


def test_if_everything_fits_the_bound_is_the_work() -> None:
    found = step_time_bound(FOUR, ROUND, AMPLE)
    assert (
        found.seconds == pytest.approx(25)
        and found.limited_by == "compute"
        and found.optimizer is OptimizerPlacement.GPU
    )


def test_activations_that_fit_in_neither_memory_are_recomputed() -> None:
    # 500 bytes on the GPU, none on the host. During the backward pass of block 3 its 100 bytes of weights and 100 of
    # activations are on the GPU, and 300 of other weights. The three inputs of 10 bytes do not fit.
    assert step_time_bound(FOUR, ROUND, MemoryLimits(500, 0)).seconds == math.inf
    # With 530 they fit, and three blocks are recomputed. With 620 one of them keeps its activations: 90 bytes more.
    assert step_time_bound(FOUR, ROUND, MemoryLimits(530, 0)).seconds == pytest.approx(25 + 3 * 2)
    assert step_time_bound(FOUR, ROUND, MemoryLimits(620, 0)).seconds == pytest.approx(25 + 2 * 2)


def test_bytes_that_must_cross_the_link_bound_the_phase_in_which_they_must() -> None:
    # Nothing can be recomputed, and the GPU holds one block's activations. Those of three blocks leave before block 3's
    # backward pass begins: 300 bytes at 10 bytes/s take 30 s, more than the 8 s of forward work. They return in 3 s,
    # hidden behind 16 s of backward work.
    fixed = a_step(*[replace(PLAIN, frozen_bytes=0, recomputable=False)] * 4)
    slow = replace(ROUND, to_host_bytes_s=10.0)
    found = step_time_bound(fixed, slow, MemoryLimits(100, 300))
    assert found.seconds == pytest.approx(30 + 16 + 1) and found.limited_by == "link to host"


def test_frozen_weights_are_dropped_before_activations_are_sent() -> None:
    # As above, with 100 bytes of weights per block: dropping those of three blocks is free, and fetching them again
    # takes 3 s, hidden behind the backward passes. So nothing is sent.
    fixed = a_step(*[replace(PLAIN, recomputable=False)] * 4)
    assert step_time_bound(fixed, replace(ROUND, to_host_bytes_s=1.0), MemoryLimits(500, 300)).seconds == pytest.approx(
        25
    )


def test_the_bound_recomputes_what_a_slow_link_cannot_carry() -> None:
    # 8 bytes leave during 8 s of forward work; of the 270 that do not fit, 262 are recomputed, 90 bytes in 2 s.
    slow = replace(ROUND, to_host_bytes_s=1.0)
    table = a_step(*[replace(PLAIN, frozen_bytes=0)] * 4)
    assert step_time_bound(table, slow, MemoryLimits(130, 10**6)).seconds == pytest.approx(25 + 2 * 262 / 90, rel=1e-3)


def test_state_that_does_not_fit_is_copied_in_and_out_in_the_update() -> None:
    # 400 bytes of state, 390 on the GPU: the state arrives in 4 s and leaves in 8 s, because no copy may be running
    # between windows. 400 bytes of weights and gradients do not fit either: 5 of each arrive in 0.1 s, and the weights
    # leave in 0.1 s.
    table = a_step(TRAINED, TRAINED, update_s=0.0)
    no_host = replace(ROUND, host_bytes_s=None)
    found = step_time_bound(table, no_host, MemoryLimits(390, 10**6))
    assert found.optimizer is OptimizerPlacement.STREAMED and found.seconds == pytest.approx(12 + 4 + 8 + 0.2)


def test_a_host_with_fast_memory_steps() -> None:
    # 2 × (100 + 200) + 100 bytes for each of two blocks: 1.4 s.
    found = step_time_bound(a_step(TRAINED, TRAINED, update_s=0.0), ROUND, MemoryLimits(390, 10**6))
    assert found.optimizer is OptimizerPlacement.HOST and found.seconds == pytest.approx(12 + 1.4)


def test_a_step_that_fits_nowhere_has_an_infinite_bound() -> None:
    found = step_time_bound(FOUR, ROUND, MemoryLimits(100, 100))
    assert found.seconds == math.inf and found.limited_by == "does not fit" and found.compute_s == 25


def test_work_that_reads_more_than_it_computes_is_bound_by_gpu_memory() -> None:
    hungry = replace(PLAIN, forward=OperatorWork(1.0, 0.0, 5e9), backward=OperatorWork(1.0, 0.0, 5e9))
    found = step_time_bound(a_step(hungry), ROUND, AMPLE)
    assert found.limited_by == "gpu memory" and found.seconds == pytest.approx(5 + 5 + 1)


def test_arithmetic_of_unknown_rate_is_left_out() -> None:
    spark = MachineRates.from_machine(MACHINES["gb10"])
    assert spark.other_flops is None and spark.unknown_rates == ()
    assert spark.seconds(OperatorWork(other_flops=1e15, gpu_bytes=273e9)) == pytest.approx(1.0)


def test_a_copy_is_not_faster_than_host_memory() -> None:
    machine = MACHINES["gh200-96"]
    slow = replace(machine, host_bytes_s=replace(machine.host_bytes_s, value=200e9))
    assert MachineRates.from_machine(slow).to_device_bytes_s == 200e9


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_random_placement_is_faster_than_the_bound(data: st.DataObject) -> None:
    table, speeds = data.draw(tables()), data.draw(rates())
    step, choice = TimedStep.from_table(table, speeds), data.draw(choices(table)).without_immediate_refetches()
    needed = compute_memory_needs(step, choice)
    limits = MemoryLimits(
        needed.gpu_bytes + data.draw(st.integers(0, 30)), needed.host_bytes + data.draw(st.integers(0, 30))
    )
    assert evaluate_choice(step, choice, limits).seconds >= step_time_bound(table, speeds, limits).seconds * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 10**9))
def test_no_random_schedule_is_faster_than_the_bound(data: st.DataObject, seed: int) -> None:
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


def test_paging_is_slower_than_the_bound() -> None:
    machine, gib = MACHINES["gh200-96"], 1 << 30
    block = replace(PLAIN, frozen_bytes=2 * gib, saved_bytes=3 * gib, input_bytes=gib // 4)
    table = a_step(*[replace(block, forward=OperatorWork(1e13), backward=OperatorWork(2e13))] * 6)
    limits, speeds = MemoryLimits(16 * gib, 64 * gib), MachineRates.from_machine(machine)
    found = simulate_paging(TimedStep.from_table(table, speeds), machine, limits)
    assert found is not None and found.link_s > 0
    assert found.seconds > step_time_bound(table, speeds, limits).seconds


def test_the_simplex_method_finds_the_optimum_and_the_shadow_prices() -> None:
    # Maximize 3x + 2y where x + y <= 4, x + 3y <= 6, x <= 3: the optimum is x = 3, y = 1.
    # One more unit of the first limit gains 2, of the second 0, of the third 1.
    rows = np.array([[1.0, 1.0], [1.0, 3.0], [1.0, 0.0]])
    found, shadow_prices = maximize(np.array([3.0, 2.0]), rows, np.array([4.0, 6.0, 3.0]))
    assert found == pytest.approx([3.0, 1.0])
    assert shadow_prices == pytest.approx([2.0, 0.0, 1.0])


def test_the_simplex_method_does_not_cycle() -> None:
    # Beale's example (1955), on which the largest-coefficient rule cycles.
    rows = np.array([[0.25, -60.0, -0.04, 9.0], [0.5, -90.0, -0.02, 3.0], [0.0, 0.0, 1.0, 0.0]])
    found, _ = maximize(np.array([0.75, -150.0, 0.02, -6.0]), rows, np.array([0.0, 0.0, 1.0]))
    assert found @ np.array([0.75, -150.0, 0.02, -6.0]) == pytest.approx(0.05)

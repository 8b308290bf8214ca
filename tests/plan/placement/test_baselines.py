"""The baselines that plans are compared with: each takes exactly the time that its strategy implies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.paging_model import simulate_paging
from benchmarks.plan_baselines import best_block_swapping, best_checkpointing, compute_baselines
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.choice import TimedStep
from supertuner.plan.placement.plan import ActivationPolicy
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from tests.plan.making_steps import AMPLE, PLAIN, ROUND, a_step

GH200 = MACHINES["gh200-96"]
SPEEDS = MachineRates.from_machine(GH200)
LARGE = replace(
    PLAIN,
    frozen_bytes=2 * GIB,
    saved_bytes=4 * GIB,
    input_bytes=GIB // 4,
    forward=OperatorWork(1e13),
    backward=OperatorWork(2e13),
)
"""10 ms forward, 20 ms backward."""
SIX = a_step(*[LARGE] * 6, update_s=0.0)
COMPUTED_S = 6 * 3e13 / 990e12


def test_if_everything_fits_all_baselines_but_checkpointing_take_the_time_of_the_work() -> None:
    found = compute_baselines(SIX, GH200, MemoryLimits.from_machine(GH200))
    assert found.all_in_hbm == pytest.approx(COMPUTED_S) == found.block_swapping
    assert found.paging is not None and found.paging.seconds == pytest.approx(COMPUTED_S)
    assert found.paging.link_s == 0 and found.paging.activations is ActivationPolicy.KEEP
    assert found.checkpointing == pytest.approx(COMPUTED_S + 6 * 1e13 / 990e12)


def test_paging_moves_what_exceeds_gpu_memory_and_waits_for_it() -> None:
    limits = MemoryLimits(14 * GIB, 64 * GIB)  # 12 GiB of weights alone
    found = simulate_paging(TimedStep.from_table(SIX, SPEEDS), GH200, limits)
    assert found is not None and found.link_s > 0
    assert found.seconds >= COMPUTED_S + found.link_s


def test_paging_beyond_both_memories_does_not_fit() -> None:
    assert simulate_paging(TimedStep.from_table(SIX, SPEEDS), GH200, MemoryLimits(10 * GIB, 4 * GIB)) is None


def test_the_policy_of_the_gh200_forks_reads_the_batch_from_host_memory() -> None:
    step = TimedStep.from_table(replace(SIX, batch_bytes=2 * GIB), SPEEDS)
    plain, forks = (
        simulate_paging(step, GH200, MemoryLimits.from_machine(GH200), batch_on_host=on_host)
        for on_host in (False, True)
    )
    assert plain is not None and forks is not None
    assert plain.link_s == 0 and forks.link_s == pytest.approx(2 * GIB / 375e9)


def test_block_swapping_swaps_as_few_blocks_as_possible_and_waits_for_each_pass() -> None:
    # 300 bytes of weights and no activations; the GPU has 250. With one block in host memory, 200 bytes and a slot of
    # 100 do not fit. With two, 100 bytes and one slot fit. Each pass of a swapped block waits 1 s.
    blocks = [replace(PLAIN, saved_bytes=0, input_bytes=0)] * 3
    found = best_block_swapping(TimedStep.from_table(a_step(*blocks), ROUND), MemoryLimits(250, 10**6))
    assert found is not None and sum(found.choice.streamed) == 2
    assert found.seconds == pytest.approx(19 + 4)


def test_checkpointing_recomputes_every_recomputable_block() -> None:
    fixed = replace(PLAIN, recomputable=False)
    found = best_checkpointing(TimedStep.from_table(a_step(PLAIN, fixed, PLAIN), ROUND), AMPLE)
    assert found is not None and found.choice.activations == (
        ActivationPolicy.RECOMPUTE,
        ActivationPolicy.KEEP,
        ActivationPolicy.RECOMPUTE,
    )
    assert found.seconds == pytest.approx(19 + 2 + 2)

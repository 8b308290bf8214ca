"""The order of block uses is known, and the weight ring follows it: nothing is fetched twice, and nothing late."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from supertuner.plan.placement.plan import ActivationPolicy, WeightPlacement
from supertuner.step.train_step import held_out_losses
from supertuner.train.offload.pinned_memory_pool import ALIGNMENT, HostMemoryPool
from supertuner.train.offload.prefetch_order import BlockPass, block_to_evict, next_uses, upcoming_uses, uses_until
from tests.train.offload.making import CPU, OffloadCase, a_plan, apply_plan_synchronously, batch, window


@given(st.integers(1, 9), st.data(), st.sampled_from(BlockPass))
def test_uses_until_counts_the_upcoming_uses(blocks: int, data: st.DataObject, now: BlockPass) -> None:
    block = data.draw(st.integers(0, blocks - 1))
    uses = [use.block for use in upcoming_uses(block, blocks, now)]
    assert set(uses) == set(range(blocks))
    for other in range(blocks):
        assert uses_until(block, other, blocks, now) == uses.index(other)


def test_a_forward_pass_is_followed_by_its_backward_pass_and_that_by_the_next_forward_pass() -> None:
    def blocks_of(uses: Iterator[tuple[int, bool]]) -> list[tuple[int, bool]]:
        return [tuple(use) for use in islice(uses, 4)]

    assert blocks_of(upcoming_uses(1, 3, BlockPass.FORWARD)) == [(2, False), (2, True), (1, True), (0, True)]
    assert blocks_of(upcoming_uses(1, 3, BlockPass.BACKWARD)) == [(0, True), (0, False), (1, False), (2, False)]
    assert blocks_of(upcoming_uses(1, 3, BlockPass.SAMPLING)) == [(2, False), (0, False), (1, False), (2, False)]
    assert [use.block for use in next_uses(0, 3, BlockPass.FORWARD, 2)] == [1, 2]


def test_the_block_with_the_furthest_next_use_is_evicted() -> None:
    assert block_to_evict([0, 1, 2], 2, 5, BlockPass.FORWARD) == 0
    assert block_to_evict([2, 3, 4], 2, 5, BlockPass.BACKWARD) == 4
    assert block_to_evict([0, 1, 2], 2, 5, BlockPass.SAMPLING) == 1
    assert block_to_evict([2], 2, 5, BlockPass.FORWARD) is None


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_window_fetches_only_blocks_that_are_not_in_slots(ahead: int) -> None:
    """Five blocks: forward and backward are ten uses per micro-batch. The turning points need no fetch."""
    case = OffloadCase(dropout=0.0)
    expert_state = case.expert_state()
    offloaded = apply_plan_synchronously(
        expert_state, a_plan(expert_state.module, WeightPlacement.STREAMED, ahead=ahead)
    )
    window(expert_state, case.step_options(), 0)
    offloaded.transfer.take_counters()
    window(expert_state, case.step_options(), 1)
    counted = offloaded.transfer.take_counters()
    held = ahead + 1
    assert counted.fetches == 2 * 2 * (5 - held), "two micro-batches, two passes, less what is held at each turn"
    assert counted.late == (counted.fetches if ahead == 0 else 0)


def test_sampling_fetches_in_a_cycle_and_is_never_late() -> None:
    case = OffloadCase(dropout=0.0)
    expert_state = case.expert_state()
    offloaded = apply_plan_synchronously(
        expert_state, a_plan(expert_state.module, WeightPlacement.STREAMED, ActivationPolicy.SEND, ahead=1)
    )
    for _ in range(3):
        held_out_losses(expert_state, [batch([1])], case.step_options())
    counted = offloaded.transfer.take_counters()
    assert counted.late == 1, "only the very first block is waited for"
    assert counted.sent_bytes == 0


def test_between_windows_every_weight_is_in_host_memory_and_slots_are_few() -> None:
    case = OffloadCase(kind="full", dropout=0.0)
    expert_state = case.expert_state()
    offloaded = apply_plan_synchronously(expert_state, a_plan(expert_state.module, WeightPlacement.STREAMED, ahead=1))
    homes = {name: p.data_ptr() for name, p in expert_state.module.named_parameters() if name.startswith("blocks.")}
    window(expert_state, case.step_options(), 0)
    assert {name: p.data_ptr() for name, p in expert_state.module.named_parameters() if name in homes} == homes
    largest = max(block.nbytes for block in offloaded.ring.streamed.values())
    assert offloaded.ring.nbytes == 2 * largest


def test_host_memory_is_aligned_disjoint_and_reused() -> None:
    memory = HostMemoryPool(CPU)
    taken = [memory.allocate(size) for size in (1, 511, 512, 513, 20 << 20, 7)]
    assert all(piece.data_ptr() % ALIGNMENT == 0 for piece in taken)
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.nbytes) for piece in taken)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    before = memory.nbytes
    memory.reset()
    again = [memory.allocate(size) for size in (1, 511, 512, 513, 20 << 20, 7)]
    assert memory.nbytes == before and torch.equal(
        torch.tensor([one.data_ptr() for one in again]), torch.tensor([one.data_ptr() for one in taken])
    )

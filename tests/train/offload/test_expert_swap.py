"""Two experts that are swapped: the one that is called is on the device with the right weights, also with averages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from supertuner.models.adapters.attach import TrainableExpert, temporary_weights
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement, WeightPlacement
from supertuner.step.expert_swap import ExpertSwap
from supertuner.step.train_step import ExpertState, WindowResult, held_out_losses
from supertuner.train.offload.swappable_expert import PlannedSwappableExpert
from tests.train.offload.making import (
    OffloadCase,
    a_plan,
    apply_plan_synchronously,
    assert_same,
    batch,
    outcome,
    restore_to_device,
    window,
)

NAMES = ("high_noise", "low")
COURSE = (0, 0, 1, 1, 0, 1)
"""Which expert each window trains."""


def pair(case: OffloadCase) -> list[ExpertState]:
    return [case.expert_state(name) for name in NAMES]


def course(case: OffloadCase, expert_states: list[ExpertState]) -> tuple[list[WindowResult], list[torch.Tensor]]:
    """Windows of both experts, and after each an evaluation of both, with their averages."""
    results, looks = [], []
    for number, which in enumerate(COURSE):
        results.append(window(expert_states[which], case.step_options(), number))
        for one in expert_states:
            with averaged(one):
                looks.append(held_out_losses(one, [batch([50])], case.step_options()))
            looks.append(held_out_losses(one, [batch([51])], case.step_options()))
    return results, looks


@contextmanager
def averaged(expert_state: ExpertState) -> Iterator[None]:
    assert expert_state.ema is not None
    with temporary_weights(
        TrainableExpert("x", "lora", expert_state.module, expert_state.parameters), dict(expert_state.ema.averages)
    ):
        yield


@pytest.mark.parametrize(
    ("case", "streamed", "stepping"),
    [
        (OffloadCase(), False, OptimizerPlacement.GPU),
        (OffloadCase(), True, OptimizerPlacement.HOST),
        (OffloadCase(kind="full"), False, OptimizerPlacement.GPU),
        (OffloadCase(kind="full"), True, OptimizerPlacement.STREAMED),
        (OffloadCase(kind="full"), True, OptimizerPlacement.HOST),
        (OffloadCase(optimizer="automagic"), False, OptimizerPlacement.GPU),
        (OffloadCase(optimizer="automagic"), True, OptimizerPlacement.STREAMED),
    ],
    ids=str,
)
def test_swapped_experts_train_as_resident_ones_under_plans(
    case: OffloadCase, streamed: bool, stepping: OptimizerPlacement
) -> None:
    alone, swapped = pair(case), pair(case)
    weights = WeightPlacement.STREAMED if streamed else WeightPlacement.GPU
    offloaded_experts = [
        apply_plan_synchronously(
            one, a_plan(one.module, weights, ActivationPolicy.SEND, stepping=stepping, idle_at_home=True)
        )
        for one in swapped
    ]
    turns = ExpertSwap()
    for name, offloaded in zip(NAMES, offloaded_experts, strict=True):
        turns.add(name, PlannedSwappableExpert(offloaded))
    wanted, seen = course(case, alone)
    results, looks = course(case, swapped)
    assert results == wanted
    assert all(map(torch.equal, looks, seen))
    assert turns.swap_count > len(COURSE)
    for one, other in zip(swapped, alone, strict=True):
        assert_same(outcome(one), outcome(other))
    for name, offloaded, other in zip(NAMES, offloaded_experts, alone, strict=True):
        turns.remove(name)
        restore_to_device(offloaded)
        assert_same(outcome(offloaded.expert_state), outcome(other))


def test_an_expert_in_host_memory_has_no_bytes_on_the_device() -> None:
    """Its frozen weights in host memory are the same bytes each time: nothing is copied back."""
    swappable = PlannedSwappableExpert(
        apply_plan_synchronously(
            OffloadCase().expert_state(), a_plan(OffloadCase().expert_state().module, idle_at_home=True)
        )
    )
    homes = {name: p.data_ptr() for name, p in swappable.offloaded.expert_state.module.named_parameters()}
    swappable.move_to_device()
    there = {name: p.data_ptr() for name, p in swappable.offloaded.expert_state.module.named_parameters()}
    assert all(there[name] != home for name, home in homes.items())
    sent = swappable.offloaded.transfer.counters.sent_bytes
    swappable.move_to_host(trained=False)
    assert {name: p.data_ptr() for name, p in swappable.offloaded.expert_state.module.named_parameters()} == homes
    assert swappable.offloaded.transfer.counters.sent_bytes == sent

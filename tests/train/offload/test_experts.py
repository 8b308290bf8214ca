"""Two experts that take turns on the device: whoever is called is there and true, whatever was lent to it before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from supertuner.models.adapters.attach import TrainableExpert, temporary_weights
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement, WeightPlacement
from supertuner.step.expert_swap import ExpertSwap
from supertuner.step.window import ExpertState, WindowResult, held_out_losses
from supertuner.train.offload.swappable_expert import PlannedSwappableExpert
from tests.train.offload.making import (
    OffloadCase,
    a_plan,
    apply_plan_synchronously,
    assert_same,
    batch,
    outcome,
    window,
)

NAMES = ("high_noise", "low")
COURSE = (0, 0, 1, 1, 0, 1)
"""Which expert each window trains."""


def pair(case: OffloadCase) -> list[ExpertState]:
    return [case.expert_state(name) for name in NAMES]


def course(case: OffloadCase, trainees: list[ExpertState]) -> tuple[list[WindowResult], list[torch.Tensor]]:
    """Windows of both, and after each a look at both, with the averages lent to them."""
    results, looks = [], []
    for number, which in enumerate(COURSE):
        results.append(window(trainees[which], case.step_options(), number))
        for one in trainees:
            with averaged(one):
                looks.append(held_out_losses(one, [batch([50])], case.step_options()))
            looks.append(held_out_losses(one, [batch([51])], case.step_options()))
    return results, looks


@contextmanager
def averaged(trainee: ExpertState) -> Iterator[None]:
    assert trainee.ema is not None
    with temporary_weights(
        TrainableExpert("x", "lora", trainee.module, trainee.parameters), dict(trainee.ema.averages)
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
def test_experts_in_turn_train_as_experts_side_by_side(
    case: OffloadCase, streamed: bool, stepping: OptimizerPlacement
) -> None:
    alone, guests = pair(case), pair(case)
    weights = WeightPlacement.STREAMED if streamed else WeightPlacement.GPU
    actings = [
        apply_plan_synchronously(
            one, a_plan(one.module, weights, ActivationPolicy.SEND, stepping=stepping, idle_at_home=True)
        )
        for one in guests
    ]
    turns = ExpertSwap()
    for name, acting in zip(NAMES, actings, strict=True):
        turns.add(name, PlannedSwappableExpert(acting))
    wanted, seen = course(case, alone)
    results, looks = course(case, guests)
    assert results == wanted
    assert all(map(torch.equal, looks, seen))
    assert turns.swap_count > len(COURSE)
    for one, other in zip(guests, alone, strict=True):
        assert_same(outcome(one), outcome(other))
    for name, acting, other in zip(NAMES, actings, alone, strict=True):
        turns.remove(name)
        acting.restore_to_device()
        assert_same(outcome(acting.expert_state), outcome(other))


def test_an_expert_at_home_has_no_bytes_of_its_own_on_the_device() -> None:
    """Its frozen weights at home are the same bytes each time: nothing is copied back."""
    guest = PlannedSwappableExpert(
        apply_plan_synchronously(
            OffloadCase().expert_state(), a_plan(OffloadCase().expert_state().module, idle_at_home=True)
        )
    )
    homes = {name: p.data_ptr() for name, p in guest.offloaded.expert_state.module.named_parameters()}
    guest.move_to_device()
    there = {name: p.data_ptr() for name, p in guest.offloaded.expert_state.module.named_parameters()}
    assert all(there[name] != home for name, home in homes.items())
    sent = guest.offloaded.transfer.counters.sent_bytes
    guest.move_to_host(trained=False)
    assert {name: p.data_ptr() for name, p in guest.offloaded.expert_state.module.named_parameters()} == homes
    assert guest.offloaded.transfer.counters.sent_bytes == sent

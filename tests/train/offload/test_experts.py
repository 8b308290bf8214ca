"""Two experts that take turns on the device: whoever is called is there and true, whatever was lent to it before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from supertuner.models.adapters.attach import Trained, applied
from supertuner.plan.placement.plan import Fate, Residence, Stepping
from supertuner.step.window import Trainee, WindowResult, held_out_loss
from supertuner.train.offload.expert_swap import Guest, Turns
from tests.train.offload.making import Case, a_plan, acted, batch, outcome, same, window

NAMES = ("high_noise", "low")
COURSE = (0, 0, 1, 1, 0, 1)
"""Which expert each window trains."""


def pair(case: Case) -> list[Trainee]:
    return [case.trainee(name) for name in NAMES]


def course(case: Case, trainees: list[Trainee]) -> tuple[list[WindowResult], list[torch.Tensor]]:
    """Windows of both, and after each a look at both, with the averages lent to them."""
    results, looks = [], []
    for number, which in enumerate(COURSE):
        results.append(window(trainees[which], case.rules(), number))
        for one in trainees:
            with averaged(one):
                looks.append(held_out_loss(one, [batch([50])], case.rules()))
            looks.append(held_out_loss(one, [batch([51])], case.rules()))
    return results, looks


@contextmanager
def averaged(trainee: Trainee) -> Iterator[None]:
    assert trainee.ema is not None
    with applied(Trained("x", "lora", trainee.module, trainee.parameters), dict(trainee.ema.averages)):
        yield


@pytest.mark.parametrize(
    ("case", "streamed", "stepping"),
    [
        (Case(), False, Stepping.GPU),
        (Case(), True, Stepping.HOST),
        (Case(kind="full"), False, Stepping.GPU),
        (Case(kind="full"), True, Stepping.STREAMED),
        (Case(kind="full"), True, Stepping.HOST),
        (Case(optimizer="automagic"), False, Stepping.GPU),
        (Case(optimizer="automagic"), True, Stepping.STREAMED),
    ],
    ids=str,
)
def test_experts_in_turn_train_as_experts_side_by_side(case: Case, streamed: bool, stepping: Stepping) -> None:
    alone, guests = pair(case), pair(case)
    weights = Residence.STREAMED if streamed else Residence.GPU
    actings = [
        acted(one, a_plan(one.module, weights, Fate.SEND, stepping=stepping, idle_at_home=True)) for one in guests
    ]
    turns = Turns()
    for name, acting in zip(NAMES, actings, strict=True):
        turns.add(name, Guest(acting))
    wanted, seen = course(case, alone)
    results, looks = course(case, guests)
    assert results == wanted
    assert all(map(torch.equal, looks, seen))
    assert turns.changes > len(COURSE)
    for one, other in zip(guests, alone, strict=True):
        same(outcome(one), outcome(other))
    for name, acting, other in zip(NAMES, actings, alone, strict=True):
        turns.drop(name)
        acting.remove()
        same(outcome(acting.trainee), outcome(other))


def test_an_expert_at_home_has_no_bytes_of_its_own_on_the_device() -> None:
    """Its frozen weights at home are the same bytes each time: nothing is copied back."""
    guest = Guest(acted(Case().trainee(), a_plan(Case().trainee().module, idle_at_home=True)))
    homes = {name: p.data_ptr() for name, p in guest.acting.trainee.module.named_parameters()}
    guest.come()
    there = {name: p.data_ptr() for name, p in guest.acting.trainee.module.named_parameters()}
    assert all(there[name] != home for name, home in homes.items())
    sent = guest.acting.carrier.counters.sent_bytes
    guest.leave()
    assert {name: p.data_ptr() for name, p in guest.acting.trainee.module.named_parameters()} == homes
    assert guest.acting.carrier.counters.sent_bytes == sent

"""What is between two windows: weights at home, no copy under way into memory that is given back, nothing piling up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from supertuner.core.errors import TrainError
from supertuner.core.events import Silence
from supertuner.plan.placement.plan import Fate, Residence, Stepping
from supertuner.plan.placement.planner import Planned
from supertuner.plan.placement.replan import Basis
from supertuner.step.window import held_out_loss
from supertuner.train.offload.apply import Acting, act
from supertuner.train.offload.expert_swap import Guest, Turns
from supertuner.train.offload.host_memory import HostMemory
from supertuner.train.offload.manager import Acts
from supertuner.train.offload.transfer import Counters, InPlace, Mark, Pair
from tests.train.offload.making import CPU, Case, a_plan, acted, batch, outcome, same, window

CASE = Case()


class Marking(InPlace):
    """Copies are made at once, and it is written down who waited for which."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.begun: list[int] = []
        self.awaited: set[int] = set()
        self.taken = 0

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Mark] = ()) -> Mark:
        super().fetch(pairs, after)
        self.begun.append(len(self.begun))
        return self.begun[-1]

    def await_(self, mark: Mark) -> None:
        self.awaited.add(mark)

    def take(self) -> Counters:
        self.taken += 1
        return super().take()


def on_slots(acting: Acting) -> list[str]:
    streamed = acting.ring.streamed.values()
    return [name for block in streamed for name, p in block.named.items() if acting.ring.slot_of(p.data)]


@pytest.mark.parametrize("fate", Fate)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_after_a_window_no_weight_is_on_a_slot_and_the_distance_may_change(fate: Fate, kind: str) -> None:
    case = Case(kind=kind)
    alone, trainee = case.trainee(), case.trainee()
    acting = acted(trainee, a_plan(trainee.module, Residence.STREAMED, fate))
    for number, ahead in enumerate((2, 0, 1)):
        assert window(trainee, case.rules(), number) == window(alone, case.rules(), number)
        assert not on_slots(acting)
        acting.fetch_ahead(ahead)
    same(outcome(trainee), outcome(alone))


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.RECOMPUTE])
def test_experts_with_streamed_blocks_take_turns_whatever_becomes_of_activations(fate: Fate) -> None:
    names = ("high_noise", "low")
    alone, guests = ([CASE.trainee(name) for name in names] for _ in range(2))
    turns = Turns()
    for name, one in zip(names, guests, strict=True):
        turns.add(name, Guest(acted(one, a_plan(one.module, Residence.STREAMED, fate, idle_at_home=True))))
    for number, which in enumerate((0, 1, 0)):
        assert window(guests[which], CASE.rules(), number) == window(alone[which], CASE.rules(), number)
    for one, other in zip(guests, alone, strict=True):
        same(outcome(one), outcome(other))


def test_slots_are_given_back_after_the_computation_has_waited_for_all_copies_into_them() -> None:
    """Else others could be given the memory while a copy for a pass that never comes still writes into it."""
    trainee, carrier = CASE.trainee(), Marking()
    acting = act(trainee, a_plan(trainee.module, Residence.STREAMED, ahead=2), carrier)
    held_out_loss(trainee, [batch([0])], CASE.rules())
    assert set(carrier.begun) - carrier.awaited, "blocks of the next pass are under way"
    acting.fetch_ahead(1)
    assert set(carrier.begun) == carrier.awaited


def test_host_memory_that_cannot_be_had_is_told_with_what_needs_less() -> None:
    with pytest.raises(TrainError, match=r"host memory cannot be had .*plan\.activations"):
        HostMemory(CPU).take(1 << 60)


def test_counters_do_not_pile_up_where_nobody_looks_at_them() -> None:
    trainee, carrier = CASE.trainee(), Marking()
    planned = Planned(a_plan(trainee.module, stepping=Stepping.HOST), Basis(), 1)
    acts = Acts([trainee], {trainee.expert.name: planned}, carrier, Silence(), every=0)
    window(trainee, CASE.rules(), 0)
    acts.after_window(trainee.expert.name, 3, 1.0)
    assert carrier.taken == 1

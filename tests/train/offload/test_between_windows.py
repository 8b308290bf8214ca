"""What is between two windows: weights at home, no copy under way into memory that is given back, nothing piling up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from supertuner.core.errors import TrainError
from supertuner.core.events import NullSink
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.planner import ExpertPlan
from supertuner.plan.placement.replan import PlanAssumptions, TransferCounters
from supertuner.step.expert_swap import ExpertSwap
from supertuner.step.window import held_out_losses
from supertuner.train.offload.apply import OffloadedExpert, apply_plan
from supertuner.train.offload.host_memory import HostMemoryPool
from supertuner.train.offload.manager import OffloadManager
from supertuner.train.offload.swappable_expert import PlannedSwappableExpert
from supertuner.train.offload.transfer import CopyPair, SynchronousTransfer, TransferEvent
from tests.train.offload.making import (
    CPU,
    OffloadCase,
    a_plan,
    apply_plan_synchronously,
    assert_same,
    batch,
    outcome,
    window,
)

CASE = OffloadCase()


class RecordingTransfer(SynchronousTransfer):
    """Copies are made at once, and it is written down who waited for which."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.begun: list[int] = []
        self.awaited: set[int] = set()
        self.taken = 0

    def copy_to_device(self, pairs: Sequence[CopyPair], after: Iterable[TransferEvent] = ()) -> TransferEvent:
        super().copy_to_device(pairs, after)
        self.begun.append(len(self.begun))
        return self.begun[-1]

    def wait_on_device(self, mark: TransferEvent) -> None:
        self.awaited.add(mark)

    def take_counters(self) -> TransferCounters:
        self.taken += 1
        return super().take_counters()


def on_slots(acting: OffloadedExpert) -> list[str]:
    streamed = acting.ring.streamed.values()
    return [name for block in streamed for name, p in block.parameters.items() if acting.ring.is_in_slot(p.data)]


@pytest.mark.parametrize("fate", ActivationPolicy)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_after_a_window_no_weight_is_on_a_slot_and_the_distance_may_change(fate: ActivationPolicy, kind: str) -> None:
    case = OffloadCase(kind=kind)
    alone, trainee = case.expert_state(), case.expert_state()
    acting = apply_plan_synchronously(trainee, a_plan(trainee.module, WeightPlacement.STREAMED, fate))
    for number, ahead in enumerate((2, 0, 1)):
        assert window(trainee, case.step_options(), number) == window(alone, case.step_options(), number)
        assert not on_slots(acting)
        acting.set_prefetch_depth(ahead)
    assert_same(outcome(trainee), outcome(alone))


@pytest.mark.parametrize("fate", [ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE])
def test_experts_with_streamed_blocks_take_turns_whatever_becomes_of_activations(fate: ActivationPolicy) -> None:
    names = ("high_noise", "low")
    alone, guests = ([CASE.expert_state(name) for name in names] for _ in range(2))
    turns = ExpertSwap()
    for name, one in zip(names, guests, strict=True):
        turns.add(
            name,
            PlannedSwappableExpert(
                apply_plan_synchronously(one, a_plan(one.module, WeightPlacement.STREAMED, fate, idle_at_home=True))
            ),
        )
    for number, which in enumerate((0, 1, 0)):
        assert window(guests[which], CASE.step_options(), number) == window(alone[which], CASE.step_options(), number)
    for one, other in zip(guests, alone, strict=True):
        assert_same(outcome(one), outcome(other))


def test_slots_are_given_back_after_the_computation_has_waited_for_all_copies_into_them() -> None:
    """Else others could be given the memory while a copy for a pass that never comes still writes into it."""
    trainee, carrier = CASE.expert_state(), RecordingTransfer()
    acting = apply_plan(trainee, a_plan(trainee.module, WeightPlacement.STREAMED, ahead=2), carrier)
    held_out_losses(trainee, [batch([0])], CASE.step_options())
    assert set(carrier.begun) - carrier.awaited, "blocks of the next pass are under way"
    acting.set_prefetch_depth(1)
    assert set(carrier.begun) == carrier.awaited


def test_host_memory_that_cannot_be_had_is_told_with_what_needs_less() -> None:
    with pytest.raises(TrainError, match=r"host memory cannot be had .*plan\.activations"):
        HostMemoryPool(CPU).allocate(1 << 60)


def test_counters_do_not_pile_up_where_nobody_looks_at_them() -> None:
    trainee, carrier = CASE.expert_state(), RecordingTransfer()
    planned = ExpertPlan(a_plan(trainee.module, stepping=OptimizerPlacement.HOST), PlanAssumptions(), 1)
    acts = OffloadManager([trainee], {trainee.expert.name: planned}, carrier, NullSink(), check_every=0)
    window(trainee, CASE.step_options(), 0)
    acts.after_window(trainee.expert.name, 3, 1.0)
    assert carrier.taken == 1

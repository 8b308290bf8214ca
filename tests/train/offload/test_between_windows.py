"""Between two windows: weights are in host memory, no copy runs into freed memory, and no counter grows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from supertuner.core.errors import TrainError
from supertuner.core.events import NullSink
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.replan import PlanAssumptions, TransferCounters
from supertuner.plan.placement.run_plans import ExpertPlan
from supertuner.step.expert_swap import ExpertSwap
from supertuner.step.train_step import held_out_losses
from supertuner.train.offload.apply import OffloadedExpert, apply_plan
from supertuner.train.offload.manager import OffloadManager
from supertuner.train.offload.pinned_memory_pool import HostMemoryPool
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
    """Copies synchronously, and records which events were waited for."""

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


def on_slots(offloaded: OffloadedExpert) -> list[str]:
    streamed = offloaded.ring.streamed.values()
    return [name for block in streamed for name, p in block.parameters.items() if offloaded.ring.is_in_slot(p.data)]


@pytest.mark.parametrize("fate", ActivationPolicy)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_after_a_window_no_weight_is_in_a_slot_and_the_prefetch_depth_may_change(
    fate: ActivationPolicy, kind: str
) -> None:
    case = OffloadCase(kind=kind)
    alone, expert_state = case.expert_state(), case.expert_state()
    offloaded = apply_plan_synchronously(expert_state, a_plan(expert_state.module, WeightPlacement.STREAMED, fate))
    for number, ahead in enumerate((2, 0, 1)):
        assert window(expert_state, case.step_options(), number) == window(alone, case.step_options(), number)
        assert not on_slots(offloaded)
        offloaded.set_prefetch_depth(ahead)
    assert_same(outcome(expert_state), outcome(alone))


@pytest.mark.parametrize("fate", [ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE])
def test_experts_with_streamed_blocks_are_swapped_under_any_activation_policy(fate: ActivationPolicy) -> None:
    names = ("high_noise", "low")
    alone, swapped = ([CASE.expert_state(name) for name in names] for _ in range(2))
    turns = ExpertSwap()
    for name, one in zip(names, swapped, strict=True):
        turns.add(
            name,
            PlannedSwappableExpert(
                apply_plan_synchronously(one, a_plan(one.module, WeightPlacement.STREAMED, fate, idle_at_home=True))
            ),
        )
    for number, which in enumerate((0, 1, 0)):
        assert window(swapped[which], CASE.step_options(), number) == window(alone[which], CASE.step_options(), number)
    for one, other in zip(swapped, alone, strict=True):
        assert_same(outcome(one), outcome(other))


def test_slots_are_freed_after_the_computation_has_waited_for_all_copies_into_them() -> None:
    """Otherwise the memory could be reused while a copy for a pass that never comes still writes into it."""
    expert_state, transfer = CASE.expert_state(), RecordingTransfer()
    offloaded = apply_plan(expert_state, a_plan(expert_state.module, WeightPlacement.STREAMED, ahead=2), transfer)
    held_out_losses(expert_state, [batch([0])], CASE.step_options())
    assert set(transfer.begun) - transfer.awaited, "blocks of the next pass are under way"
    offloaded.set_prefetch_depth(1)
    assert set(transfer.begun) == transfer.awaited


def test_host_memory_that_cannot_be_allocated_is_reported_with_a_remedy() -> None:
    with pytest.raises(TrainError, match=r"host memory cannot be allocated .*plan\.activations"):
        HostMemoryPool(CPU).allocate(1 << 60)


def test_unread_counters_do_not_grow() -> None:
    expert_state, transfer = CASE.expert_state(), RecordingTransfer()
    planned = ExpertPlan(a_plan(expert_state.module, stepping=OptimizerPlacement.HOST), PlanAssumptions(), 1)
    manager = OffloadManager([expert_state], {expert_state.expert.name: planned}, transfer, NullSink(), check_every=0)
    window(expert_state, CASE.step_options(), 0)
    manager.after_window(expert_state.expert.name, 3, 1.0)
    assert transfer.taken == 1

"""A run on the software superchip whose link becomes slow: it is noticed, told, answered by another plan; and the bits
of the training are those of a run that was never disturbed.

The computation is real and on the CPU; its time and that of the copies are modelled by the superchip's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from supertuner.config.settings.plan import PlanSettings
from supertuner.core.events import DecisionEvent, Event, NoteEvent, WarningEvent
from supertuner.memory.emulator.clock import EmulatorClock
from supertuner.memory.emulator.configuration import EmulatedMachine, EmulatorParameters
from supertuner.memory.machines import MACHINES
from supertuner.models.blocks import named_blocks
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.plan_step import plan_step
from supertuner.plan.placement.planner import ExpertPlan, RunPlanner
from supertuner.plan.placement.replan import (
    PlanAssumptions,
    PlanObservation,
    PrefetchDistance,
    TransferCounters,
    describe_drift,
)
from supertuner.plan.placement.step_table import BlockCosts, OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from supertuner.train.offload.manager import OffloadManager
from supertuner.train.offload.transfer import CopyPair, TransferEvent
from tests.train.offload.making import CPU, OffloadCase, a_plan, assert_same, outcome, window

FAST = 1e9
CASE = OffloadCase(dropout=0.0)


class ModelledTransfer:
    """A carrier whose copies take the time that the superchip's clock says; `block_s` is that of a block's pass."""

    def __init__(self, block_s: float) -> None:
        self.device, self.counters, self.block_s = CPU, TransferCounters(), block_s
        self.link(FAST)

    def link(self, bytes_s: float) -> None:
        figures = EmulatedMachine("a test", 1 << 40, to_device_bytes_s=bytes_s, to_host_bytes_s=bytes_s)
        before = getattr(self, "clock", None)
        self.clock = EmulatorClock(figures, EmulatorParameters(duplex=True))
        self.clock.advance(0.0 if before is None else before.seconds or 0.0)
        self.bytes_s = bytes_s

    def now(self) -> float:
        return self.clock.seconds or 0.0

    def copy_to_device(self, pairs: Sequence[CopyPair], after: Iterable[TransferEvent] = ()) -> TransferEvent:
        nbytes = _copied(pairs)
        self.counters.fetched_bytes += nbytes
        self.counters.fetch_s += nbytes / self.bytes_s
        return self.clock.transfer(nbytes, 0)

    def copy_to_host(self, pairs: Sequence[CopyPair]) -> TransferEvent:
        nbytes = _copied(pairs)
        self.counters.sent_bytes += nbytes
        self.counters.send_s += nbytes / self.bytes_s
        return self.clock.transfer(0, nbytes)

    def wait_on_device(self, mark: TransferEvent) -> None:
        before = self.now()
        self.clock.wait_until(mark)
        self.counters.waited_s += self.now() - before

    synchronize = wait_on_device

    def take_counters(self) -> TransferCounters:
        taken, self.counters = self.counters, TransferCounters()
        return taken


@torch.no_grad()
def _copied(pairs: Sequence[CopyPair]) -> int:
    for target, source in pairs:
        target.copy_(source)
    return sum(target.nbytes for target, _ in pairs)


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def events_of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class SlowRun:
    """Windows of one expert; the link is slowed from a window on."""

    def __init__(
        self,
        *,
        every: int,
        slow_from: int = 1 << 30,
        slow: float = FAST,
        planned: ExpertPlan | None = None,
        **options: Any,
    ) -> None:
        self.trainee, self.sink, self.carrier = CASE.expert_state(), RecordingSink(), ModelledTransfer(block_s=40e-6)
        self.slow_from, self.slow = slow_from, slow
        if planned is None:
            plan = a_plan(self.trainee.module, WeightPlacement.STREAMED, ActivationPolicy.SEND, ahead=1)
            planned = ExpertPlan(plan, PlanAssumptions(FAST, FAST, waiting_share=0.0), max_ahead=3)
        for block in self.trainee.module.blocks:  # type: ignore[union-attr]
            block.register_forward_pre_hook(lambda *_: self.carrier.clock.advance(self.carrier.block_s))
            block.register_forward_hook(self._backward)
        self.acts = OffloadManager(
            [self.trainee],
            {"model": planned},
            self.carrier,
            self.sink,
            check_every=every,
            min_offload_bytes=1,
            **options,
        )

    def _backward(self, _module: Any, _inputs: Any, made: torch.Tensor) -> None:
        if made.requires_grad:
            made.register_hook(lambda _: self.carrier.clock.advance(2 * self.carrier.block_s))

    def run(self, windows: int) -> list[float]:
        took = []
        for number in range(windows):
            if number == self.slow_from:
                self.carrier.link(self.slow)
            begin = self.carrier.now()
            window(self.trainee, CASE.step_options(), number)
            took.append(self.carrier.now() - begin)
            self.acts.after_window("model", 3, took[-1])
        return took


def a_step_table(names: Sequence[str]) -> StepTable:
    """Blocks that compute for 40 µs and leave 20 KB: a fast link takes that away meanwhile, a slow one does not."""
    blocks = tuple(
        BlockCosts(
            name=name, frozen_bytes=2000, trained_bytes=200, gradient_bytes=200, state_bytes=400, saved_bytes=20_000,
            input_bytes=1000, forward=OperatorWork(matmul_flops=4e7), backward=OperatorWork(matmul_flops=8e7),
            forward_peak_bytes=2000, backward_peak_bytes=2000,
        )
        for name in names
    )  # fmt: skip
    return StepTable(
        "train model", blocks, batch_bytes=500, micro_batches=1, update=OperatorWork(), update_peak_bytes=100
    )


def a_planner(names: Sequence[str]) -> RunPlanner:
    """The planner itself, on a machine of the test's speed, with room for the activations of two blocks."""
    rates = MachineRates(1e12, 1e12, 1e15, 1e15, FAST, FAST, one_pool=False, duplex=True)
    limits, table, machine = MemoryLimits(80_000, 10**9), a_step_table(names), MACHINES["gh200-96"]
    plan = plan_step(table, machine, limits, rates=rates)
    return RunPlanner(machine, limits, rates, PlanSettings(), 3, {"model": table}, {"model": plan})


def test_a_link_slowed_in_the_middle_of_a_run_is_answered_by_another_plan_and_changes_no_bit() -> None:
    undisturbed = CASE.expert_state()
    for number in range(10):
        window(undisturbed, CASE.step_options(), number)
    planning = a_planner(list(named_blocks(undisturbed.module)))
    slow = SlowRun(every=2, slow_from=4, slow=FAST / 50, planned=planning.initial_plan("model"), replan=planning.replan)
    took = slow.run(10)
    (first, second, *later) = slow.sink.events_of(DecisionEvent)
    assert "sent" in first.value and "sent" not in second.value and "recomputed" in second.value
    assert "link" in second.reason and "the plan rests on 1" in second.reason
    assert not later, "what was planned anew is what was seen from then on"
    assert took[5] > 2 * took[3], "the slow link was felt"
    assert took[9] < 1.4 * took[3], "and is no longer"
    assert_same(outcome(slow.trainee), outcome(undisturbed))


def test_a_run_on_which_nothing_changes_keeps_its_plan_and_says_nothing() -> None:
    calm = SlowRun(every=2)
    calm.run(6)
    assert len(calm.sink.events_of(DecisionEvent)) == 1 and not calm.sink.events_of(WarningEvent)


def test_without_another_plan_the_run_goes_on_and_says_so_once() -> None:
    slow = SlowRun(every=2, slow_from=2, slow=FAST / 50, replan=lambda _expert, _basis, _seen: None)
    slow.run(8)
    (told,) = slow.sink.events_of(WarningEvent)
    assert "stays" in told.message and "link" in told.message


def test_a_refusal_has_the_plan_made_anew_after_the_window() -> None:
    run = SlowRun(every=1000)
    asked: list[PlanObservation] = []

    def replan(_expert: str, _basis: PlanAssumptions, seen: PlanObservation) -> ExpertPlan:
        asked.append(seen)
        return ExpertPlan(a_plan(run.trainee.module, stepping=OptimizerPlacement.HOST), PlanAssumptions(), 1)

    run.acts._replan = replan
    run.run(1)
    run.acts.note_refusal("host memory is at its floor")
    run.run(1)
    assert len(asked) == 1 and "host memory is at its floor" in run.sink.events_of(DecisionEvent)[-1].reason
    run.run(1)
    assert len(asked) == 1


def test_a_stage_change_has_the_plan_made_anew_from_the_first_whole_window_once() -> None:
    run = SlowRun(every=1000)
    plan: MemoryPlan = run.acts.offloaded_experts["model"].plan
    asked: list[PlanObservation] = []

    def replan(_expert: str, _basis: PlanAssumptions, seen: PlanObservation) -> ExpertPlan:
        asked.append(seen)
        return ExpertPlan(plan, PlanAssumptions(seen.to_device_bytes_s, seen.to_host_bytes_s), 3)

    run.acts._replan = replan
    for _ in range(2):
        run.run(1)
        assert len(asked) <= 1
        run.acts.after_window("another", 3, 1.0)
        run.run(1)
        assert len(asked) <= 1, "copies of the change are no part of a window"
        run.run(1)
        assert len(asked) == 1
    assert [one for one in run.sink.events_of(NoteEvent) if "training came to model" in one.message]


def test_blocks_are_fetched_further_ahead_while_that_shortens_the_waits() -> None:
    """A link that is just fast enough on the whole, and blocks of which every other is large: one ahead is too late."""
    run = SlowRun(every=1)
    run.acts._monitors["model"].basis = PlanAssumptions()
    run.carrier.link(FAST / 1.8)
    run.run(6)
    told = run.sink.events_of(DecisionEvent)[1:]
    assert told and told[0].what == "plan.model.ahead" and told[0].value == 2
    assert "waits" in told[0].reason
    assert run.acts.offloaded_experts["model"].ring.prefetch_depth == run.acts._monitors["model"].distance.ahead


def an_observation(waited: float = 0.0, seconds: float = 10.0, **counters: Any) -> PlanObservation:
    return PlanObservation(4, 8, seconds, TransferCounters(waited_s=waited, **counters))


def test_distance_grows_with_waits_and_goes_back_where_more_does_not_help() -> None:
    near = PrefetchDistance(1, max_ahead=3)
    further, why = near.adjusted(an_observation(waited=1.0))
    assert further.ahead == 2 and why is not None and "10.0%" in why
    helped, _ = further.adjusted(an_observation(waited=0.5))
    assert helped.ahead == 3
    back, why = helped.adjusted(an_observation(waited=0.5))
    assert back.ahead == 2 and why is not None and "did not help" in why
    assert back.adjusted(an_observation(waited=0.5))[0].ahead == 2, "it is not tried again"
    assert near.adjusted(an_observation())[1] is None


@pytest.mark.parametrize(
    ("basis", "observed", "word"),
    [
        (PlanAssumptions(to_device_bytes_s=100.0), an_observation(fetched_bytes=880, fetch_s=10.0), "link to the GPU"),
        (PlanAssumptions(to_device_bytes_s=100.0), an_observation(fetched_bytes=920, fetch_s=10.0), None),
        (PlanAssumptions(to_host_bytes_s=100.0), an_observation(sent_bytes=1200, send_s=10.0), "link to the host"),
        (PlanAssumptions(to_device_bytes_s=100.0), an_observation(), None),
        (PlanAssumptions(waiting_share=0.05), an_observation(waited=2.0), "waits for copies 20%"),
        (PlanAssumptions(waiting_share=0.05), an_observation(waited=1.4), None),
        (PlanAssumptions(sample_s=1.0), an_observation(seconds=10.0), "a sample takes"),
        (PlanAssumptions(sample_s=1.2), an_observation(seconds=10.0), None),
        (PlanAssumptions(), an_observation(waited=9.0, fetched_bytes=1, fetch_s=9.0), None),
    ],
)
def test_drift_beyond_a_tenth_is_told_with_its_figures(
    basis: PlanAssumptions, observed: PlanObservation, word: str | None
) -> None:
    found = describe_drift(basis, observed)
    assert (found is None) == (word is None) and (word is None or word in (found or "")), found


def test_a_plan_that_comes_out_the_same_is_not_put_on_again() -> None:
    run = SlowRun(every=1, slow_from=1, slow=FAST / 4)
    plan: MemoryPlan = run.acts.offloaded_experts["model"].plan
    run.acts._replan = lambda _expert, _basis, now: ExpertPlan(plan, PlanAssumptions(now.to_device_bytes_s, None), 1)
    before = run.acts.offloaded_experts["model"]
    run.run(3)
    assert run.acts.offloaded_experts["model"] is before
    assert [event for event in run.sink.events_of(NoteEvent) if "the same" in event.message]

"""A run on the emulated superchip whose link becomes slow: the run notices, reports it and re-plans, and training
computes the same bits as an undisturbed run.

The computation is real and runs on the CPU; its time and that of the copies are modelled by the emulator's clock.
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
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.replan import (
    PlanAssumptions,
    PlanObservation,
    PrefetchDistance,
    TransferCounters,
    describe_drift,
)
from supertuner.plan.placement.run_plans import ExpertPlan, RunPlanner
from supertuner.plan.placement.step_table import BlockCosts, OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits
from supertuner.train.offload.manager import OffloadManager
from supertuner.train.offload.transfer import CopyPair, TransferEvent
from tests.train.offload.making import CPU, OffloadCase, a_plan, assert_same, outcome, window

FAST = 1e9
CASE = OffloadCase(dropout=0.0)


class ModelledTransfer:
    """A transfer whose copies take modelled time on the emulator's clock. `block_s`: time of a block's forward pass."""

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
    """Windows of one expert; from window `slow_from` on, the link has bandwidth `slow`."""

    def __init__(
        self,
        *,
        every: int,
        slow_from: int = 1 << 30,
        slow: float = FAST,
        planned: ExpertPlan | None = None,
        **options: Any,
    ) -> None:
        self.expert_state, self.sink, self.transfer = (
            CASE.expert_state(),
            RecordingSink(),
            ModelledTransfer(block_s=40e-6),
        )
        self.slow_from, self.slow = slow_from, slow
        if planned is None:
            plan = a_plan(self.expert_state.module, WeightPlacement.STREAMED, ActivationPolicy.SEND, ahead=1)
            planned = ExpertPlan(plan, PlanAssumptions(FAST, FAST, waiting_share=0.0), max_ahead=3)
        for block in self.expert_state.module.blocks:  # type: ignore[union-attr]
            block.register_forward_pre_hook(lambda *_: self.transfer.clock.advance(self.transfer.block_s))
            block.register_forward_hook(self._backward)
        self.manager = OffloadManager(
            [self.expert_state],
            {"model": planned},
            self.transfer,
            self.sink,
            check_every=every,
            min_offload_bytes=1,
            **options,
        )

    def _backward(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.transfer.clock.advance(2 * self.transfer.block_s))

    def run(self, windows: int) -> list[float]:
        took = []
        for number in range(windows):
            if number == self.slow_from:
                self.transfer.link(self.slow)
            begin = self.transfer.now()
            window(self.expert_state, CASE.step_options(), number)
            took.append(self.transfer.now() - begin)
            self.manager.after_window("model", 3, took[-1])
        return took


def a_step_table(names: Sequence[str]) -> StepTable:
    """Blocks that compute for 40 µs and save 20 KB: a fast link sends that in the meantime, a slow one does not."""
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
    """The real planner, on a machine with the rates of this test and memory for the activations of two blocks."""
    rates = MachineRates(1e12, 1e12, 1e15, 1e15, FAST, FAST, one_pool=False, duplex=True)
    limits, table, machine = MemoryLimits(80_000, 10**9), a_step_table(names), MACHINES["gh200-96"]
    plan = make_plan(table, machine, limits, rates=rates)
    return RunPlanner(machine, limits, rates, PlanSettings(), 3, {"model": table}, {"model": plan})


def test_a_slow_link_leads_to_another_plan_and_training_computes_the_same_bits() -> None:
    undisturbed = CASE.expert_state()
    for number in range(10):
        window(undisturbed, CASE.step_options(), number)
    planner = a_planner(list(named_blocks(undisturbed.module)))
    slow = SlowRun(every=2, slow_from=4, slow=FAST / 50, planned=planner.initial_plan("model"), replan=planner.replan)
    took = slow.run(10)
    (first, second, *later) = slow.sink.events_of(DecisionEvent)
    assert "sent" in first.value and "sent" not in second.value and "recomputed" in second.value
    assert "link" in second.reason and "the plan assumes 1" in second.reason
    assert not later, "the new plan's assumptions hold from then on"
    assert took[5] > 2 * took[3], "the slow link delays windows"
    assert took[9] < 1.4 * took[3], "the new plan avoids the link"
    assert_same(outcome(slow.expert_state), outcome(undisturbed))


def test_an_undisturbed_run_keeps_its_plan_and_reports_nothing() -> None:
    calm = SlowRun(every=2)
    calm.run(6)
    assert len(calm.sink.events_of(DecisionEvent)) == 1 and not calm.sink.events_of(WarningEvent)


def test_if_no_other_plan_fits_the_run_continues_and_warns_once() -> None:
    slow = SlowRun(every=2, slow_from=2, slow=FAST / 50, replan=lambda _expert, _assumptions, _observation: None)
    slow.run(8)
    (warning,) = slow.sink.events_of(WarningEvent)
    assert "link" in warning.message


def test_a_refusal_leads_to_a_new_plan_after_the_window() -> None:
    run = SlowRun(every=1000)
    observations: list[PlanObservation] = []

    def replan(_expert: str, _assumptions: PlanAssumptions, seen: PlanObservation) -> ExpertPlan:
        observations.append(seen)
        return ExpertPlan(a_plan(run.expert_state.module, stepping=OptimizerPlacement.HOST), PlanAssumptions(), 1)

    run.manager._replan = replan
    run.run(1)
    run.manager.note_refusal("host memory is at its floor")
    run.run(1)
    assert len(observations) == 1 and "host memory is at its floor" in run.sink.events_of(DecisionEvent)[-1].reason
    run.run(1)
    assert len(observations) == 1


def test_an_expert_switch_leads_to_one_new_plan_after_the_first_whole_window() -> None:
    run = SlowRun(every=1000)
    plan: MemoryPlan = run.manager.offloaded_experts["model"].plan
    observations: list[PlanObservation] = []

    def replan(_expert: str, _assumptions: PlanAssumptions, seen: PlanObservation) -> ExpertPlan:
        observations.append(seen)
        return ExpertPlan(plan, PlanAssumptions(seen.to_device_bytes_s, seen.to_host_bytes_s), 3)

    run.manager._replan = replan
    for _ in range(2):
        run.run(1)
        assert len(observations) <= 1
        run.manager.after_window("another", 3, 1.0)
        run.run(1)
        assert len(observations) <= 1, "copies of the switch are not part of a window"
        run.run(1)
        assert len(observations) == 1
    assert [one for one in run.sink.events_of(NoteEvent) if "training switched to model" in one.message]


def test_the_prefetch_distance_grows_while_that_shortens_the_waits() -> None:
    """The link is just fast enough on average, and every other block is large: one block ahead is too late."""
    run = SlowRun(every=1)
    run.manager._monitors["model"].basis = PlanAssumptions()
    run.transfer.link(FAST / 1.8)
    run.run(6)
    decisions = run.sink.events_of(DecisionEvent)[1:]
    assert decisions and decisions[0].what == "plan.model.ahead" and decisions[0].value == 2
    assert "waits" in decisions[0].reason
    assert run.manager.offloaded_experts["model"].ring.prefetch_depth == run.manager._monitors["model"].distance.ahead


def an_observation(waited: float = 0.0, seconds: float = 10.0, **counters: Any) -> PlanObservation:
    return PlanObservation(4, 8, seconds, TransferCounters(waited_s=waited, **counters))


def test_a_larger_distance_that_does_not_help_is_taken_back() -> None:
    near = PrefetchDistance(1, max_ahead=3)
    further, why = near.adjusted(an_observation(waited=1.0))
    assert further.ahead == 2 and why is not None and "10.0%" in why
    helped, _ = further.adjusted(an_observation(waited=0.5))
    assert helped.ahead == 3
    back, why = helped.adjusted(an_observation(waited=0.5))
    assert back.ahead == 2 and why is not None and "did not help" in why
    assert back.adjusted(an_observation(waited=0.5))[0].ahead == 2, "the larger distance is not tried again"
    assert near.adjusted(an_observation())[1] is None


@pytest.mark.parametrize(
    ("assumptions", "observed", "words"),
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
def test_a_drift_of_more_than_ten_percent_is_described_with_its_figures(
    assumptions: PlanAssumptions, observed: PlanObservation, words: str | None
) -> None:
    drift = describe_drift(assumptions, observed)
    assert (drift is None) == (words is None) and (words is None or words in (drift or "")), drift


def test_a_new_plan_that_is_equal_is_not_applied_again() -> None:
    run = SlowRun(every=1, slow_from=1, slow=FAST / 4)
    plan: MemoryPlan = run.manager.offloaded_experts["model"].plan
    run.manager._replan = lambda _expert, _assumptions, now: ExpertPlan(
        plan, PlanAssumptions(now.to_device_bytes_s, None), 1
    )
    before = run.manager.offloaded_experts["model"]
    run.run(3)
    assert run.manager.offloaded_experts["model"] is before
    assert [event for event in run.sink.events_of(NoteEvent) if "the same" in event.message]

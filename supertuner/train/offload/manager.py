"""The plans of a run at work: each expert under its own, looked at between windows, and made anew where they no longer
hold. Every decision is told with its reason; none of them changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from supertuner.core.events import DecisionEvent, NoteEvent, Sink, WarningEvent
from supertuner.core.types import bytes_text
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.planner import ExpertPlan
from supertuner.plan.placement.replan import (
    PlanAssumptions,
    PlanObservation,
    PrefetchDistance,
    TransferCounters,
    describe_drift,
)
from supertuner.step.window import ExpertState
from supertuner.train.offload.apply import MIN_OFFLOAD_BYTES, OffloadedExpert, apply_plan
from supertuner.train.offload.swappable_expert import ExpertSwap, SwappableExpert
from supertuner.train.offload.host_buffers import HostBuffers
from supertuner.step.parameter_state import HOST
from supertuner.train.offload.transfer import DeviceTransfer

ReplanFunction = Callable[[str, PlanAssumptions, PlanObservation], ExpertPlan | None]
"""(expert, what its plan rests on, what was seen) → a plan from that; None: none can be made here."""


@dataclass(slots=True)
class _PlanMonitor:
    """One expert since it was last looked at."""

    basis: PlanAssumptions
    distance: PrefetchDistance
    check_every: int
    """Windows until it is looked at: more of them each time that planning anew changed nothing."""
    windows: int = 0
    samples: int = 0
    seconds: float = 0.0
    counters: TransferCounters = field(default_factory=TransferCounters)
    just_entered: bool = False
    """Whether training has just come to it from another expert: its first whole window is looked at."""
    replanned_on_entry: bool = False
    """Whether its plan was made anew when training came to it; from then on it is compared like any other."""

    def take_observation(self) -> PlanObservation:
        observed = PlanObservation(self.windows, self.samples, self.seconds, self.counters)
        self.windows, self.samples, self.seconds, self.counters = 0, 0, 0.0, TransferCounters()
        return observed


class OffloadManager:
    """All experts of a run that are under a plan."""

    def __init__(
        self,
        expert_states: Sequence[ExpertState],
        planned: Mapping[str, ExpertPlan],
        transfer: DeviceTransfer,
        sink: Sink,
        *,
        check_every: int = 0,
        replan: ReplanFunction | None = None,
        min_offload_bytes: int = MIN_OFFLOAD_BYTES,
    ) -> None:
        """Every so many windows of an expert its plan is looked at; 0: never."""
        self._transfer, self._sink, self._check_every, self._replan = transfer, sink, check_every, replan
        self._min_offload_bytes = min_offload_bytes
        self._expert_states = {expert_plan.expert.name: expert_plan for expert_plan in expert_states}
        self.offloaded_experts: dict[str, OffloadedExpert] = {}
        self._monitors: dict[str, _PlanMonitor] = {}
        self.expert_swap = ExpertSwap()
        self._last_expert: str | None = None
        self._refusal: str | None = None
        self._swaps_experts = len(planned) > 1 and all(one.plan.idle_at_home for one in planned.values())
        for name, one in planned.items():
            self._apply_plan(name, one)

    def after_window(self, expert: str, samples: int, seconds: float) -> None:
        """A window of an expert took so long. Between two windows: nothing computes."""
        monitor = self._monitors.get(expert)
        changed = self._last_expert is not None and self._last_expert != expert
        self._last_expert = expert
        if monitor is None or not self._check_every:
            self._transfer.take_counters()  # they would pile up
            return
        if changed:  # copies of the change are no part of a window
            self._transfer.take_counters()
            monitor.just_entered = True
            return
        monitor.windows, monitor.samples, monitor.seconds = (
            monitor.windows + 1, monitor.samples + samples, monitor.seconds + seconds
        )  # fmt: skip
        _add_counters(monitor.counters, self._transfer.take_counters())
        if monitor.windows >= monitor.check_every or monitor.just_entered or self._refusal is not None:
            self._review_plan(expert, monitor)

    def optimizer_state_device(self, expert: str) -> torch.device | None:
        """Where what an optimizer remembers is read to; None: beside its weights."""
        offloaded = self.offloaded_experts.get(expert)
        return None if offloaded is None or offloaded.plan.stepping is OptimizerPlacement.GPU else HOST

    def note_refusal(self, reason: str) -> None:
        """Something that a plan counted on was refused: it is looked at after this window."""
        self._refusal = reason

    def _review_plan(self, expert: str, monitor: _PlanMonitor) -> None:
        observed, refusal = monitor.take_observation(), self._refusal
        first_entry, self._refusal, monitor.just_entered = (
            monitor.just_entered and not monitor.replanned_on_entry,
            None,
            False,
        )
        monitor.replanned_on_entry |= first_entry
        old = self.offloaded_experts[expert].plan
        may_drift = self._replan is not None and not old.keeps_all_on_gpu  # where all stays, no plan is faster
        reason = refusal or (describe_drift(monitor.basis, observed) if may_drift else None)
        if reason is None and first_entry and may_drift:
            reason = f"training came to {expert}"
        monitor.basis = monitor.basis.with_sample_time(observed)
        if reason is None:
            self._adjust_prefetch(expert, monitor, observed)
            return
        planned = None if self._replan is None else self._replan(expert, monitor.basis, observed)
        if planned is None:
            self._sink.emit(WarningEvent(f"plan.{expert}", f"{reason}; no other plan can be made here, so it stays"))
            monitor.basis = PlanAssumptions(
                observed.to_device_bytes_s, observed.to_host_bytes_s, observed.waiting_share, None, observed.sample_s
            )
        elif _is_same_plan(planned.plan, old):
            self._sink.emit(NoteEvent(f"plan.{expert}", f"{reason}; made anew, it comes out the same"))
            self._monitors[expert] = _PlanMonitor(
                planned.assumptions,
                monitor.distance,
                2 * monitor.check_every,
                replanned_on_entry=monitor.replanned_on_entry,
            )
        else:
            self._replace_plan(expert, planned, reason)

    def _adjust_prefetch(self, expert: str, monitor: _PlanMonitor, observed: PlanObservation) -> None:
        monitor.distance, reason = monitor.distance.adjusted(observed)
        if reason is not None:
            monitor.basis = replace(monitor.basis, sample_s=None)  # another time is expected now
            self.offloaded_experts[expert].set_prefetch_depth(monitor.distance.ahead)
            self._sink.emit(DecisionEvent(f"plan.{expert}.ahead", monitor.distance.ahead, reason))

    def _replace_plan(self, expert: str, planned: ExpertPlan, reason: str) -> None:
        self.expert_swap.remove(expert)
        self.offloaded_experts[expert].detach()
        replanned_on_entry = self._monitors[expert].replanned_on_entry
        self._apply_plan(expert, planned, reason, self.offloaded_experts[expert].host_buffers)
        self._monitors[expert].replanned_on_entry = replanned_on_entry

    def _apply_plan(
        self, expert: str, planned: ExpertPlan, reason: str | None = None, host_buffers: HostBuffers | None = None
    ) -> None:
        plan, is_swapped = planned.plan, self._swaps_experts and planned.plan.idle_at_home
        offloaded = apply_plan(
            self._expert_states[expert],
            plan,
            self._transfer,
            on_device=not is_swapped,
            host_buffers=host_buffers,
            min_offload_bytes=self._min_offload_bytes,
        )
        self.offloaded_experts[expert] = offloaded
        if is_swapped:
            self.expert_swap.add(expert, SwappableExpert(offloaded))
        max_depth = (
            min(planned.max_ahead, len(plan.blocks))
            if offloaded.ring.streamed or offloaded.offloads_activations
            else plan.ahead
        )
        self._monitors[expert] = _PlanMonitor(
            planned.assumptions, PrefetchDistance(plan.ahead, max_depth), self._check_every
        )
        reasons = "; ".join((*([reason] if reason else []), *plan.reasons)) or "planned"
        self._sink.emit(DecisionEvent(f"plan.{expert}", plan_summary(plan), reasons))
        for line in offloaded.unfollowed:
            self._sink.emit(NoteEvent(f"plan.{expert}", f"not followed: {line}"))
        if offloaded.ring.streamed:
            slots, host = bytes_text(offloaded.ring.nbytes), bytes_text(offloaded.host_buffers.memory.nbytes)
            self._sink.emit(NoteEvent(f"plan.{expert}", f"{slots} of slots on the device, {host} of host memory"))


def plan_summary(plan: MemoryPlan) -> str:
    """A plan in one line."""
    if plan.keeps_all_on_gpu:
        return "everything stays on the device"
    parts = []
    streamed = sum(block.weights is WeightPlacement.STREAMED for block in plan.blocks)
    if streamed:
        parts.append(f"weights of {streamed} blocks streamed, {plan.ahead} ahead")
    for policy, word in ((ActivationPolicy.SEND, "sent"), (ActivationPolicy.RECOMPUTE, "recomputed")):
        count = sum(block.activations is policy for block in plan.blocks)
        if count:
            parts.append(f"activations of {count} blocks {word}")
    parts.append(f"optimizer: {plan.stepping}")
    if plan.idle_at_home:
        parts.append("idle experts in host memory")
    return "; ".join(parts)


def _is_same_plan(one: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether two plans do the same."""
    rows = [[(block.name, block.weights, block.activations) for block in plan.blocks] for plan in (one, other)]
    return rows[0] == rows[1] and replace(one, blocks=(), modelled=None, reasons=(), machine="") == replace(
        other, blocks=(), modelled=None, reasons=(), machine=""
    )


def _add_counters(total: TransferCounters, more: TransferCounters) -> None:
    for name in TransferCounters.__slots__:
        setattr(total, name, getattr(total, name) + getattr(more, name))

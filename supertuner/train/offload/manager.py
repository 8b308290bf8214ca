"""Applies the offload plans of a run's experts, checks them between windows, and replaces plans that no longer hold.

Every decision is reported with its reason; none of them changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import DecisionEvent, NoteEvent, Sink, WarningEvent
from supertuner.core.types import bytes_text
from supertuner.models import loading
from supertuner.models.blocks import named_blocks
from supertuner.models.spec import Expert, ModelDescription
from supertuner.plan.placement import replan as replanning
from supertuner.plan.placement.memory_needs import MIN_OFFLOAD_BYTES
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.run_plans import (
    ExpertPlan,
    RunPlanner,
    loads_to_host,
    plan_settings_on_machine,
    plan_without_forecast,
)
from supertuner.step.expert_swap import ExpertSwap
from supertuner.step.parameter_state import HOST
from supertuner.step.train_step import ExpertState
from supertuner.train.offload.apply import OffloadedExpert, apply_plan
from supertuner.train.offload.swappable_expert import PlannedSwappableExpert
from supertuner.train.offload.tensor_host_buffers import HostBuffers
from supertuner.train.offload.transfer import DeviceTransfer


def plan_experts(
    config: RunConfig,
    model: ModelDescription,
    experts: Sequence[Expert],
    planner: RunPlanner | None,
    sink: Sink,
    *,
    one_pool: bool = False,
) -> dict[str, ExpertPlan]:
    """Expert → its plan, with the settings of `plan` applied. Experts without a plan are absent."""
    planned_by_expert, recompute = {}, config.train.gradient_checkpointing
    settings, messages = plan_settings_on_machine(config.plan, one_pool)
    for message in messages:
        sink.emit(WarningEvent("plan", message))
    for expert in experts:
        blocks = list(named_blocks(loading.build_meta_module(model, expert.component)))
        planned = None if planner is None else planner.initial_plan(expert.name)
        if planned is None:
            planned = plan_without_forecast(settings, blocks, phase=f"train {expert.name}", recompute=recompute)
        if planned is not None:
            planned_by_expert[expert.name] = planned
    return planned_by_expert


def loading_device(config: RunConfig, planned: ExpertPlan | None, device: torch.device) -> torch.device:
    """The device that an expert is loaded to."""
    return HOST if planned is not None and loads_to_host(config, planned.plan) else device


ReplanFunction = Callable[[str, replanning.PlanAssumptions, replanning.PlanObservation], ExpertPlan | None]
"""(expert, assumptions of its plan, observations) → a new plan; None: no other plan can be made."""


def _nothing_observed() -> replanning.PlanObservation:
    return replanning.PlanObservation(0, 0, 0.0, replanning.TransferCounters())


@dataclass(slots=True)
class _PlanMonitor:
    """What was observed of one expert since its plan was last checked."""

    basis: replanning.PlanAssumptions
    distance: replanning.PrefetchDistance
    check_every: int
    """Windows until the next check; doubled each time that re-planning gave the same plan."""
    observed: replanning.PlanObservation = field(default_factory=_nothing_observed)
    just_entered: bool = False
    """Whether training has just switched to this expert: its first complete window is checked."""
    replanned_on_entry: bool = False
    """Whether it was re-planned at the first switch to it; later checks only compare."""


class OffloadManager:
    """The experts of a run that have a plan."""

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
        """`check_every`: number of an expert's windows between two checks of its plan; 0: never."""
        self._transfer, self._sink, self._check_every, self._replan = transfer, sink, check_every, replan
        self._min_offload_bytes = min_offload_bytes
        self._expert_states = {expert_state.expert.name: expert_state for expert_state in expert_states}
        self.offloaded_experts: dict[str, OffloadedExpert] = {}
        self._monitors: dict[str, _PlanMonitor] = {}
        self.expert_swap = ExpertSwap()
        self._last_expert: str | None = None
        self._refusal: str | None = None
        self._swaps_experts = len(planned) > 1 and all(one.plan.idle_at_home for one in planned.values())
        for name, expert_plan in planned.items():
            self._apply_plan(name, expert_plan)

    def after_window(self, expert: str, samples: int, seconds: float) -> None:
        """Record a window of an expert, and check its plan if that is due. Call it between two windows."""
        monitor = self._monitors.get(expert)
        changed = self._last_expert is not None and self._last_expert != expert
        self._last_expert = expert
        if monitor is None or not self._check_every:
            self._transfer.take_counters()  # or they would grow without bound
            return
        if changed:  # this window includes the copies of the expert swap
            self._transfer.take_counters()
            monitor.just_entered = True
            return
        monitor.observed = _add_window(monitor.observed, samples, seconds, self._transfer.take_counters())
        if monitor.observed.windows >= monitor.check_every or monitor.just_entered or self._refusal is not None:
            self._review_plan(expert, monitor)

    def optimizer_state_device(self, expert: str) -> torch.device | None:
        """The device for a restored optimizer state; None: that of its weights."""
        offloaded = self.offloaded_experts.get(expert)
        return None if offloaded is None or offloaded.plan.stepping is OptimizerPlacement.GPU else HOST

    def note_refusal(self, reason: str) -> None:
        """Memory that a plan relies on was refused: check the plan after this window."""
        self._refusal = reason

    def _review_plan(self, expert: str, monitor: _PlanMonitor) -> None:
        """Compare the plan with what was observed: keep it, adjust its prefetch distance, or replace it."""
        observed, refusal = monitor.observed, self._refusal
        first_entry = monitor.just_entered and not monitor.replanned_on_entry
        monitor.observed, self._refusal, monitor.just_entered = _nothing_observed(), None, False
        monitor.replanned_on_entry |= first_entry
        old = self.offloaded_experts[expert].plan
        may_drift = self._replan is not None and not old.keeps_all_on_gpu  # no plan is faster than one without copies
        reason = refusal or (replanning.describe_drift(monitor.basis, observed) if may_drift else None)
        if reason is None and first_entry and may_drift:
            reason = f"training switched to {expert}"
        monitor.basis = monitor.basis.with_sample_time(observed)
        if reason is None:
            self._adjust_prefetch(expert, monitor, observed)
            return
        planned = None if self._replan is None else self._replan(expert, monitor.basis, observed)
        if planned is None:
            text = f"{reason}; no other plan can be made here, so this one stays"
            self._sink.emit(WarningEvent(f"plan.{expert}", text))
            monitor.basis = replanning.PlanAssumptions(
                observed.to_device_bytes_s, observed.to_host_bytes_s, observed.waiting_share, None, observed.sample_s
            )
        elif _is_same_plan(planned.plan, old):
            self._sink.emit(NoteEvent(f"plan.{expert}", f"{reason}; re-planning gives the same plan"))
            monitor.basis, monitor.check_every = planned.assumptions, 2 * monitor.check_every
        else:
            self._replace_plan(expert, planned, reason)

    def _adjust_prefetch(self, expert: str, monitor: _PlanMonitor, observed: replanning.PlanObservation) -> None:
        monitor.distance, reason = monitor.distance.adjusted(observed)
        if reason is not None:
            monitor.basis = replace(monitor.basis, sample_s=None)  # the old time per sample no longer applies
            self.offloaded_experts[expert].set_prefetch_depth(monitor.distance.ahead)
            self._sink.emit(DecisionEvent(f"plan.{expert}.ahead", monitor.distance.ahead, reason))

    def _replace_plan(self, expert: str, planned: ExpertPlan, reason: str) -> None:
        self.expert_swap.remove(expert)
        self.offloaded_experts[expert].detach()
        replanned_on_entry = self._monitors[expert].replanned_on_entry
        self._apply_plan(expert, planned, reason, self.offloaded_experts[expert].host_buffers)
        self._monitors[expert].replanned_on_entry = replanned_on_entry

    def _apply_plan(
        self, expert: str, planned: ExpertPlan, reason: str | None = None, buffers: HostBuffers | None = None
    ) -> None:
        plan, is_swapped = planned.plan, self._swaps_experts and planned.plan.idle_at_home
        state, min_bytes = self._expert_states[expert], self._min_offload_bytes
        offloaded = self.offloaded_experts[expert] = apply_plan(
            state, plan, self._transfer, on_device=not is_swapped, host_buffers=buffers, min_offload_bytes=min_bytes
        )
        if is_swapped:
            self.expert_swap.add(expert, PlannedSwappableExpert(offloaded))
        sends = any(row.activations is ActivationPolicy.SEND for row in plan.blocks)
        max_ahead = min(planned.max_ahead, len(plan.blocks)) if offloaded.ring.streamed or sends else plan.ahead
        distance = replanning.PrefetchDistance(plan.ahead, max_ahead)
        self._monitors[expert] = _PlanMonitor(planned.assumptions, distance, self._check_every)
        reasons = "; ".join((*([reason] if reason else []), *plan.reasons)) or "planned"
        self._sink.emit(DecisionEvent(f"plan.{expert}", plan_summary(plan), reasons))
        for line in offloaded.unfollowed:
            self._sink.emit(NoteEvent(f"plan.{expert}", f"not followed: {line}"))
        if offloaded.ring.streamed:
            slots, host = bytes_text(offloaded.ring.nbytes), bytes_text(offloaded.host_buffers.memory.nbytes)
            self._sink.emit(NoteEvent(f"plan.{expert}", f"{slots} of slots on the device, {host} of host memory"))


def plan_summary(plan: MemoryPlan) -> str:
    """A plan in one line, for reports."""
    if plan.keeps_all_on_gpu:
        return "everything stays on the device"
    parts = []
    if streamed := sum(block.weights is WeightPlacement.STREAMED for block in plan.blocks):
        parts.append(f"weights of {streamed} blocks streamed, {plan.ahead} ahead")
    for policy, word in ((ActivationPolicy.SEND, "sent"), (ActivationPolicy.RECOMPUTE, "recomputed")):
        if count := sum(block.activations is policy for block in plan.blocks):
            parts.append(f"activations of {count} blocks {word}")
    parts.append(f"optimizer: {plan.stepping}")
    if plan.idle_at_home:
        parts.append("idle experts in host memory")
    return "; ".join(parts)


def _is_same_plan(one: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether two plans place everything equally; reasons and modelled times may differ."""
    rows = [[(block.name, block.weights, block.activations) for block in plan.blocks] for plan in (one, other)]
    rests = [replace(plan, blocks=(), modelled=None, reasons=(), machine="") for plan in (one, other)]
    return rows[0] == rows[1] and rests[0] == rests[1]


def _add_window(
    total: replanning.PlanObservation, samples: int, seconds: float, counters: replanning.TransferCounters
) -> replanning.PlanObservation:
    names = replanning.TransferCounters.__slots__
    sums = {name: getattr(total.counters, name) + getattr(counters, name) for name in names}
    counters = replanning.TransferCounters(**sums)
    return replanning.PlanObservation(total.windows + 1, total.samples + samples, total.seconds + seconds, counters)

"""From a step table, a machine and its limits to a plan: placement of weights, activations and optimizer, with reasons.

Pure and deterministic. That the plan fits follows from arithmetic that does not depend on timing (`memory_needs.py`),
and from a model of what the caching allocator reserves for it, if the caller has one (`ReservedBytesModel`).
Its time is modelled by the simulation that all placements are compared with (`simulate.py`, called through
`fast_simulate.py`), and reported with a lower bound that no plan can undercut (`roofline.py`): the ratio shows how much
a better plan could gain at most.
"""

from __future__ import annotations

import math
from dataclasses import replace

from supertuner.core.types import bytes_text
from supertuner.memory.machines import MachineSpec
from supertuner.plan.placement.choice import PlacementChoice, TimedStep, recompute_where_possible
from supertuner.plan.placement.fast_simulate import ChoiceEvaluation, evaluate_choice
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.plan import (
    BlockPlan,
    MemoryPlan,
    OptimizerPlacement,
    PlanEstimate,
    ReservedBytesModel,
    WeightPlacement,
)
from supertuner.plan.placement.reasons import block_reason, plan_reasons
from supertuner.plan.placement.roofline import StepTimeBound, step_time_bound
from supertuner.plan.placement.search import search_placement
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

ASSUMED_FLOPS, ASSUMED_BYTES_S = 1e14, 1e12
"""Rates for a machine whose rates are unknown: a plan can still be made, but its time is not reported."""


RESERVED_MARGIN = 0.01
"""Share of the reserved bytes that is left free: on the phantom, the model was up to 0.8 % below torch's allocator."""
MAX_SEARCHES = 6
"""Searches with ever smaller limits, until what is reserved fits. Two are usual."""
MAX_SEARCH_SHARE = 0.995
"""Each search may use at most this share of the memory of the one before."""
RELEASES_REASON = "it fits only because the allocator releases cached memory when the GPU is full: each time is a stall"


def make_plan(
    table: StepTable,
    machine: MachineSpec,
    limits: MemoryLimits | None = None,
    *,
    rates: MachineRates | None = None,
    reserved_bytes: ReservedBytesModel | None = None,
) -> MemoryPlan:
    """The plan of one step; `fits` is False if none fits. `rates`: observed ones, instead of the machine's figures.

    With `reserved_bytes`, what the allocator reserves fits into the limits. The search counts live bytes; if more than
    the limit is reserved for its result, it is repeated with that much less memory. If no placement is left, the last
    one is accepted if it fits with the cached memory released.
    """
    limits = limits or MemoryLimits.from_machine(machine)
    filled_rates, missing = _fill_unknown_rates(rates or MachineRates.from_machine(machine))
    step = TimedStep.from_table(table, filled_rates)
    bound = step_time_bound(table, filled_rates, limits)
    searched, plan = limits, None
    for _ in range(MAX_SEARCHES):
        target_s = bound.seconds if searched is limits else step_time_bound(table, filled_rates, searched).seconds
        evaluation = search_placement(step, searched, target_s)
        if evaluation is None:
            break
        plan = _build_plan(step, machine, evaluation, None if missing else bound)
        reserved = None if reserved_bytes is None else reserved_bytes(plan, None)
        plan = _explain_plan(plan, plan_reasons(step, evaluation, bound, limits, missing, reserved), reserved)
        if reserved is None or reserved * (1 + RESERVED_MARGIN) <= limits.gpu_bytes:
            return plan
        gap = int(reserved * (1 + RESERVED_MARGIN)) - evaluation.needs.gpu_bytes
        smaller_bytes = min(limits.gpu_bytes - gap, int(searched.gpu_bytes * MAX_SEARCH_SHARE))
        searched = replace(searched, gpu_bytes=max(0, smaller_bytes))
    if plan is not None and reserved_bytes is not None:
        reserved = reserved_bytes(plan, limits.gpu_bytes)
        if reserved is not None:
            return _explain_plan(plan, (*plan.reasons, RELEASES_REASON), reserved)
    return _build_infeasible_plan(step, machine, limits, bound, reserved_bytes)


def evaluate_plan(table: StepTable, plan: MemoryPlan, limits: MemoryLimits, rates: MachineRates) -> ChoiceEvaluation:
    """Memory and modelled time of a given plan."""
    return evaluate_choice(TimedStep.from_table(table, rates), PlacementChoice.from_plan(plan), limits)


def plan_estimate(evaluation: ChoiceEvaluation, bound: StepTimeBound) -> PlanEstimate:
    needs = evaluation.needs
    return PlanEstimate(evaluation.seconds, bound.seconds, bound.limited_by, needs.gpu_bytes, needs.host_bytes)


def _fill_unknown_rates(rates: MachineRates) -> tuple[MachineRates, list[str]]:
    """The rates with assumed values for missing ones, and the names of the missing ones."""
    missing = list(rates.unknown_rates)
    up, down = rates.to_device_bytes_s, rates.to_host_bytes_s
    if not rates.one_pool and (up is None) != (down is None):
        missing.append("to_device_bytes_s" if up is None else "to_host_bytes_s")
    filled = replace(
        rates,
        matmul_flops=rates.matmul_flops or ASSUMED_FLOPS,
        gpu_bytes_s=rates.gpu_bytes_s or ASSUMED_BYTES_S,
        to_device_bytes_s=up or down,
        to_host_bytes_s=down or up,
    )
    return filled, missing


def _build_plan(
    step: TimedStep,
    machine: MachineSpec,
    evaluation: ChoiceEvaluation,
    bound: StepTimeBound | None,
    reasons: tuple[str, ...] = (),
) -> MemoryPlan:
    choice = evaluation.choice
    weights = [WeightPlacement.STREAMED if streamed else WeightPlacement.GPU for streamed in choice.streamed]
    return MemoryPlan(
        phase=step.table.phase,
        machine=machine.key,
        fits=evaluation.simulated is not None,
        blocks=tuple(
            BlockPlan(block.name, weights[b], choice.activations[b], block_reason(step, choice, b))
            for b, block in enumerate(step.table.blocks)
        ),
        ahead=choice.ahead,
        stepping=choice.optimizer,
        idle_at_home=choice.idle_at_home and step.table.idle_bytes > 0,
        modelled=None if bound is None else plan_estimate(evaluation, bound),
        reasons=reasons,
    )


def _explain_plan(plan: MemoryPlan, reasons: tuple[str, ...], reserved: int | None) -> MemoryPlan:
    modelled = None if plan.modelled is None else replace(plan.modelled, gpu_reserved_bytes=reserved)
    return replace(plan, modelled=modelled, reasons=reasons)


def _build_infeasible_plan(
    step: TimedStep,
    machine: MachineSpec,
    limits: MemoryLimits,
    bound: StepTimeBound,
    reserved_bytes: ReservedBytesModel | None,
) -> MemoryPlan:
    """The placement with the least GPU memory, with `fits=False` and the missing bytes as its reason."""
    choice = least_gpu_memory_choice(step)
    needs = compute_memory_needs(step, choice)
    bound = replace(bound, seconds=math.inf, limited_by="does not fit")
    evaluation = ChoiceEvaluation(choice, needs, None)
    plan = _build_plan(step, machine, evaluation, bound)
    reserved = None if reserved_bytes is None else reserved_bytes(plan, None)
    gpu_bytes = max(needs.gpu_bytes, reserved or 0)
    return _explain_plan(plan, (_shortage_text(step, gpu_bytes, needs.host_bytes, limits),), reserved)


def least_gpu_memory_choice(step: TimedStep) -> PlacementChoice:
    """Everything that can be streamed or recomputed is, and nothing is prefetched."""
    has_link = step.rates.has_link
    streamed = tuple(has_link and step.streamable_bytes[b] > 0 and step.movable[b] for b in step.block_numbers)
    streams_state = has_link and sum(step.state_bytes) > 0
    optimizer = OptimizerPlacement.STREAMED if streams_state else OptimizerPlacement.GPU
    return PlacementChoice(streamed, recompute_where_possible(step.table.blocks), 0, optimizer, has_link)


def _shortage_text(step: TimedStep, gpu_bytes: int, host_bytes: int, limits: MemoryLimits) -> str:
    host = limits.host_bytes
    if step.rates.one_pool or not step.rates.has_link:
        lacking = gpu_bytes + host_bytes - limits.gpu_bytes
        return f"does not fit: {bytes_text(lacking)} are missing with everything recomputed"
    parts = []
    if gpu_bytes > limits.gpu_bytes:
        parts.append(f"{bytes_text(gpu_bytes - limits.gpu_bytes)} of GPU memory")
    if host is None:
        parts.append(f"{bytes_text(host_bytes)} of host memory, whose size is not known")
    elif host_bytes > host:
        parts.append(f"{bytes_text(host_bytes - host)} of host memory")
    missing = " and ".join(parts) or "a placement that fits both memories"
    return f"does not fit: with everything streamed and recomputed, it lacks {missing}"

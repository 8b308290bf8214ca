"""From a step table, a machine and its limits to a plan: placement of weights, activations and optimizer, with reasons.

Pure and deterministic. That the plan fits follows from arithmetic that does not depend on timing (`memory_needs.py`).
Its time is modelled by the simulation that all placements are compared with (`simulate.py`), and reported with a lower
bound that no plan can undercut (`roofline.py`): the ratio shows how much a better plan could gain at most.
"""

from __future__ import annotations

import math
from dataclasses import replace

from supertuner.core.types import bytes_text
from supertuner.memory.machines import MachineSpec
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.fast_simulate import ChoiceEvaluation, evaluate_choice
from supertuner.plan.placement.memory_needs import MemoryNeeds, compute_memory_needs
from supertuner.plan.placement.plan import (
    ActivationPolicy,
    BlockPlan,
    MemoryPlan,
    OptimizerPlacement,
    PlanEstimate,
    WeightPlacement,
)
from supertuner.plan.placement.reasons import block_reason, plan_reasons
from supertuner.plan.placement.roofline import StepTimeBound, step_time_bound
from supertuner.plan.placement.search import search_placement
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

ASSUMED_FLOPS, ASSUMED_BYTES_S = 1e14, 1e12
"""Rates for a machine whose rates are unknown: a plan can still be made, but its time is not reported."""


def plan_step(
    table: StepTable, machine: MachineSpec, limits: MemoryLimits | None = None, *, rates: MachineRates | None = None
) -> MemoryPlan:
    """The plan of one step; `fits` is False if none fits. `rates`: observed ones, instead of the machine's figures."""
    machine_rates = MachineRates.from_machine(machine) if rates is None else rates
    available = MemoryLimits.from_machine(machine) if limits is None else limits
    filled_rates, missing = _fill_unknown_rates(machine_rates)
    step = TimedStep.from_table(table, filled_rates)
    time_bound = step_time_bound(table, filled_rates, available)
    evaluation = search_placement(step, available, time_bound.seconds)
    if evaluation is None:
        return _build_infeasible_plan(step, machine, available, time_bound)
    reasons = plan_reasons(step, evaluation, time_bound, available, missing)
    return _build_plan(step, machine, evaluation, None if missing else time_bound, reasons)


def evaluate_plan(
    table: StepTable, plan: MemoryPlan, machine: MachineSpec, limits: MemoryLimits, rates: MachineRates | None = None
) -> ChoiceEvaluation:
    """Memory and modelled time of a given plan."""
    step = TimedStep.from_table(table, MachineRates.from_machine(machine) if rates is None else rates)
    return evaluate_choice(step, PlacementChoice.from_plan(plan), limits)


def _fill_unknown_rates(rates: MachineRates) -> tuple[MachineRates, tuple[str, ...]]:
    """The rates with assumed values for missing ones, and the names of the missing ones."""
    missing = list(rates.unknown_rates)
    up, down = rates.to_device_bytes_s, rates.to_host_bytes_s
    if not rates.one_pool and (up is None) != (down is None):
        missing.append("to_device_bytes_s" if up is None else "to_host_bytes_s")
    return (
        replace(
            rates,
            matmul_flops=rates.matmul_flops or ASSUMED_FLOPS,
            gpu_bytes_s=rates.gpu_bytes_s or ASSUMED_BYTES_S,
            to_device_bytes_s=up or down,
            to_host_bytes_s=down or up,
        ),
        tuple(missing),
    )


def _build_plan(
    step: TimedStep,
    machine: MachineSpec,
    evaluation: ChoiceEvaluation,
    time_bound: StepTimeBound | None,
    reasons: tuple[str, ...],
) -> MemoryPlan:
    choice = evaluation.choice
    modelled = None
    if time_bound is not None:
        modelled = PlanEstimate(
            evaluation.seconds,
            time_bound.seconds,
            time_bound.limited_by,
            evaluation.needs.gpu_bytes,
            evaluation.needs.host_bytes,
        )
    return MemoryPlan(
        phase=step.table.phase,
        machine=machine.key,
        fits=evaluation.simulated is not None,
        blocks=_build_block_plans(step, evaluation),
        ahead=choice.ahead,
        stepping=choice.optimizer,
        idle_at_home=choice.idle_at_home and step.table.idle_bytes > 0,
        modelled=modelled,
        reasons=reasons,
    )


def _build_block_plans(step: TimedStep, evaluation: ChoiceEvaluation) -> tuple[BlockPlan, ...]:
    choice = evaluation.choice
    return tuple(
        BlockPlan(
            block.name,
            WeightPlacement.STREAMED if choice.streamed[b] else WeightPlacement.GPU,
            choice.activations[b],
            block_reason(step, choice, b),
        )
        for b, block in enumerate(step.table.blocks)
    )


def _build_infeasible_plan(
    step: TimedStep, machine: MachineSpec, limits: MemoryLimits, time_bound: StepTimeBound
) -> MemoryPlan:
    """The placement with the least GPU memory, with `fits=False` and the missing bytes as its reason."""
    choice = least_gpu_memory_choice(step)
    memory_needs = compute_memory_needs(step, choice)
    evaluation = ChoiceEvaluation(choice, memory_needs, None)
    reasons = (_shortage_text(step, memory_needs, limits),)
    return _build_plan(
        step, machine, evaluation, replace(time_bound, seconds=math.inf, limited_by="does not fit"), reasons
    )


def least_gpu_memory_choice(step: TimedStep) -> PlacementChoice:
    """Everything that can be streamed or recomputed is, and nothing is prefetched."""
    has_link = step.rates.has_link
    activations = tuple(
        ActivationPolicy.RECOMPUTE if block.recomputable else ActivationPolicy.KEEP for block in step.table.blocks
    )
    streamed = tuple(
        has_link and step.streamable_bytes[b] > 0 and step.movable[b] for b in range(len(step.weight_bytes))
    )
    has_state_to_move = has_link and sum(step.state_bytes) > 0
    return PlacementChoice(
        streamed, activations, 0, OptimizerPlacement.STREAMED if has_state_to_move else OptimizerPlacement.GPU, has_link
    )


def _shortage_text(step: TimedStep, memory_needs: MemoryNeeds, limits: MemoryLimits) -> str:
    host = limits.host_bytes
    if step.rates.one_pool or not step.rates.has_link:
        lacking = memory_needs.gpu_bytes + memory_needs.host_bytes - limits.gpu_bytes
        return f"does not fit: {bytes_text(lacking)} are missing with everything recomputed"
    parts = []
    if memory_needs.gpu_bytes > limits.gpu_bytes:
        parts.append(f"{bytes_text(memory_needs.gpu_bytes - limits.gpu_bytes)} of GPU memory")
    if host is None:
        parts.append(f"{bytes_text(memory_needs.host_bytes)} of host memory, whose size is not known")
    elif memory_needs.host_bytes > host:
        parts.append(f"{bytes_text(memory_needs.host_bytes - host)} of host memory")
    missing = " and ".join(parts) or "a placement that fits both memories"
    return f"does not fit: with everything streamed and recomputed, it lacks {missing}"

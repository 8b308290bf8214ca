"""The strategies that plans are compared with: the same step on the same machine, simulated by the same rules.

Each strategy gets its best variant; None if it does not fit. All times are modelled.

    all in HBM               nothing moves, nothing is recomputed
    checkpointing            every block is recomputed; weights and optimizer are placed and prefetched optimally
    block swapping           as few blocks as necessary are kept in host memory and fetched when they are used, without
                             prefetch; activations are all kept or all recomputed
    paging                   everything is managed memory without prefetch; the least recently used pages are evicted
    GH200 forks              paging, with the batch kept in host memory and read there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.paging_model import PagedWindow, simulate_paging
from supertuner.memory.machines import MachineSpec
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.fast_simulate import ChoiceEvaluation, evaluate_choice
from supertuner.plan.placement.plan import ActivationPolicy
from supertuner.plan.placement.search import evenly_spread_order, optimizer_placements
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits


@dataclass(frozen=True, slots=True)
class BaselineTimes:
    """Modelled seconds of a window under each strategy; None: it does not fit."""

    all_in_hbm: float | None
    checkpointing: float | None
    block_swapping: float | None
    paging: PagedWindow | None
    gh200_forks: PagedWindow | None


def compute_baselines(
    table: StepTable, machine: MachineSpec, limits: MemoryLimits, *, rates: MachineRates | None = None
) -> BaselineTimes:
    step = TimedStep.from_table(table, MachineRates.from_machine(machine) if rates is None else rates)
    return BaselineTimes(
        _seconds(evaluate_choice(step, PlacementChoice.all_on_gpu(len(step.weight_bytes)), limits)),
        _seconds(best_checkpointing(step, limits)),
        _seconds(best_block_swapping(step, limits)),
        simulate_paging(step, machine, limits),
        simulate_paging(step, machine, limits, batch_on_host=True),
    )


def best_checkpointing(step: TimedStep, limits: MemoryLimits) -> ChoiceEvaluation | None:
    """Every recomputable block is recomputed; weights are streamed with the best number of blocks and distance."""
    return _best_streaming(step, limits, [_same_policy(step, ActivationPolicy.RECOMPUTE)], (1, 2, 3))


def best_block_swapping(step: TimedStep, limits: MemoryLimits) -> ChoiceEvaluation | None:
    """Weights are fetched when they are needed, and the computation waits for them."""
    return _best_streaming(
        step, limits, [_same_policy(step, ActivationPolicy.KEEP), _same_policy(step, ActivationPolicy.RECOMPUTE)], (0,)
    )


def _best_streaming(
    step: TimedStep, limits: MemoryLimits, policies: Sequence[tuple[ActivationPolicy, ...]], distances: Sequence[int]
) -> ChoiceEvaluation | None:
    """The best number of streamed blocks over all placements of the optimizer."""
    evaluations = []
    count = len(step.weight_bytes)
    order = (
        evenly_spread_order([b for b in range(count) if step.streamable_bytes[b] and step.movable[b]])
        if step.rates.has_link
        else []
    )
    for activations in policies:
        for optimizer in optimizer_placements(step, limits):
            for ahead in distances:
                start = PlacementChoice((False,) * count, activations, ahead, optimizer, step.rates.has_link)
                evaluations += [
                    evaluate_choice(step, _with_streamed(start, order[:n]), limits) for n in range(len(order) + 1)
                ]
    return min((v for v in evaluations if v.simulated is not None), key=lambda v: v.seconds, default=None)


def _with_streamed(choice: PlacementChoice, blocks: Sequence[int]) -> PlacementChoice:
    streamed_blocks = set(blocks)
    return replace(choice, streamed=tuple(b in streamed_blocks for b in range(len(choice.streamed))))


def _same_policy(step: TimedStep, policy: ActivationPolicy) -> tuple[ActivationPolicy, ...]:
    return tuple(
        policy if policy is ActivationPolicy.KEEP or block.recomputable else ActivationPolicy.KEEP
        for block in step.table.blocks
    )


def _seconds(evaluation: ChoiceEvaluation | None) -> float | None:
    return None if evaluation is None or evaluation.simulated is None else evaluation.seconds

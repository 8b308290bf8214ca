"""What a plan is compared with: other ways to run the same step on the same machine, by the same rules.

Each gets the best that its own idea allows; None where it does not fit. All times are modelled.

    all in HBM               nothing moves, nothing is recomputed
    checkpointing            every block recomputed; weights and optimizer placed and fetched ahead as well as can be
    block swapping           as many blocks' weights at home as must be, fetched when they are used and not before;
                             activations all kept or all recomputed
    paging                   everything managed, nothing fetched ahead, least recently used leaves
    seeds                    paging, with the batch's home in host memory and read there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.paging_model import Paged, paged
from supertuner.memory.machines import Machine
from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.fast_simulate import Verdict, judge
from supertuner.plan.placement.plan import Fate
from supertuner.plan.placement.search import spread, steppings
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import Limits, Rates


@dataclass(frozen=True, slots=True)
class Baselines:
    """Modelled seconds of a window; None: it does not fit."""

    all_in_hbm: float | None
    checkpointing: float | None
    block_swapping: float | None
    paging: Paged | None
    seeds: Paged | None


def baselines(table: StepTable, machine: Machine, limits: Limits, *, rates: Rates | None = None) -> Baselines:
    step = Step.of(table, Rates.of(machine) if rates is None else rates)
    return Baselines(
        _seconds(judge(step, Choice.nothing(len(step.weights)), limits)),
        _seconds(checkpointing(step, limits)),
        _seconds(block_swapping(step, limits)),
        paged(step, machine, limits),
        paged(step, machine, limits, latents_at_home=True),
    )


def checkpointing(step: Step, limits: Limits) -> Verdict | None:
    """Every block that can be is recomputed; all else is as good as streaming ahead makes it."""
    return _best(step, limits, [_all(step, Fate.RECOMPUTE)], (1, 2, 3))


def block_swapping(step: Step, limits: Limits) -> Verdict | None:
    """Weights come when they are needed, and computation waits for them."""
    return _best(step, limits, [_all(step, Fate.KEEP), _all(step, Fate.RECOMPUTE)], (0,))


def _best(step: Step, limits: Limits, fates: Sequence[tuple[Fate, ...]], distances: Sequence[int]) -> Verdict | None:
    """The best number of blocks at home, for each place of the optimizer."""
    found = []
    count = len(step.weights)
    order = spread([b for b in range(count) if step.travels[b] and step.movable[b]]) if step.rates.has_link else []
    for fate in fates:
        for stepping in steppings(step, limits):
            for ahead in distances:
                start = Choice((False,) * count, fate, ahead, stepping, step.rates.has_link)
                found += [judge(step, _away(start, order[:n]), limits) for n in range(len(order) + 1)]
    return min((v for v in found if v.played is not None), key=lambda v: v.seconds, default=None)


def _away(choice: Choice, blocks: Sequence[int]) -> Choice:
    gone = set(blocks)
    return replace(choice, streamed=tuple(b in gone for b in range(len(choice.streamed))))


def _all(step: Step, fate: Fate) -> tuple[Fate, ...]:
    return tuple(fate if fate is Fate.KEEP or block.recomputable else Fate.KEEP for block in step.table.blocks)


def _seconds(verdict: Verdict | None) -> float | None:
    return None if verdict is None or verdict.played is None else verdict.seconds

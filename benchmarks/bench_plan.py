"""What plans would be worth: modelled full-size steps on three machines, against a bound and five other ways.

Nothing here is measured. Tables are of traced steps (`workloads.py`); machines are rows of `memory/machines.py`, at the
peaks that their makers print; an H100 is taken to sit in a host of 512 GiB whose memory is as fast as its link needs.
Every way to run a step is played by the same rules on the same clock; the plan's is replayed on the software superchip.
Goals are those of a GH200; elsewhere figures are said for the record.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ClaimRow, at_least, at_most, noted, report, say
from benchmarks.paging_model import PagedWindow
from benchmarks.plan_baselines import BaselineTimes, compute_baselines
from benchmarks.workloads import WORKLOADS, table
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, WeightPlacement
from supertuner.plan.placement.plan_step import plan_step
from supertuner.plan.placement.replay import replay_plan
from supertuner.plan.placement.search import link_seconds
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

CARDS_HOST_BYTES = 512 * GIB
"""Assumed: the table of machines does not know what a card is put into."""
GOAL = "gh200-96"
NEAR, TWICE, RECOMPUTING, SECONDS = 1.10, 2.0, 1.2, 5.0


@dataclass(frozen=True)
class PlanMeasurement:
    plan: MemoryPlan
    seconds: float
    bound_s: float
    others: BaselineTimes
    compute_s: float
    link_s: float
    """The link is busy under the plan."""
    planning_s: float

    @property
    def roomy(self) -> bool:
        """Whether host memory has room for every activation that the GPU's has none for."""
        return all(block.activations is not ActivationPolicy.RECOMPUTE for block in self.plan.blocks)


def measure_plan(step_table: StepTable, machine_key: str) -> PlanMeasurement | None:
    """None: no plan fits."""
    machine = MACHINES[machine_key]
    limits = MemoryLimits.from_machine(machine, host_bytes=None if machine.host_bytes.value else CARDS_HOST_BYTES)
    begin = time.process_time()
    plan = plan_step(step_table, machine, limits)
    planning_s = time.process_time() - begin
    if not plan.fits or plan.modelled is None:
        say(f"    {plan.reasons[0]}; bound {plan.modelled.bound_s if plan.modelled else math.nan:.3g}")
        return None
    rates = MachineRates.from_machine(machine)
    step = TimedStep.from_table(step_table, rates)
    return PlanMeasurement(
        plan,
        replay_plan(step_table, plan, machine, limits).seconds,
        plan.modelled.bound_s,
        compute_baselines(step_table, machine, limits),
        step_table.micro_batches * step.micro_batch_s + step.update_s,
        link_seconds(step, PlacementChoice.from_plan(plan)),
        planning_s,
    )


def rows() -> list[ClaimRow]:
    found = []
    for name, workload in WORKLOADS.items():
        for key in (GOAL, "gb10", "h100-80-pcie"):
            say(f"{workload.title} on {MACHINES[key].title}")
            one = measure_plan(table(name), key)
            if one is not None:
                tell(one)
                found += claims(f"{workload.title}, {MACHINES[key].title}", one, key == GOAL)
    return found


def tell(one: PlanMeasurement) -> None:
    """The modelled seconds, and what the plan does."""
    others = one.others
    say(
        f"    modelled: plan {one.seconds:.3f} s, bound {one.bound_s:.3f} s ({_by(one)}); "
        f"all in HBM {_text(others.all_in_hbm)}, checkpointing {_text(others.checkpointing)}, "
        f"block swapping {_text(others.block_swapping)}, "
        f"paging {_paged(others.paging)}, seeds {_paged(others.gh200_forks)}"
    )
    fates = {fate: sum(block.activations is fate for block in one.plan.blocks) for fate in ActivationPolicy}
    streamed = sum(block.weights is WeightPlacement.STREAMED for block in one.plan.blocks)
    what = ", ".join(f"{count} {fate.value}" for fate, count in fates.items() if count)
    say(
        f"    plan: activations {what}; weights of {streamed} blocks streamed, {one.plan.ahead} ahead; optimizer "
        f"{one.plan.stepping.value}; made in {one.planning_s:.2f} s; link busy {one.link_s:.3f} s beside "
        f"{one.compute_s:.3f} s of work"
    )


def claims(name: str, one: PlanMeasurement, goal: bool) -> list[ClaimRow]:
    others, took = one.others, one.seconds
    found = [at_most(f"{name}: seconds to plan", one.planning_s, SECONDS, unit="s")]
    near = at_most if goal else (lambda name, figure, _limit: noted(name, figure))
    found.append(near(f"{name}: plan over bound", took / one.bound_s, NEAR))
    for title, other in (("paging", others.paging), ("the seeds' policy", others.gh200_forks)):
        if other is not None:
            transfers = other.link_s > one.compute_s
            found.append(_claim(f"{name}: times {title}", other.seconds / took, TWICE, goal and transfers))
    if others.checkpointing is not None:
        found.append(
            _claim(f"{name}: times checkpointing", others.checkpointing / took, RECOMPUTING, goal and one.roomy)
        )
    if others.block_swapping is not None:
        found.append(noted(f"{name}: times block swapping", others.block_swapping / took))
    if others.all_in_hbm is not None:
        found.append(_claim(f"{name}: times all in HBM", others.all_in_hbm / took, 1.0, True))
    return found


def _claim(name: str, figure: float, limit: float, counts: bool) -> ClaimRow:
    return at_least(name, figure, limit) if counts else noted(name, figure)


def _by(one: PlanMeasurement) -> str:
    return "none" if one.plan.modelled is None else one.plan.modelled.bounded_by


def _paged(other: PagedWindow | None) -> str:
    return (
        "does not fit"
        if other is None
        else f"{other.seconds:.3f} s ({other.activations.value}, link {other.link_s:.3f} s)"
    )


def _text(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"{seconds:.3f} s"


def main() -> int:
    return report(rows(), title="plans, modelled")


if __name__ == "__main__":
    raise SystemExit(main())

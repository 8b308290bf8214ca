"""The modelled gain of plans: full-size steps on three machines, compared with a bound and five other strategies.

Nothing here is measured. The tables are traced steps (`workloads.py`); the machines are rows of `memory/machines.py` at
the peak rates that their vendors publish; an H100 is assumed to be in a host with 512 GiB whose memory is as fast as
the link needs. All strategies are modelled by the same rules and the same clock; the plan is replayed on the software
superchip. Limits apply to a GH200; other machines are shown without limits.
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
from benchmarks.plan_replay import replay_plan
from benchmarks.workloads import WORKLOADS, table
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, WeightPlacement
from supertuner.plan.placement.search import link_seconds
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

CARDS_HOST_BYTES = 512 * GIB
"""Assumed host memory of a PCIe card; the table of machines does not contain it."""
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
    """Seconds for which the link is busy under the plan."""
    planning_s: float

    @property
    def roomy(self) -> bool:
        """Whether host memory can hold every activation that does not fit on the GPU."""
        return all(block.activations is not ActivationPolicy.RECOMPUTE for block in self.plan.blocks)


def measure_plan(step_table: StepTable, machine_key: str) -> PlanMeasurement | None:
    """Model one step on a machine; None if no plan fits."""
    machine = MACHINES[machine_key]
    limits = MemoryLimits.from_machine(machine, host_bytes=None if machine.host_bytes.value else CARDS_HOST_BYTES)
    begin = time.process_time()
    plan = make_plan(step_table, machine, limits)
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
    found: list[ClaimRow] = []
    planning_s: list[float] = []
    for name, workload in WORKLOADS.items():
        for key in (GOAL, "gb10", "h100-80-pcie"):
            say(f"{workload.title} on {MACHINES[key].title}")
            measurement = measure_plan(table(name), key)
            if measurement is not None:
                print_measurement(measurement)
                planning_s.append(measurement.planning_s)
                found += claims(f"modelled: {workload.title}, {MACHINES[key].title}", measurement, key == GOAL)
    return [
        at_most("seconds to plan, the slowest of all steps and machines", max(planning_s), SECONDS, unit="s"),
        *found,
    ]


def print_measurement(one: PlanMeasurement) -> None:
    """Print the modelled seconds, and what the plan does."""
    others = one.others
    say(
        f"    modelled: plan {one.seconds:.3f} s, bound {one.bound_s:.3f} s ({_by(one)}); "
        f"all in HBM {_text(others.all_in_hbm)}, checkpointing {_text(others.checkpointing)}, "
        f"block swapping {_text(others.block_swapping)}, "
        f"paging {_paged(others.paging)}, GH200 forks {_paged(others.gh200_forks)}"
    )
    policies = {policy: sum(block.activations is policy for block in one.plan.blocks) for policy in ActivationPolicy}
    streamed = sum(block.weights is WeightPlacement.STREAMED for block in one.plan.blocks)
    counts = ", ".join(f"{count} {policy.value}" for policy, count in policies.items() if count)
    say(
        f"    plan: activations {counts}; weights of {streamed} blocks streamed, {one.plan.ahead} ahead; optimizer "
        f"{one.plan.stepping.value}; planned in {one.planning_s:.2f} s; link busy {one.link_s:.3f} s, "
        f"compute {one.compute_s:.3f} s"
    )


def claims(name: str, one: PlanMeasurement, goal: bool) -> list[ClaimRow]:
    others, took = one.others, one.seconds
    near = at_most if goal else (lambda name, figure, _limit: noted(name, figure))
    found = [near(f"{name}: plan over bound", took / one.bound_s, NEAR)]
    for title, other in (("paging", others.paging), ("the GH200 forks' policy", others.gh200_forks)):
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

"""A step, a machine and its limits → a plan: where weights live, what becomes of activations, who steps where.

Pure and deterministic. The plan fits by arithmetic that no timing changes (`needs`), its time is modelled by the same
clock that judges every other way to run the step (`playing`), and it stands beside a bound that no plan goes below
(`roofline`): the ratio of the two is how much better a plan could be at most. Each decision says why.
"""

from __future__ import annotations

import math
from dataclasses import replace

from supertuner.core.types import bytes_text
from supertuner.memory.machines import Machine
from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.fast_simulate import Verdict, judge
from supertuner.plan.placement.memory_needs import Needs, needs
from supertuner.plan.placement.plan import BlockPlan, Fate, Modelled, Plan, Residence, Stepping
from supertuner.plan.placement.roofline import Bound, bound
from supertuner.plan.placement.search import search
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.text import block_reason, plan_reasons
from supertuner.plan.placement.throughput import Limits, Rates

STAND_IN_FLOPS, STAND_IN_BYTES_S = 1e14, 1e12
"""Where a machine's speed is unknown a plan is still made, by how much there is to do; its time is then not told."""


def place(table: StepTable, machine: Machine, limits: Limits | None = None, *, rates: Rates | None = None) -> Plan:
    """The plan of one step. `rates`: as counters of a run say, instead of the machine's figures."""
    given = Rates.of(machine) if rates is None else rates
    room = Limits.of(machine) if limits is None else limits
    known, missing = _filled(given)
    step = Step.of(table, known)
    least = bound(table, known, room)
    verdict = search(step, room, least.seconds)
    if verdict is None:
        return _refused(step, machine, room, least)
    reasons = plan_reasons(step, verdict, least, room, missing)
    return _written(step, machine, verdict, None if missing else least, reasons)


def judged(table: StepTable, plan: Plan, machine: Machine, limits: Limits, rates: Rates | None = None) -> Verdict:
    """What the model says of a plan that somebody else made."""
    step = Step.of(table, Rates.of(machine) if rates is None else rates)
    return judge(step, Choice.of(plan), limits)


def _filled(rates: Rates) -> tuple[Rates, tuple[str, ...]]:
    """Rates to decide by, and what of them is not known."""
    missing = list(rates.unknown)
    up, down = rates.to_device_bytes_s, rates.to_host_bytes_s
    if not rates.one_pool and (up is None) != (down is None):
        missing.append("to_device_bytes_s" if up is None else "to_host_bytes_s")
    return (
        replace(
            rates,
            matmul_flops=rates.matmul_flops or STAND_IN_FLOPS,
            gpu_bytes_s=rates.gpu_bytes_s or STAND_IN_BYTES_S,
            to_device_bytes_s=up or down,
            to_host_bytes_s=down or up,
        ),
        tuple(missing),
    )


def _written(step: Step, machine: Machine, verdict: Verdict, least: Bound | None, reasons: tuple[str, ...]) -> Plan:
    choice = verdict.choice
    modelled = None
    if least is not None:
        modelled = Modelled(verdict.seconds, least.seconds, least.by, verdict.needs.gpu, verdict.needs.host)
    return Plan(
        phase=step.table.phase,
        machine=machine.key,
        fits=verdict.played is not None,
        blocks=_blocks(step, verdict),
        ahead=choice.ahead,
        stepping=choice.stepping,
        idle_at_home=choice.idle_at_home and step.table.idle_bytes > 0,
        modelled=modelled,
        reasons=reasons,
    )


def _blocks(step: Step, verdict: Verdict) -> tuple[BlockPlan, ...]:
    choice = verdict.choice
    return tuple(
        BlockPlan(
            block.name,
            Residence.STREAMED if choice.streamed[b] else Residence.GPU,
            choice.fates[b],
            block_reason(step, choice, b),
        )
        for b, block in enumerate(step.table.blocks)
    )


def _refused(step: Step, machine: Machine, limits: Limits, least: Bound) -> Plan:
    """The choice that needs least of the GPU's memory, and by how much it is too large."""
    choice = least_memory(step)
    needed = needs(step, choice)
    verdict = Verdict(choice, needed, None)
    reasons = (_lack(step, needed, limits),)
    return _written(step, machine, verdict, replace(least, seconds=math.inf, by="no room"), reasons)


def least_memory(step: Step) -> Choice:
    """As little on the GPU as can be."""
    away = step.rates.has_link
    fates = tuple(Fate.RECOMPUTE if block.recomputable else Fate.KEEP for block in step.table.blocks)
    streamed = tuple(away and step.travels[b] > 0 and step.movable[b] for b in range(len(step.weights)))
    large = away and sum(step.state) > 0
    return Choice(streamed, fates, 0, Stepping.STREAMED if large else Stepping.GPU, away)


def _lack(step: Step, needed: Needs, limits: Limits) -> str:
    host = limits.host_bytes
    if step.rates.one_pool or not step.rates.has_link:
        lacking = needed.gpu + needed.host - limits.gpu_bytes
        return f"does not fit: with everything recomputed {bytes_text(lacking)} are lacking"
    parts = []
    if needed.gpu > limits.gpu_bytes:
        parts.append(f"{bytes_text(needed.gpu - limits.gpu_bytes)} of GPU memory")
    if host is None:
        parts.append(f"{bytes_text(needed.host)} of host memory, of which it is not known how much there is")
    elif needed.host > host:
        parts.append(f"{bytes_text(needed.host - host)} of host memory")
    lacks = " and ".join(parts) or "a way to have both"
    return f"does not fit: streaming and recomputing everything, it lacks {lacks}"

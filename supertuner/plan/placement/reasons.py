"""The reasons of a plan, for people: one line for each block and some for the whole plan, with the figures behind them.

All figures are modelled.
"""

from __future__ import annotations

from collections.abc import Sequence

from supertuner.core.types import bytes_text
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.fast_simulate import ChoiceEvaluation
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement
from supertuner.plan.placement.roofline import StepTimeBound
from supertuner.plan.placement.throughput import MemoryLimits


def seconds_text(seconds: float) -> str:
    """`1.36 ms`, `24 s`; `no time` for 0."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "no time"


def block_reason(step: TimedStep, choice: PlacementChoice, block: int) -> str:
    return f"{_activations_reason(step, choice, block)}; {_weights_reason(step, choice, block)}"


def _activations_reason(step: TimedStep, choice: PlacementChoice, block: int) -> str:
    saved, policy = step.saved_bytes[block], choice.activations[block]
    if not saved:
        return "saves no activations"
    if policy is ActivationPolicy.KEEP:
        all_kept = all(other is ActivationPolicy.KEEP for other in choice.activations)
        return "activations fit" if all_kept else f"{bytes_text(saved)} of activations fit, and are needed again soon"
    recompute_s = step.forward_s[block]
    if policy is ActivationPolicy.RECOMPUTE:
        freed = bytes_text(saved - step.input_bytes[block])
        return f"{freed} of activations are recomputed in {seconds_text(recompute_s)}: memory and link are full"
    trip_s = step.rates.round_trip_s(saved)
    return (
        f"{bytes_text(saved)} of activations go to the host and back in {seconds_text(trip_s)}, "
        f"in parallel with the computation; recomputing them would take {seconds_text(recompute_s)}"
    )


def _weights_reason(step: TimedStep, choice: PlacementChoice, block: int) -> str:
    weights = step.streamable_bytes[block]
    if not step.weight_bytes[block]:
        return "no weights"
    if not choice.streamed[block]:
        return "weights stay"
    rate = step.rates.to_device_bytes_s or 1.0
    one_way = "" if step.streams_trained[block] else ", and never copied back"
    return f"weights are fetched in {seconds_text(weights / rate)} for each pass, {choice.ahead} blocks ahead{one_way}"


def plan_reasons(
    step: TimedStep,
    evaluation: ChoiceEvaluation,
    bound: StepTimeBound,
    limits: MemoryLimits,
    missing: Sequence[str],
    reserved: int | None = None,
) -> tuple[str, ...]:
    """`reserved`: what the caching allocator reserves on the GPU; None: not modelled."""
    choice, simulated = evaluation.choice, evaluation.simulated
    assert simulated is not None
    peak, host = bytes_text(evaluation.needs.gpu_bytes), bytes_text(evaluation.needs.host_bytes)
    gpu = peak if reserved is None else f"{bytes_text(reserved)} reserved ({peak} in use)"
    reasons = [f"{gpu} of {bytes_text(limits.gpu_bytes)} GPU memory, {host} of host memory, modelled"]
    if choice.idle_at_home and step.table.idle_bytes and step.rates.has_link:
        idle = step.table.idle_bytes
        fetch = seconds_text(idle / (step.rates.to_device_bytes_s or 1.0))
        reasons.append(f"idle experts ({bytes_text(idle)}) are kept in host memory; fetching them takes {fetch}")
    if choice.optimizer is not OptimizerPlacement.GPU:
        reasons.append(_optimizer_text(step, choice))
    if missing:
        reasons.append(f"no time is modelled: {', '.join(missing)} of this machine is not known")
    else:
        ratio = evaluation.seconds / bound.seconds if bound.seconds else 1.0
        reasons.append(
            f"step {seconds_text(evaluation.seconds)}, lower bound {seconds_text(bound.seconds)} "
            f"({bound.limited_by}), ratio {ratio:.3f}; {seconds_text(simulated.waiting_s)} of waiting; "
            f"modelled at {step.rates.compute_share:.0%} of peak"
        )
    if limits.host_bytes is None and not step.rates.one_pool:
        reasons.append("the size of host memory is not known, so nothing is put there")
    return tuple(reasons)


def _optimizer_text(step: TimedStep, choice: PlacementChoice) -> str:
    state = sum(step.state_bytes)
    if choice.optimizer is OptimizerPlacement.STREAMED:
        return (
            f"the optimizer's state ({bytes_text(state)}) is kept in host memory; for the update it is copied to the "
            f"GPU and back in {seconds_text(step.rates.round_trip_s(state))}, block by block"
        )
    traffic = f"{bytes_text(step.host_step_bytes)} of memory traffic, {seconds_text(step.host_step_s)}"
    return f"the optimizer steps on the host: {traffic}; faster than moving the state"

"""Why a plan decides as it does: one line for each block, and some for the whole, with the figures that decided.

All figures are modelled.
"""

from __future__ import annotations

from supertuner.core.types import bytes_text
from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.fast_simulate import Verdict
from supertuner.plan.placement.plan import Fate, Stepping
from supertuner.plan.placement.roofline import Bound
from supertuner.plan.placement.throughput import Limits


def seconds_text(seconds: float) -> str:
    """A time for people."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "no time"


def block_reason(step: Step, choice: Choice, block: int) -> str:
    return f"{_of_activations(step, choice, block)}; {_of_weights(step, choice, block)}"


def _of_activations(step: Step, choice: Choice, block: int) -> str:
    saved, fate = step.saved[block], choice.fates[block]
    if not saved:
        return "leaves no activations"
    if fate is Fate.KEEP:
        alone = all(other is Fate.KEEP for other in choice.fates)
        return "activations fit" if alone else f"{bytes_text(saved)} of activations fit, and are needed early again"
    again = step.forward_s[block]
    if fate is Fate.RECOMPUTE:
        freed = bytes_text(saved - step.inputs[block])
        return f"{freed} of activations are made again in {seconds_text(again)}: neither memory nor link has room"
    return (
        f"{bytes_text(saved)} of activations cross the link in {seconds_text(crossing(step, saved))}, there and back, "
        f"beside computation; making them again would take {seconds_text(again)} of it"
    )


def _of_weights(step: Step, choice: Choice, block: int) -> str:
    weights = step.travels[block]
    if not step.weights[block]:
        return "no weights"
    if not choice.streamed[block]:
        return "weights stay"
    rate = step.rates.to_device_bytes_s
    assert rate is not None
    back = "" if step.trained_travel[block] else ", nothing goes back"
    return f"weights come in {seconds_text(weights / rate)}, {choice.ahead} ahead, forward and backward{back}"


def crossing(step: Step, nbytes: int) -> float:
    """Home and back over the link."""
    rates = step.rates
    assert rates.to_device_bytes_s is not None and rates.to_host_bytes_s is not None
    return nbytes / rates.to_device_bytes_s + nbytes / rates.to_host_bytes_s


def plan_reasons(
    step: Step, verdict: Verdict, least: Bound, limits: Limits, missing: tuple[str, ...]
) -> tuple[str, ...]:
    choice, played = verdict.choice, verdict.played
    assert played is not None
    found = [f"{_gpu_text(verdict, limits)}, modelled"]
    if choice.idle_at_home and step.table.idle_bytes and step.rates.has_link:
        idle = step.table.idle_bytes
        back = idle / (step.rates.to_device_bytes_s or 1.0)
        found.append(f"idle experts ({bytes_text(idle)}) wait in host memory: back in {seconds_text(back)} at a change")
    if choice.stepping is not Stepping.GPU:
        found.append(_stepping_text(step, choice))
    if missing:
        found.append(f"no time is told: {', '.join(missing)} of this machine is not known")
    else:
        ratio = verdict.seconds / least.seconds if least.seconds else 1.0
        found.append(
            f"step {seconds_text(verdict.seconds)}, bound {seconds_text(least.seconds)} ({least.by}): {ratio:.3f}; "
            f"{seconds_text(played.waiting_s)} of waiting; modelled at {step.rates.compute_share:.0%} of peak"
        )
    if limits.host_bytes is None and not step.rates.one_pool:
        found.append("how much host memory there is is not known, so nothing is put there")
    return tuple(found)


def _gpu_text(verdict: Verdict, limits: Limits) -> str:
    peak, host = verdict.needs.gpu, verdict.needs.host
    return f"{bytes_text(peak)} of {bytes_text(limits.gpu_bytes)} GPU memory, {bytes_text(host)} of host memory"


def _stepping_text(step: Step, choice: Choice) -> str:
    state = sum(step.state)
    if choice.stepping is Stepping.STREAMED:
        return (
            f"the optimizer's state ({bytes_text(state)}) is at home in host memory and crosses the link in "
            f"{seconds_text(crossing(step, state))}, block by block"
        )
    touched = sum(step.host_step_bytes(b) for b in range(len(step.weights)))
    took = touched / (step.rates.host_bytes_s or 1.0)
    return f"the host steps: {bytes_text(touched)} of its memory, {seconds_text(took)}; quicker than to move the state"

"""The least time in which a machine can do a step, whatever the plan: a proven lower bound. Pure.

Counted for every way to run the step: the blocks' own work one after another; work done again where activations neither
stay nor are sent; bytes over the link, in the phase in which they must cross; the update after the last gradient, with
what had no room until then; or a step on the host. Which of these a plan chooses is left open, even in parts of blocks:
at the moment of one block's backward pass, activations of earlier blocks, weights, gradients, state and idle experts
each are on the GPU, at home, or to be made again, and both memories hold what they can (`prices`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from supertuner.plan.choice import Step
from supertuner.plan.decision import Stepping
from supertuner.plan.prices import Priced, Program, Thing, Way, priced
from supertuner.plan.rates import Limits, Rates
from supertuner.plan.table import StepTable

MOMENTS: Final = 3
"""Of so many last blocks the backward pass is looked at: there most is held. Each gives a bound; the best counts."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Modelled seconds that no plan goes below; infinite if no plan fits."""

    seconds: float
    by: str
    """`compute`, `gpu memory`, `link to gpu`, `link to host`, `host memory`; `no room` if no plan fits."""
    compute_s: float
    """The step's own work, nothing done twice, with the optimizer's on the GPU."""
    stepping: Stepping | None
    """Where the optimizer steps in the best case."""


def bound(table: StepTable, rates: Rates, limits: Limits) -> Bound:
    """The least modelled time of one window. Rates that are needed must be known (`Rates.unknown`)."""
    step = Step.of(table, rates)
    compute_s = table.micro_batches * step.micro_s + step.update_s
    best = Bound(math.inf, "no room", compute_s, None)
    for on_host in (False, True):
        if on_host and (not rates.has_link or rates.host_bytes_s is None or not sum(step.trained)):
            continue
        found = _bound(step, limits, on_host, compute_s)
        if found.seconds < best.seconds:
            best = found
    return best


def _bound(step: Step, limits: Limits, on_host: bool, compute_s: float) -> Bound:
    """With the optimizer on the GPU, its state wherever it likes to be between updates; or with it on the host."""
    count = len(step.weights)
    programs = [_Moment(step, limits, on_host, at).program() for at in range(max(0, count - MOMENTS), count)]
    if any(not program.feasible for program in programs):
        return Bound(math.inf, "no room", compute_s, None)
    best = max((priced(program) for program in programs), key=lambda found: found.seconds)
    stepping = Stepping.GPU if _state_fits(step, limits) else Stepping.STREAMED
    # The chain of work holds whatever the prices are; said apart so that rounding does not come before it.
    least = max(best.seconds, step.table.micro_batches * step.micro_s + (0.0 if on_host else step.update_s))
    return Bound(least, _named(step, on_host, best), compute_s, Stepping.HOST if on_host else stepping)


class _Moment:
    """The choices while block `at` is in its backward pass, of all micro-batches on average."""

    def __init__(self, step: Step, limits: Limits, on_host: bool, at: int) -> None:
        self._step, self._limits, self._on_host, self._at = step, limits, on_host, at
        self._micro = step.table.micro_batches
        rates = step.rates
        self._up = 1.0 / rates.to_device_bytes_s if rates.has_link and rates.to_device_bytes_s else 0.0
        self._down = 1.0 / rates.to_host_bytes_s if rates.has_link and rates.to_host_bytes_s else 0.0
        # Where both directions run at once, each phase is charged with the one that it uses more.
        self._first_up = 0.0 if rates.duplex else self._up
        self._second_down = self._update_down = 0.0 if rates.duplex else self._down

    def program(self) -> Program:
        step, limits, at, micro = self._step, self._limits, self._at, self._micro
        later = sum(step.backward_s[at + 1 :])
        gpu = step.table.batch_bytes + step.saved[at] + step.weights[at] + step.gradients[at]
        gpu += step.table.blocks[at].backward_peak_bytes
        host = 0 if limits.host_bytes is None or not step.rates.has_link else limits.host_bytes
        # At the start of a forward pass no activation is there; weights that find no room even then come during it.
        missing = max(0, sum(step.weights) - limits.gpu_bytes) * micro
        second_link_s = 0.0
        # After the last gradient, what had no room must come; before the next forward pass, what has none must go.
        kept = 0 if self._on_host else sum(step.trained) + sum(step.state)
        if self._on_host:
            host -= sum(step.state)
            missing = max(missing, sum(step.trained))
            second_link_s = sum(step.gradients[: at + 1]) * self._second_down
        return Program(
            first_work_s=micro * (sum(step.forward_s) + later),
            first_link_s=missing * self._first_up,
            second_work_s=micro * (sum(step.backward_s) - later),
            second_link_s=second_link_s,
            update_s=self._update_s(),
            arrive_s=max(0, kept + sum(step.gradients) - limits.gpu_bytes) * self._up if kept else 0.0,
            depart_s=max(0, kept - limits.gpu_bytes) * self._update_down,
            gpu_room=limits.gpu_bytes - gpu,
            host_room=host,
            things=self._things(),
        )

    def _update_s(self) -> float:
        step = self._step
        if not self._on_host:
            return step.update_s
        return step.host_step_s

    def _things(self) -> tuple[Thing, ...]:
        step, at = self._step, self._at
        found = [self._activations(b) for b in range(at)]
        # Weights of later blocks were used in this pass already; whether they come again is the forward pass's account.
        found += [self._weights(b) for b in range(len(step.weights)) if b != at]
        if not self._on_host:
            found += self._gradients()
            found.append(self._state(float(sum(step.state))))
        found.append(self._stay_or_go(step.table.idle_bytes, [Way()]))
        return tuple(found)

    def _activations(self, block: int) -> Thing:
        step, micro = self._step, self._micro
        saved, kept, again = step.saved[block], step.inputs[block], micro * step.forward_s[block]
        recomputable = step.table.blocks[block].recomputable
        ways = [Way(gpu=saved)]
        if recomputable:
            ways.append(Way(second_work_s=again, gpu=kept))
        if step.rates.has_link and step.movable[block]:
            ways.append(Way(micro * saved * self._down, 0.0, micro * saved * self._up, host=saved))
        if step.rates.has_link and step.movable[block] and recomputable:
            ways.append(Way(micro * kept * self._down, again, micro * kept * self._up, host=kept))
        return tuple(ways)

    def _gradients(self) -> list[Thing]:
        """Of this pass, made already; and of earlier micro-batches, to which those of earlier blocks will be added."""
        step, at, times = self._step, self._at, self._micro - 1
        made = sum(step.gradients[at + 1 :])
        found = [self._stay_or_go(made, [Way(update_up_s=0.0 if times else made * self._up)])]
        old = sum(step.gradients[:at])
        if times:
            up, down, too = times * old * self._up, times * old * self._down, times * old * self._second_down
            ways = [Way(first_link_s=down, second_link_s=up), Way(second_link_s=up + too)]
            found.append(self._stay_or_go(old * times / self._micro, ways))
        return found

    def _weights(self, block: int) -> Thing:
        """Weights that were stepped on the GPU and are away went home in the update or since."""
        step = self._step
        up = self._micro * step.weights[block] * self._up if block < self._at else 0.0
        home = 0 if self._on_host else step.trained[block]
        ways = [Way(first_link_s=home * self._down, second_link_s=up)]
        ways += [Way(second_link_s=up, update_down_s=home * self._update_down)] if home else []
        return self._stay_or_go(step.weights[block], ways if step.movable[block] else [])

    def _state(self, nbytes: float) -> Thing:
        """What is away now went there in the update or since, and comes back before the update or in it."""
        up, down = nbytes * self._up, nbytes * self._down
        in_update = nbytes * self._update_down
        return self._stay_or_go(
            nbytes,
            [
                Way(first_link_s=down, second_link_s=up),
                Way(first_link_s=down, update_up_s=up),
                Way(second_link_s=up, update_down_s=in_update),
                Way(update_up_s=up, update_down_s=in_update),
            ],
        )

    def _stay_or_go(self, nbytes: float, away: list[Way]) -> Thing:
        stay = Way(gpu=nbytes)
        if not self._step.rates.has_link:
            return (stay,)
        return (stay, *(replace(way, gpu=0.0, host=nbytes) for way in away))


def _state_fits(step: Step, limits: Limits) -> bool:
    return sum(step.trained) + sum(step.gradients) + sum(step.state) <= limits.gpu_bytes


def _named(step: Step, on_host: bool, best: Priced) -> str:
    """What most of the bound comes from."""
    spent = {"compute": 0.0, "link to host": 0.0, "link to gpu": 0.0, "update": 0.0}
    work = ("compute", "compute", "update")
    link = ("link to host", "link to gpu", "link to gpu")  # activations leave, and come back; so does what has no room
    for number, seconds in enumerate(best.phases_s):
        spent[link[number] if best.by_link[number] else work[number]] += seconds
    most = max(spent, key=lambda name: spent[name])
    if most == "update":
        return "host memory" if on_host else "gpu memory"
    if most != "compute":
        return most
    blocks = step.table.blocks
    works = [block.forward for block in blocks] + [block.backward for block in blocks]
    in_memory = sum(step.rates.seconds(one) for one in works if step.rates.bound_by_memory(one))
    return "gpu memory" if 2 * in_memory > step.micro_s else "compute"

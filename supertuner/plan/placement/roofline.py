"""The least time in which a machine can do a step, whatever the plan: a proven lower bound. Pure.

Counted for every way to run the step: the blocks' own work one after another; work done again where activations neither
stay nor are sent; bytes over the link, in the phase in which they must cross; the update after the last gradient, with
all that comes for it and goes home again (between two windows everything is at home); or a step on the host. Where the
optimizer steps is tried in turn. All else that a plan chooses is left open, even in parts of blocks: at the moment of
one block's backward pass, activations of earlier blocks, weights and idle experts each are on the GPU, at home, or to
be made again, and both memories hold what they can (`prices`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from supertuner.plan.placement.choice import Step
from supertuner.plan.placement.lp_bound import Priced, Program, Thing, Way, priced
from supertuner.plan.placement.plan import Stepping
from supertuner.plan.placement.step_table import StepTable
from supertuner.plan.placement.throughput import Limits, Rates

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
    for stepping in Stepping:
        if stepping is not Stepping.GPU and not (rates.has_link and any(step.trained)):
            continue
        if stepping is Stepping.HOST and rates.host_bytes_s is None:
            continue
        found = _bound(step, limits, stepping, compute_s)
        if found.seconds < best.seconds:
            best = found
    return best


def _bound(step: Step, limits: Limits, stepping: Stepping, compute_s: float) -> Bound:
    """With the optimizer in one place."""
    count, on_host = len(step.weights), stepping is Stepping.HOST
    programs = [_Moment(step, limits, stepping, at).program() for at in range(max(0, count - MOMENTS), count)]
    if any(not program.feasible for program in programs):
        return Bound(math.inf, "no room", compute_s, None)
    best = max((priced(program) for program in programs), key=lambda found: found.seconds)
    # The chain of work holds whatever the prices are; said apart so that rounding does not come before it.
    least = max(best.seconds, step.table.micro_batches * step.micro_s + (0.0 if on_host else step.update_s))
    return Bound(least, _named(step, on_host, best), compute_s, stepping)


class _Moment:
    """The choices while block `at` is in its backward pass, of all micro-batches on average."""

    def __init__(self, step: Step, limits: Limits, stepping: Stepping, at: int) -> None:
        self._step, self._limits, self._stepping, self._at = step, limits, stepping, at
        self._on_host = stepping is Stepping.HOST
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
        host = 0 if limits.host_bytes is None or not step.rates.has_link else limits.host_bytes
        # At the start of a forward pass no activation is there; weights that find no room even then come during it.
        missing = max(0, sum(step.weights) - limits.gpu_bytes) * micro
        # After the last gradient, what had no room must come; before the next forward pass, what has none must go.
        kept = 0 if self._on_host else sum(step.trained) + sum(step.state)
        together = kept + sum(step.gradients) if kept else 0
        return Program(
            first_work_s=micro * (sum(step.forward_s) + later),
            first_link_s=missing * self._first_up,
            second_work_s=micro * (sum(step.backward_s) - later),
            second_link_s=sum(step.gradients[: at + 1]) * self._second_down if self._on_host else 0.0,
            update_s=step.host_step_s if self._on_host else step.update_s,
            arrive_s=max(0, together - limits.gpu_bytes) * self._up,
            depart_s=max(0, kept - limits.gpu_bytes) * self._update_down,
            gpu_room=limits.gpu_bytes - self._always(),
            host_room=host - (sum(step.state) if self._on_host else 0),
            late_room=limits.gpu_bytes - (0 if self._on_host else self._never_leaves()),
            things=self._things(),
        )

    def _always(self) -> float:
        """On the GPU at this moment, whatever the plan: the block that computes, the batch, and what never travels."""
        step, at = self._step, self._at
        gpu = step.table.batch_bytes + step.in_backward[at] + step.weights[at] + step.gradients[at]
        others = [b for b in range(len(step.weights)) if b != at and not step.trained_travel[b]]
        return gpu + sum(step.trained[b] + self._made(b) for b in others)

    def _never_leaves(self) -> int:
        """Of what the update needs, what is on the GPU in every plan: adapters beside larger weights."""
        step = self._step
        stay = zip(step.trained, step.gradients, step.trained_travel, strict=True)
        return sum(trained + gradient for trained, gradient, along in stay if not along)

    def _made(self, block: int) -> float:
        """Of a block's gradient, what there is at this moment, of all micro-batches on average."""
        if self._on_host:
            return 0.0
        whole = self._step.gradients[block]
        return whole if block > self._at else whole * (self._micro - 1) / self._micro

    def _things(self) -> tuple[Thing, ...]:
        step, at = self._step, self._at
        found = [self._activations(b) for b in range(at)]
        found += [self._weights(b) for b in range(len(step.weights)) if b != at]
        state = float(sum(step.state))
        if self._stepping is Stepping.GPU:
            found.append((Way(gpu=state, late=state),))
        if self._stepping is Stepping.STREAMED:
            found.append((Way(update_up_s=state * self._up, update_down_s=state * self._update_down, host=state),))
        found.append(self._stay_or_go(step.table.idle_bytes, [Way()]))
        return tuple(found)

    def _weights(self, block: int) -> Thing:
        """Weights, with gradients if they are trained: on the GPU, or at home and fetched for every pass."""
        step, micro = self._step, self._micro
        earlier = block < self._at  # a later block's weights were used in this pass; the forward pass accounts for them
        up = micro * step.travels[block] * self._up if earlier else 0.0
        if not step.trained_travel[block]:
            return self._stay_or_go(step.travels[block], [Way(second_link_s=up)] if step.movable[block] else [])
        trained, gradient = step.trained[block], step.gradients[block]
        late = 0 if self._on_host else trained + gradient
        stay = Way(gpu=step.weights[block] + self._made(block), late=late)
        if not step.movable[block] or not step.rates.has_link:
            return (stay,)
        host = step.weights[block] + self._made(block)
        anew = (
            step.travels[block] * self._first_up
        )  # what was stepped is at home, and comes for the first pass at least
        if self._on_host:
            return replace(stay, update_up_s=trained * self._up), Way(anew, second_link_s=up, host=host)
        home = micro * gradient * (self._second_down if earlier else self._down)
        added = (micro - 1) * gradient * (self._up if earlier else self._first_up)
        to_add, back = (trained + gradient) * self._up, trained * self._update_down
        if earlier:
            return stay, Way(anew, 0.0, up + home + added, to_add, back, 0.0, host)
        return stay, Way(anew + home + added, 0.0, 0.0, to_add, back, 0.0, host)

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

    def _stay_or_go(self, nbytes: float, away: list[Way]) -> Thing:
        stay = Way(gpu=nbytes)
        if not self._step.rates.has_link:
            return (stay,)
        return (stay, *(replace(way, gpu=0.0, host=nbytes) for way in away))


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

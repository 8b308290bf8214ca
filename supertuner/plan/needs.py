"""How much memory a choice needs at every moment of a step, whatever the timing. Pure.

A step is a row of uses: forward through the blocks, backward through them, for every micro-batch, then the update. The
need of a use is what must be on the GPU while it computes: weights that live there, the ring of slots, what earlier
blocks left, activations on their way home or fetched ahead, its own activations and temporaries, gradients. Gradients
and pieces of an update that are on their way home come on top, and are waited for where there is no room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from supertuner.plan.choice import Choice, Step
from supertuner.plan.decision import Fate, Stepping
from supertuner.plan.rates import Limits


@dataclass(frozen=True, slots=True)
class Needs:
    """In bytes."""

    forward: list[int]
    """By block."""
    backward: list[int]
    update: int
    """Before any piece of state, or of weights at home, has come: gradients, what lives on the GPU, temporaries."""
    pieces: list[int]
    """By block, what comes to the GPU in the update and goes home again."""
    host: int

    @property
    def gpu(self) -> int:
        """The most that is needed at once; at least one piece must find room in the update."""
        return max(max(self.forward), max(self.backward), self.update + max(self.pieces))

    def fit(self, limits: Limits, one_pool: bool) -> bool:
        if one_pool:
            return self.gpu + self.host <= limits.gpu_bytes
        return self.gpu <= limits.gpu_bytes and self.host <= (limits.host_bytes or 0)


def needs(step: Step, choice: Choice) -> Needs:
    base = _base(step, choice)
    forward, backward = _passes(step, choice, base)
    return Needs(forward, backward, base + _update_extra(step, choice), _pieces(step, choice), _host(step, choice))


def _pieces(step: Step, choice: Choice) -> list[int]:
    if choice.stepping is Stepping.HOST:
        return [0] * len(step.weights)
    moves = choice.stepping is Stepping.STREAMED
    return [
        (state if moves else 0) + (trained + gradient if away else 0) if trained else 0
        for trained, gradient, state, away in zip(
            step.trained, step.gradients, step.state, choice.streamed, strict=True
        )
    ]


def _base(step: Step, choice: Choice) -> int:
    """What is on the GPU all the time."""
    table = step.table
    away = [w for w, streamed in zip(step.weights, choice.streamed, strict=True) if streamed]
    total = sum(step.weights) - sum(away) + table.batch_bytes
    total += (choice.ahead + 1) * max(away, default=0)
    total += 0 if choice.idle_at_home else table.idle_bytes
    return total + (sum(step.state) if choice.stepping is Stepping.GPU else 0)


def _passes(step: Step, choice: Choice, base: int) -> tuple[list[int], list[int]]:
    fates, count, ahead = choice.fates, len(step.weights), choice.ahead
    sent = [saved if fate is Fate.SEND else 0 for saved, fate in zip(step.saved, fates, strict=True)]
    lingering = [b for b in range(count) if sent[b]][-choice.at_once :]
    forward, backward = [0] * count, [0] * count
    below = flying = 0  # what blocks before this one left; and what of them is on its way home
    window: deque[int] = deque()
    for b, fate in enumerate(fates):
        near = max(0, b - ahead)
        coming = sum(sent[near:b])
        for j in lingering:
            if j < near:
                coming += sent[j]
        forward[b] = base + below + flying + step.in_forward[b]
        own = step.in_both[b] if fate is Fate.RECOMPUTE else step.in_backward[b]
        backward[b] = base + below + coming + own
        if fate is Fate.KEEP:
            below += step.saved[b]
        elif fate is Fate.RECOMPUTE:
            below += step.inputs[b]
        elif sent[b]:
            window.append(sent[b])
            flying += sent[b] - (window.popleft() if len(window) > choice.at_once else 0)
    _add_gradients(step, choice, forward, backward)
    return forward, backward


def _add_gradients(step: Step, choice: Choice, forward: list[int], backward: list[int]) -> None:
    """Those of earlier micro-batches, and as the backward pass makes them. To what is away it must be added: twice."""
    count = len(forward)
    staying = [0 if choice.gradient_leaves(b) else step.gradients[b] for b in range(count)]
    several = step.table.micro_batches > 1
    there = sum(staying) if several else 0
    for b in range(count):
        forward[b] += there
    for b in reversed(range(count)):
        there += 0 if several else staying[b]
        leaving = step.gradients[b] - staying[b]
        backward[b] += there + leaving * (2 if several else 1)


def _update_extra(step: Step, choice: Choice) -> int:
    """Gradients and temporaries. A step taken piece by piece has the temporaries of its largest piece."""
    if choice.stepping is Stepping.HOST:
        return 0
    share = 1.0
    if choice.stepping is Stepping.STREAMED or any(choice.streamed):
        share = max(step.shares)
    staying = sum(g for b, g in enumerate(step.gradients) if not choice.gradient_leaves(b))
    return staying + int(step.table.update_peak_bytes * share)


def _host(step: Step, choice: Choice) -> int:
    total = sum(w for w, streamed in zip(step.weights, choice.streamed, strict=True) if streamed)
    total += sum(s for s, fate in zip(step.saved, choice.fates, strict=True) if fate is Fate.SEND)
    total += step.table.idle_bytes if choice.idle_at_home else 0
    if choice.stepping is not Stepping.GPU:
        total += sum(step.state)
    total += sum(g for b, g in enumerate(step.gradients) if choice.gradient_leaves(b))
    if choice.stepping is Stepping.HOST:
        total += sum(t for t, streamed in zip(step.trained, choice.streamed, strict=True) if not streamed)
    return total

"""How much memory a choice needs at every moment of a step, whatever the timing. Pure.

A step is a row of uses: forward through the blocks, backward through them, for every micro-batch, then the update. The
need of a use is what must be on the GPU while it computes: weights that live there, the ring of slots, what earlier
blocks left, activations on their way home or fetched ahead, its own activations and temporaries, gradients. Gradients
on their way home come on top, and are waited for where there is no room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from supertuner.core.types import MIB
from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.plan import Fate, Stepping
from supertuner.plan.placement.throughput import Limits

PIECE_BYTES: Final = 256 * MIB
"""An update for which something comes to the GPU is done in pieces of whole parameters, of about this many bytes."""
PIECES: Final = 10
"""On the GPU at once: one is stepped, one comes, eight go home (`train.acting.homes.AT_ONCE`)."""


@dataclass(frozen=True, slots=True)
class Needs:
    """In bytes."""

    forward: list[int]
    """By block."""
    backward: list[int]
    update: int
    pieces: list[int]
    """By block, what comes to the GPU in the update. Not all at once: a block is several pieces."""
    host: int

    @property
    def gpu(self) -> int:
        """The most that is needed at once."""
        return max(max(self.forward), max(self.backward), self.update)

    def fit(self, limits: Limits, one_pool: bool) -> bool:
        if one_pool:
            return self.gpu + self.host <= limits.gpu_bytes
        return self.gpu <= limits.gpu_bytes and self.host <= (limits.host_bytes or 0)


def needs(step: Step, choice: Choice) -> Needs:
    base = _base(step, choice)
    forward, backward = _passes(step, choice, base)
    pieces = _pieces(step, choice)
    update = base + _update_extra(step, choice, pieces)
    return Needs(forward, backward, update, pieces, _host(step, choice))


def _pieces(step: Step, choice: Choice) -> list[int]:
    if choice.stepping is Stepping.HOST:
        return [0] * len(step.weights)
    home = zip(step.returning(choice), step.leaving_gradients(choice), step.state, strict=True)
    moves = choice.stepping is Stepping.STREAMED
    return [trained + gradient + (state if moves else 0) for trained, gradient, state in home]


def _base(step: Step, choice: Choice) -> int:
    """What is on the GPU all the time."""
    table = step.table
    away = [w for w, streamed in zip(step.travels, choice.streamed, strict=True) if streamed]
    total = sum(step.weights) - sum(away) + table.batch_bytes
    total += min(choice.ahead + 1, len(away)) * max(away, default=0)
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
    several = step.table.micro_batches > 1
    leaving = step.leaving_gradients(choice)
    there = sum(step.gradients) - sum(leaving) if several else 0
    for b in range(len(forward)):
        forward[b] += there
    for b in reversed(range(len(forward))):
        there += 0 if several else step.gradients[b] - leaving[b]
        backward[b] += there + leaving[b] * (2 if several else 1)


def _update_extra(step: Step, choice: Choice, pieces: Sequence[int]) -> int:
    """Gradients and temporaries. A step taken piece by piece has the temporaries of one piece, and several pieces."""
    if choice.stepping is Stepping.HOST:
        return 0
    staying = sum(step.gradients) - sum(step.leaving_gradients(choice))
    if not any(pieces):
        return staying + step.table.update_peak_bytes
    if not step.table.by_pieces:
        return staying + step.table.update_peak_bytes + sum(pieces)
    share = min(max(step.shares), PIECE_BYTES / sum(step.trained))
    moved = max(piece / trained for piece, trained in zip(pieces, step.trained, strict=True) if trained)
    together = min(sum(pieces), int(PIECES * min(PIECE_BYTES, max(step.trained)) * moved))
    return staying + int(step.table.update_peak_bytes * share) + together


def _host(step: Step, choice: Choice) -> int:
    total = sum(w for w, streamed in zip(step.travels, choice.streamed, strict=True) if streamed)
    total += sum(s for s, fate in zip(step.saved, choice.fates, strict=True) if fate is Fate.SEND)
    total += step.table.idle_bytes if choice.idle_at_home else 0
    if choice.stepping is not Stepping.GPU:
        total += sum(step.state)
    total += sum(step.leaving_gradients(choice))
    if choice.stepping is Stepping.HOST:
        total += sum(step.trained) - sum(step.returning(choice))
    return total

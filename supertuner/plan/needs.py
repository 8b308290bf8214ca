"""How much memory a choice needs at every moment of a step, whatever the timing. Pure.

A step is a row of uses: forward through the blocks, backward through them, for every micro-batch, then the update. The
need of a use is what must be on the GPU while it computes: weights that live there, the ring of slots, what earlier
blocks left, what was fetched ahead, its own activations and temporaries, gradients. What is on its way to host memory
comes on top, and is waited for where there is no room: it is not part of the need.
"""

from __future__ import annotations

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
    pieces = [
        (step.state[b] if choice.stepping is Stepping.STREAMED else 0)
        + (step.trained[b] if choice.streamed[b] and choice.stepping is not Stepping.HOST else 0)
        for b in range(len(step.weights))
    ]
    return Needs(forward, backward, base + _update_extra(step, choice), pieces, _host(step, choice))


def _base(step: Step, choice: Choice) -> int:
    """What is on the GPU all the time."""
    table = step.table
    away = [w for w, streamed in zip(step.weights, choice.streamed, strict=True) if streamed]
    total = sum(step.weights) - sum(away) + table.batch_bytes
    total += (choice.ahead + 1) * max(away, default=0)
    total += 0 if choice.idle_at_home else table.idle_bytes
    return total + (sum(step.state) if choice.stepping is Stepping.GPU else 0)


def _passes(step: Step, choice: Choice, base: int) -> tuple[list[int], list[int]]:
    table, fates, count = step.table, choice.fates, len(step.weights)
    on_host = choice.stepping is Stepping.HOST
    several = table.micro_batches > 1
    old = sum(step.gradients) if several and not on_host else 0
    left = [_left(step, b, fates[b]) for b in range(count)]
    forward, backward = [0] * count, [0] * count
    below = 0  # what blocks before this one left
    for b, block in enumerate(table.blocks):
        forward[b] = base + old + below + step.saved[b] + block.forward_peak_bytes
        peak = block.backward_peak_bytes
        if fates[b] is Fate.RECOMPUTE:
            peak = max(peak, block.forward_peak_bytes)
        coming = sum(step.saved[j] for j in range(max(0, b - choice.ahead), b) if fates[j] is Fate.SEND)
        backward[b] = base + old + below + coming + step.saved[b] + peak
        below += left[b]
    gradients = 0  # of blocks after this one, made in this pass
    for b in reversed(range(count)):
        if on_host:
            backward[b] += step.gradients[b]
        elif not several:
            gradients += step.gradients[b]
            backward[b] += gradients
    return forward, backward


def _left(step: Step, block: int, fate: Fate) -> int:
    """What a block's forward pass leaves on the GPU for its backward pass."""
    if fate is Fate.KEEP:
        return step.saved[block]
    return step.inputs[block] if fate is Fate.RECOMPUTE else 0


def _update_extra(step: Step, choice: Choice) -> int:
    """Gradients and temporaries. A step taken piece by piece has the temporaries of its largest piece."""
    if choice.stepping is Stepping.HOST:
        return 0
    share = 1.0
    if choice.stepping is Stepping.STREAMED:
        share = max(step.update_share(b) for b in range(len(step.weights)))
    return sum(step.gradients) + int(step.table.update_peak_bytes * share)


def _host(step: Step, choice: Choice) -> int:
    total = sum(w for w, streamed in zip(step.weights, choice.streamed, strict=True) if streamed)
    total += sum(s for s, fate in zip(step.saved, choice.fates, strict=True) if fate is Fate.SEND)
    total += step.table.idle_bytes if choice.idle_at_home else 0
    if choice.stepping is not Stepping.GPU:
        total += sum(step.state)
    if choice.stepping is Stepping.HOST:
        total += sum(step.gradients)
        total += sum(t for t, streamed in zip(step.trained, choice.streamed, strict=True) if not streamed)
    return total

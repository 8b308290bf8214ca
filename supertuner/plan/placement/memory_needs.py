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
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement
from supertuner.plan.placement.throughput import MemoryLimits

UPDATE_PIECE_BYTES: Final = 256 * MIB
"""An update for which something comes to the GPU is done in pieces of whole parameters, of about this many bytes."""
UPDATE_PIECES_ON_GPU: Final = 10
"""On the GPU at once: one is stepped, one comes, eight go home (`train.acting.homes.AT_ONCE`)."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """In bytes."""

    forward_bytes: list[int]
    """By block."""
    backward_bytes: list[int]
    update_bytes: int
    update_piece_bytes: list[int]
    """By block, what comes to the GPU in the update. Not all at once: a block is several pieces."""
    host_bytes: int

    @property
    def gpu_bytes(self) -> int:
        """The most that is needed at once."""
        return max(max(self.forward_bytes), max(self.backward_bytes), self.update_bytes)

    def fits(self, limits: MemoryLimits, one_pool: bool) -> bool:
        if one_pool:
            return self.gpu_bytes + self.host_bytes <= limits.gpu_bytes
        return self.gpu_bytes <= limits.gpu_bytes and self.host_bytes <= (limits.host_bytes or 0)


def compute_memory_needs(step: TimedStep, choice: PlacementChoice) -> MemoryNeeds:
    base = _resident_bytes(step, choice)
    forward, backward = _pass_bytes(step, choice, base)
    pieces = _update_piece_bytes(step, choice)
    update = base + _update_extra_bytes(step, choice, pieces)
    return MemoryNeeds(forward, backward, update, pieces, _host_bytes(step, choice))


def _update_piece_bytes(step: TimedStep, choice: PlacementChoice) -> list[int]:
    if choice.optimizer is OptimizerPlacement.HOST:
        return [0] * len(step.weight_bytes)
    offloaded = zip(
        step.streamed_trained_bytes(choice), step.offloaded_gradient_bytes(choice), step.state_bytes, strict=True
    )
    streams_state = choice.optimizer is OptimizerPlacement.STREAMED
    return [trained + gradient + (state if streams_state else 0) for trained, gradient, state in offloaded]


def _resident_bytes(step: TimedStep, choice: PlacementChoice) -> int:
    """What is on the GPU all the time."""
    table = step.table
    streamed_weights = [w for w, streamed in zip(step.streamable_bytes, choice.streamed, strict=True) if streamed]
    total = sum(step.weight_bytes) - sum(streamed_weights) + table.batch_bytes
    total += min(choice.ahead + 1, len(streamed_weights)) * max(streamed_weights, default=0)
    total += 0 if choice.idle_at_home else table.idle_bytes
    return total + (sum(step.state_bytes) if choice.optimizer is OptimizerPlacement.GPU else 0)


def _pass_bytes(step: TimedStep, choice: PlacementChoice, resident: int) -> tuple[list[int], list[int]]:
    policies, count, ahead = choice.activations, len(step.weight_bytes), choice.ahead
    sent = [
        saved if policy is ActivationPolicy.SEND else 0
        for saved, policy in zip(step.saved_bytes, policies, strict=True)
    ]
    lingering = [b for b in range(count) if sent[b]][-choice.max_sends_in_flight :]
    forward, backward = [0] * count, [0] * count
    left_by_earlier = in_flight = 0  # what blocks before this one left; and what of them is on its way home
    window: deque[int] = deque()
    for b, fate in enumerate(policies):
        first_prefetched = max(0, b - ahead)
        prefetched = sum(sent[first_prefetched:b])
        for j in lingering:
            if j < first_prefetched:
                prefetched += sent[j]
        forward[b] = resident + left_by_earlier + in_flight + step.forward_bytes[b]
        pass_bytes = step.recompute_bytes[b] if fate is ActivationPolicy.RECOMPUTE else step.backward_bytes[b]
        backward[b] = resident + left_by_earlier + prefetched + pass_bytes
        if fate is ActivationPolicy.KEEP:
            left_by_earlier += step.saved_bytes[b]
        elif fate is ActivationPolicy.RECOMPUTE:
            left_by_earlier += step.input_bytes[b]
        elif sent[b]:
            window.append(sent[b])
            in_flight += sent[b] - (window.popleft() if len(window) > choice.max_sends_in_flight else 0)
    _add_gradients(step, choice, forward, backward)
    return forward, backward


def _add_gradients(step: TimedStep, choice: PlacementChoice, forward: list[int], backward: list[int]) -> None:
    """Those of earlier micro-batches, and as the backward pass makes them. To what is away it must be added: twice."""
    accumulates = step.table.micro_batches > 1
    offloaded = step.offloaded_gradient_bytes(choice)
    on_gpu = sum(step.gradient_bytes) - sum(offloaded) if accumulates else 0
    for b in range(len(forward)):
        forward[b] += on_gpu
    for b in reversed(range(len(forward))):
        on_gpu += 0 if accumulates else step.gradient_bytes[b] - offloaded[b]
        backward[b] += on_gpu + offloaded[b] * (2 if accumulates else 1)


def _update_extra_bytes(step: TimedStep, choice: PlacementChoice, pieces: Sequence[int]) -> int:
    """Gradients and temporaries. A step taken piece by piece has the temporaries of one piece, and several pieces."""
    if choice.optimizer is OptimizerPlacement.HOST:
        return 0
    resident_gradients = sum(step.gradient_bytes) - sum(step.offloaded_gradient_bytes(choice))
    if not any(pieces):
        return resident_gradients + step.table.update_peak_bytes
    if not step.table.by_pieces:
        return resident_gradients + step.table.update_peak_bytes + sum(pieces)
    share = min(max(step.update_shares), UPDATE_PIECE_BYTES / sum(step.trained_bytes))
    moved_per_byte = max(piece / trained for piece, trained in zip(pieces, step.trained_bytes, strict=True) if trained)
    pieces_on_gpu = min(
        sum(pieces), int(UPDATE_PIECES_ON_GPU * min(UPDATE_PIECE_BYTES, max(step.trained_bytes)) * moved_per_byte)
    )
    return resident_gradients + int(step.table.update_peak_bytes * share) + pieces_on_gpu


def _host_bytes(step: TimedStep, choice: PlacementChoice) -> int:
    total = sum(w for w, streamed in zip(step.streamable_bytes, choice.streamed, strict=True) if streamed)
    total += sum(
        s for s, fate in zip(step.saved_bytes, choice.activations, strict=True) if fate is ActivationPolicy.SEND
    )
    total += step.table.idle_bytes if choice.idle_at_home else 0
    if choice.optimizer is not OptimizerPlacement.GPU:
        total += sum(step.state_bytes)
    total += sum(step.offloaded_gradient_bytes(choice))
    if choice.optimizer is OptimizerPlacement.HOST:
        total += sum(step.trained_bytes) - sum(step.streamed_trained_bytes(choice))
    return total

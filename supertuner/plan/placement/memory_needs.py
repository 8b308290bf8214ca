"""How much GPU and host memory a placement needs in each pass of each block, and in the update. Pure: no timing.

A step is a sequence of passes: forward through the blocks and backward through them, for every micro-batch, then the
update. What a pass needs is what must be in GPU memory while it computes:

    weights that stay on the GPU, and the slots that streamed weights are copied into
    activations that earlier blocks keep, activations still on their way to the host, activations fetched ahead
    the block's own activations and temporaries
    gradients

Gradients on their way to the host come on top of this. The simulation (`simulate.py`) waits for them where the GPU has
no memory left.
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

PER_PARAMETER_OPTIMIZERS: Final = ("adamw", "adamw8bit", "adafactor")
"""Optimizers whose step of one parameter does not depend on other parameters. Only these can update in pieces: the
others count steps, or estimate a value over all parameters together."""
UPDATE_PIECE_BYTES: Final = 256 * MIB
"""An update that copies anything to the GPU is done in pieces of whole parameters of about this many bytes."""
MAX_COPIES_IN_FLIGHT: Final = 8
"""Copies of gradients and optimizer state to host memory that may be in flight at the same time: each holds GPU memory
meanwhile."""
MIN_OFFLOAD_BYTES: Final = MIB
"""Smaller activations stay on the GPU: starting their copy takes longer than the copy."""
UPDATE_PIECES_ON_GPU: Final = MAX_COPIES_IN_FLIGHT + 2
"""Pieces on the GPU at once: one is updated, one arrives, the others leave (`train/offload/tensor_host_buffers.py`)."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a step needs under one placement."""

    forward_bytes: list[int]
    """GPU memory in the forward pass of each block."""
    backward_bytes: list[int]
    """GPU memory in the backward pass of each block."""
    update_bytes: int
    """GPU memory in the update."""
    update_piece_bytes: list[int]
    """By block, what is copied to the GPU for the update. Not all at once: a block is several pieces."""
    host_bytes: int

    @property
    def gpu_bytes(self) -> int:
        """The peak."""
        return max(max(self.forward_bytes), max(self.backward_bytes), self.update_bytes)

    def fits(self, limits: MemoryLimits, one_pool: bool) -> bool:
        """Whether both memories are large enough. Host memory of unknown size counts as none."""
        if one_pool:
            return self.gpu_bytes + self.host_bytes <= limits.gpu_bytes
        return self.gpu_bytes <= limits.gpu_bytes and self.host_bytes <= (limits.host_bytes or 0)


def compute_memory_needs(step: TimedStep, choice: PlacementChoice) -> MemoryNeeds:
    resident = _resident_bytes(step, choice)
    forward, backward = _pass_bytes(step, choice, resident)
    pieces = _update_piece_bytes(step, choice)
    update = resident + _update_extra_bytes(step, choice, pieces)
    return MemoryNeeds(forward, backward, update, pieces, _host_bytes(step, choice))


def _update_piece_bytes(step: TimedStep, choice: PlacementChoice) -> list[int]:
    if choice.optimizer is OptimizerPlacement.HOST:
        return [0] * len(step.weight_bytes)
    weights_and_gradients = zip(step.streamed_trained_bytes(choice), step.offloaded_gradient_bytes(choice), strict=True)
    state = step.state_bytes if choice.optimizer is OptimizerPlacement.STREAMED else [0] * len(step.state_bytes)
    return [trained + gradient + state[b] for b, (trained, gradient) in enumerate(weights_and_gradients)]


def _resident_bytes(step: TimedStep, choice: PlacementChoice) -> int:
    """What is in GPU memory during the whole step."""
    table = step.table
    streamed_weights = step.streamed_bytes(choice)
    total = sum(step.weight_bytes) - sum(streamed_weights) + table.batch_bytes
    # Streamed blocks share a ring of slots: the block that computes and `ahead` blocks that are being fetched. All
    # slots have the size of the largest streamed block.
    total += min(choice.ahead + 1, len(streamed_weights)) * max(streamed_weights, default=0)
    total += 0 if choice.idle_at_home else table.idle_bytes
    return total + (sum(step.state_bytes) if choice.optimizer is OptimizerPlacement.GPU else 0)


def _pass_bytes(step: TimedStep, choice: PlacementChoice, resident: int) -> tuple[list[int], list[int]]:
    """GPU memory in the forward and in the backward pass of each block."""
    count, sent = len(step.weight_bytes), step.sent_bytes(choice)
    # The last blocks that send may still be sending when the backward pass begins: nothing later pushed them out.
    still_sending = [b for b in range(count) if sent[b]][-choice.max_sends_in_flight :]
    forward, backward = [0] * count, [0] * count
    kept_by_earlier = in_flight = 0  # activations of earlier blocks: kept on the GPU, and on their way to the host
    sends: deque[int] = deque()
    for b, policy in enumerate(choice.activations):
        # In the backward pass of block b, activations of the `ahead` blocks before it have been fetched already.
        first_prefetched = max(0, b - choice.ahead)
        prefetched = sum(sent[first_prefetched:b]) + sum(sent[j] for j in still_sending if j < first_prefetched)
        forward[b] = resident + kept_by_earlier + in_flight + step.forward_bytes[b]
        pass_bytes = step.recompute_bytes[b] if policy is ActivationPolicy.RECOMPUTE else step.backward_bytes[b]
        backward[b] = resident + kept_by_earlier + prefetched + pass_bytes
        if policy is ActivationPolicy.KEEP:
            kept_by_earlier += step.saved_bytes[b]
        elif policy is ActivationPolicy.RECOMPUTE:
            kept_by_earlier += step.input_bytes[b]
        elif sent[b]:
            sends.append(sent[b])
            in_flight += sent[b] - (sends.popleft() if len(sends) > choice.max_sends_in_flight else 0)
    _add_gradients(step, choice, forward, backward)
    return forward, backward


def _add_gradients(step: TimedStep, choice: PlacementChoice, forward: list[int], backward: list[int]) -> None:
    """Add the gradients on the GPU: those of earlier micro-batches, and those that this backward pass has made so far.

    If gradients of a block accumulate in host memory, its backward pass has two copies on the GPU: the new gradients
    and the accumulated ones, which are fetched to add them.
    """
    accumulates = step.table.micro_batches > 1
    offloaded = step.offloaded_gradient_bytes(choice)
    on_gpu = sum(step.gradient_bytes) - sum(offloaded) if accumulates else 0
    for b in range(len(forward)):
        forward[b] += on_gpu
    for b in reversed(range(len(forward))):
        on_gpu += 0 if accumulates else step.gradient_bytes[b] - offloaded[b]
        backward[b] += on_gpu + offloaded[b] * (2 if accumulates else 1)


def _update_extra_bytes(step: TimedStep, choice: PlacementChoice, pieces: Sequence[int]) -> int:
    """GPU memory of the update beyond the resident bytes: gradients, temporaries, and the pieces that are copied in.

    An update in pieces has the temporaries of one piece, and up to `UPDATE_PIECES_ON_GPU` pieces at once.
    """
    if choice.optimizer is OptimizerPlacement.HOST:
        return 0
    resident_gradients = sum(step.gradient_bytes) - sum(step.offloaded_gradient_bytes(choice))
    if not any(pieces):
        return resident_gradients + step.table.update_peak_bytes
    if not step.table.by_pieces:
        return resident_gradients + step.table.update_peak_bytes + sum(pieces)
    share = min(max(step.update_shares), UPDATE_PIECE_BYTES / sum(step.trained_bytes))
    moved_per_byte = max(piece / trained for piece, trained in zip(pieces, step.trained_bytes, strict=True) if trained)
    largest_piece = min(UPDATE_PIECE_BYTES, max(step.trained_bytes))
    on_gpu = min(sum(pieces), int(UPDATE_PIECES_ON_GPU * largest_piece * moved_per_byte))
    return resident_gradients + int(step.table.update_peak_bytes * share) + on_gpu


def _host_bytes(step: TimedStep, choice: PlacementChoice) -> int:
    total = sum(step.streamed_bytes(choice)) + sum(step.sent_bytes(choice)) + sum(step.offloaded_gradient_bytes(choice))
    total += step.table.idle_bytes if choice.idle_at_home else 0
    total += 0 if choice.optimizer is OptimizerPlacement.GPU else sum(step.state_bytes)
    if choice.optimizer is OptimizerPlacement.HOST:  # the host updates its own copy of weights that stay on the GPU
        total += sum(step.trained_bytes) - sum(step.streamed_trained_bytes(choice))
    return total

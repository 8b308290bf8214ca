"""What planning works with: a step's figures in seconds and bytes, block by block, and one way of running it.

A `Choice` is a plan without its reasons and figures. All of this is pure and small, because a search tries thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.step_table import BlockCosts, StepTable
from supertuner.plan.placement.throughput import MachineRates


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    streamed: tuple[bool, ...]
    """Of each block, whether its weights are at home in host memory."""
    activations: tuple[ActivationPolicy, ...]
    ahead: int
    optimizer: OptimizerPlacement
    idle_at_home: bool

    @classmethod
    def all_on_gpu(cls, blocks: int) -> PlacementChoice:
        """Everything stays in GPU memory."""
        return cls((False,) * blocks, (ActivationPolicy.KEEP,) * blocks, 1, OptimizerPlacement.GPU, False)

    @classmethod
    def from_plan(cls, plan: MemoryPlan) -> PlacementChoice:
        return cls(
            tuple(block.weights is WeightPlacement.STREAMED for block in plan.blocks),
            tuple(block.activations for block in plan.blocks),
            plan.ahead,
            plan.stepping,
            plan.idle_at_home,
        )

    @property
    def max_sends_in_flight(self) -> int:
        """Blocks whose activations may be on their way home together; they take their place on the GPU until one more
        is sent, or their backward pass is over."""
        return max(1, self.ahead)

    def without_immediate_refetches(self) -> PlacementChoice:
        """The same, but activations that are fetched again the moment they were sent are kept instead.

        Block b is used b-th in the forward pass and (2n - 1 - b)-th in all: within `ahead` uses it would come back.
        """
        last = len(self.activations) - 1
        activations = tuple(
            ActivationPolicy.KEEP if fate is ActivationPolicy.SEND and 2 * (last - block) + 1 <= self.ahead else fate
            for block, fate in enumerate(self.activations)
        )
        return PlacementChoice(self.streamed, activations, self.ahead, self.optimizer, self.idle_at_home)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A table with its times on one machine: lists by block."""

    table: StepTable
    rates: MachineRates
    movable: Sequence[bool]
    """What stands around the blocks, `(before)` and `(after)`, is no module of its own: its weights stay, and so do its
    activations."""
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_bytes: Sequence[int]
    streamable_bytes: Sequence[int]
    """Of a block's weights, what is streamed if they are: an adapter beside larger frozen weights stays."""
    streams_trained: Sequence[bool]
    """Whether what is trained is among it."""
    trained_bytes: Sequence[int]
    gradient_bytes: Sequence[int]
    state_bytes: Sequence[int]
    saved_bytes: Sequence[int]
    input_bytes: Sequence[int]
    forward_bytes: Sequence[int]
    """What a block's own pass needs: its activations, and its temporaries."""
    backward_bytes: Sequence[int]
    recompute_bytes: Sequence[int]
    """… of a block that is recomputed."""
    update_shares: Sequence[float]
    """Of the optimizer's work, what is done for each block."""
    update_s: float

    @classmethod
    def from_table(cls, table: StepTable, rates: MachineRates) -> TimedStep:
        blocks = table.blocks
        assert blocks, f"{table.phase} has no blocks"
        trained = sum(block.trained_bytes for block in blocks)
        return cls(
            table=table,
            rates=rates,
            movable=[not block.name.startswith("(") for block in blocks],
            forward_s=[rates.seconds(block.forward) for block in blocks],
            backward_s=[rates.seconds(block.backward) for block in blocks],
            weight_bytes=[block.frozen_bytes + block.trained_bytes for block in blocks],
            streamable_bytes=[b.frozen_bytes + (b.trained_bytes if _streams_trained(b) else 0) for b in blocks],
            streams_trained=[_streams_trained(block) for block in blocks],
            trained_bytes=[block.trained_bytes for block in blocks],
            gradient_bytes=[block.gradient_bytes for block in blocks],
            state_bytes=[block.state_bytes for block in blocks],
            saved_bytes=[block.saved_bytes for block in blocks],
            input_bytes=[block.input_bytes for block in blocks],
            forward_bytes=[block.saved_bytes + block.forward_peak_bytes for block in blocks],
            backward_bytes=[block.saved_bytes + block.backward_peak_bytes for block in blocks],
            recompute_bytes=[b.saved_bytes + max(b.forward_peak_bytes, b.backward_peak_bytes) for b in blocks],
            update_shares=[block.trained_bytes / trained if trained else 1.0 / len(blocks) for block in blocks],
            update_s=rates.seconds(table.update),
        )

    def offloaded_gradient_bytes(self, choice: PlacementChoice) -> list[int]:
        """By block, gradients that are not on the GPU: they are with their weights, or with a host that steps."""
        if choice.optimizer is OptimizerPlacement.HOST:
            return list(self.gradient_bytes)
        rows = zip(self.gradient_bytes, choice.streamed, self.streams_trained, strict=True)
        return [gradient if streamed and along else 0 for gradient, streamed, along in rows]

    def streamed_trained_bytes(self, choice: PlacementChoice) -> list[int]:
        """By block, trained weights that come to be stepped on the GPU and go home again."""
        rows = zip(self.trained_bytes, choice.streamed, self.streams_trained, strict=True)
        return [trained if streamed and along else 0 for trained, streamed, along in rows]

    @property
    def micro_batch_s(self) -> float:
        """Forward and backward of one micro-batch, nothing recomputed."""
        return sum(self.forward_s) + sum(self.backward_s)

    @property
    def host_step_s(self) -> float:
        """How long the host steps, if the speed of its memory is known."""
        assert self.rates.host_bytes_s is not None, "a step on a host whose memory's speed is not known"
        return sum(self.host_step_bytes(b) for b in range(len(self.trained_bytes))) / self.rates.host_bytes_s

    def host_step_bytes(self, block: int) -> int:
        """Of host memory, what the CPU reads and writes to step a block: parameters and state both, gradients once."""
        return 2 * (self.trained_bytes[block] + self.state_bytes[block]) + self.gradient_bytes[block]


def _streams_trained(block: BlockCosts) -> bool:
    return block.trained_bytes > block.frozen_bytes

"""What planning works with: a step's figures in seconds and bytes, block by block, and one way of running it.

A `Choice` is a plan without its reasons and figures. All of this is pure and small, because a search tries thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supertuner.plan.placement.plan import Fate, Plan, Residence, Stepping
from supertuner.plan.placement.step_table import Block, StepTable
from supertuner.plan.placement.throughput import Rates


@dataclass(frozen=True, slots=True)
class Choice:
    streamed: tuple[bool, ...]
    """Of each block, whether its weights are at home in host memory."""
    fates: tuple[Fate, ...]
    ahead: int
    stepping: Stepping
    idle_at_home: bool

    @classmethod
    def nothing(cls, blocks: int) -> Choice:
        """Everything stays in GPU memory."""
        return cls((False,) * blocks, (Fate.KEEP,) * blocks, 1, Stepping.GPU, False)

    @classmethod
    def of(cls, plan: Plan) -> Choice:
        return cls(
            tuple(block.weights is Residence.STREAMED for block in plan.blocks),
            tuple(block.activations for block in plan.blocks),
            plan.ahead,
            plan.stepping,
            plan.idle_at_home,
        )

    @property
    def at_once(self) -> int:
        """Blocks whose activations may be on their way home together; they take their place on the GPU until one more
        is sent, or their backward pass is over."""
        return max(1, self.ahead)

    def settled(self) -> Choice:
        """The same, but activations that are fetched again the moment they were sent are kept instead.

        Block b is used b-th in the forward pass and (2n - 1 - b)-th in all: within `ahead` uses it would come back.
        """
        last = len(self.fates) - 1
        fates = tuple(
            Fate.KEEP if fate is Fate.SEND and 2 * (last - block) + 1 <= self.ahead else fate
            for block, fate in enumerate(self.fates)
        )
        return Choice(self.streamed, fates, self.ahead, self.stepping, self.idle_at_home)


@dataclass(frozen=True, slots=True)
class Step:
    """A table with its times on one machine: lists by block."""

    table: StepTable
    rates: Rates
    movable: Sequence[bool]
    """What stands around the blocks, `(before)` and `(after)`, is no module of its own: its weights stay, and so do its
    activations."""
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weights: Sequence[int]
    travels: Sequence[int]
    """Of a block's weights, what is streamed if they are: an adapter beside larger frozen weights stays."""
    trained_travel: Sequence[bool]
    """Whether what is trained is among it."""
    trained: Sequence[int]
    gradients: Sequence[int]
    state: Sequence[int]
    saved: Sequence[int]
    inputs: Sequence[int]
    in_forward: Sequence[int]
    """What a block's own pass needs: its activations, and its temporaries."""
    in_backward: Sequence[int]
    in_both: Sequence[int]
    """… of a block that is recomputed."""
    shares: Sequence[float]
    """Of the optimizer's work, what is done for each block."""
    update_s: float

    @classmethod
    def of(cls, table: StepTable, rates: Rates) -> Step:
        blocks = table.blocks
        assert blocks, f"{table.phase} has no blocks"
        trained = sum(block.trained_bytes for block in blocks)
        return cls(
            table=table,
            rates=rates,
            movable=[not block.name.startswith("(") for block in blocks],
            forward_s=[rates.seconds(block.forward) for block in blocks],
            backward_s=[rates.seconds(block.backward) for block in blocks],
            weights=[block.frozen_bytes + block.trained_bytes for block in blocks],
            travels=[b.frozen_bytes + (b.trained_bytes if _along(b) else 0) for b in blocks],
            trained_travel=[_along(block) for block in blocks],
            trained=[block.trained_bytes for block in blocks],
            gradients=[block.gradient_bytes for block in blocks],
            state=[block.state_bytes for block in blocks],
            saved=[block.saved_bytes for block in blocks],
            inputs=[block.input_bytes for block in blocks],
            in_forward=[block.saved_bytes + block.forward_peak_bytes for block in blocks],
            in_backward=[block.saved_bytes + block.backward_peak_bytes for block in blocks],
            in_both=[b.saved_bytes + max(b.forward_peak_bytes, b.backward_peak_bytes) for b in blocks],
            shares=[block.trained_bytes / trained if trained else 1.0 / len(blocks) for block in blocks],
            update_s=rates.seconds(table.update),
        )

    def leaving_gradients(self, choice: Choice) -> list[int]:
        """By block, gradients that are not on the GPU: they are with their weights, or with a host that steps."""
        if choice.stepping is Stepping.HOST:
            return list(self.gradients)
        away = zip(self.gradients, choice.streamed, self.trained_travel, strict=True)
        return [gradient if streamed and along else 0 for gradient, streamed, along in away]

    def returning(self, choice: Choice) -> list[int]:
        """By block, trained weights that come to be stepped on the GPU and go home again."""
        away = zip(self.trained, choice.streamed, self.trained_travel, strict=True)
        return [trained if streamed and along else 0 for trained, streamed, along in away]

    @property
    def micro_s(self) -> float:
        """Forward and backward of one micro-batch, nothing recomputed."""
        return sum(self.forward_s) + sum(self.backward_s)

    @property
    def host_step_s(self) -> float:
        """How long the host steps, if the speed of its memory is known."""
        assert self.rates.host_bytes_s is not None, "a step on a host whose memory's speed is not known"
        return sum(self.host_step_bytes(b) for b in range(len(self.trained))) / self.rates.host_bytes_s

    def host_step_bytes(self, block: int) -> int:
        """Of host memory, what the CPU reads and writes to step a block: parameters and state both, gradients once."""
        return 2 * (self.trained[block] + self.state[block]) + self.gradients[block]


def _along(block: Block) -> bool:
    return block.trained_bytes > block.frozen_bytes

"""The working data of the placement search: a step's costs in seconds and bytes by block, and one way to run it.

A `PlacementChoice` is a plan without reasons and figures. Both are small and pure, because a search tries thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.plan.placement.step_table import BlockCosts, StepTable
from supertuner.plan.placement.throughput import MachineRates


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    streamed: tuple[bool, ...]
    """For each block, whether its weights are kept in host memory."""
    activations: tuple[ActivationPolicy, ...]
    ahead: int
    optimizer: OptimizerPlacement
    idle_at_home: bool

    @classmethod
    def all_on_gpu(cls, blocks: int) -> PlacementChoice:
        """Everything stays in GPU memory, nothing is recomputed."""
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
        """Blocks whose activations may be on their way to the host at once. Their GPU memory is freed when one more
        block sends, or after their backward pass."""
        return max(1, self.ahead)

    def without_immediate_refetches(self) -> PlacementChoice:
        """The same choice, but activations that would be fetched as soon as they were sent are kept instead.

        Of the 2n passes of a micro-batch, block b has number b (forward) and 2n - 1 - b (backward). If they are no more
        than `ahead` passes apart, the prefetch of the backward pass would start right after the forward pass.
        """
        first = max(0, len(self.activations) - (self.ahead + 1) // 2)
        last_blocks = (ActivationPolicy.KEEP if p is ActivationPolicy.SEND else p for p in self.activations[first:])
        return replace(self, activations=(*self.activations[:first], *last_blocks))


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step table with its modelled times on one machine, as lists by block."""

    table: StepTable
    rates: MachineRates
    movable: Sequence[bool]
    """False for `(before)` and `(after)`, which are not modules: their weights and activations stay on the GPU."""
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_bytes: Sequence[int]
    streamable_bytes: Sequence[int]
    """Bytes of a block's weights that streaming moves: an adapter stays on the GPU if the frozen weights are larger."""
    streams_trained: Sequence[bool]
    """Whether streaming a block moves its trained parameters too."""
    trained_bytes: Sequence[int]
    gradient_bytes: Sequence[int]
    state_bytes: Sequence[int]
    saved_bytes: Sequence[int]
    input_bytes: Sequence[int]
    forward_bytes: Sequence[int]
    """A block's own activations and the peak of its temporaries, in the forward pass."""
    backward_bytes: Sequence[int]
    """The same in the backward pass."""
    recompute_bytes: Sequence[int]
    """The same in the backward pass if the block is recomputed."""
    update_shares: Sequence[float]
    """For each block its fraction of the optimizer's work; they add up to 1."""
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

    @property
    def optimizer_placements(self) -> list[OptimizerPlacement]:
        """Where the optimizer can step on this machine."""
        if not self.rates.has_link or not any(self.trained_bytes):
            return [OptimizerPlacement.GPU]
        host_known = self.rates.host_bytes_s is not None
        return [one for one in OptimizerPlacement if host_known or one is not OptimizerPlacement.HOST]

    @property
    def block_numbers(self) -> range:
        return range(len(self.weight_bytes))

    def sent_bytes(self, choice: PlacementChoice) -> list[int]:
        """By block, activations that are copied to the host and back."""
        rows = zip(self.saved_bytes, choice.activations, strict=True)
        return [saved if policy is ActivationPolicy.SEND else 0 for saved, policy in rows]

    def streamed_bytes(self, choice: PlacementChoice) -> list[int]:
        """The weights of each block that streams them; other blocks are left out."""
        rows = zip(self.streamable_bytes, choice.streamed, strict=True)
        return [weights for weights, streamed in rows if streamed]

    def offloaded_gradient_bytes(self, choice: PlacementChoice) -> list[int]:
        """By block, gradients that are kept in host memory: with streamed weights, or because the host steps."""
        if choice.optimizer is OptimizerPlacement.HOST:
            return list(self.gradient_bytes)
        rows = zip(self.gradient_bytes, choice.streamed, self.streams_trained, strict=True)
        return [gradient if streamed and with_trained else 0 for gradient, streamed, with_trained in rows]

    def streamed_trained_bytes(self, choice: PlacementChoice) -> list[int]:
        """By block, trained weights that are kept in host memory and copied to the GPU and back for the update."""
        rows = zip(self.trained_bytes, choice.streamed, self.streams_trained, strict=True)
        return [trained if streamed and with_trained else 0 for trained, streamed, with_trained in rows]

    @property
    def micro_batch_s(self) -> float:
        """Forward and backward pass of one micro-batch, without recomputation."""
        return sum(self.forward_s) + sum(self.backward_s)

    def passes_s(self, activations: Iterable[ActivationPolicy]) -> float:
        """All forward and backward passes of a window, with recomputation."""
        rows = zip(self.forward_s, activations, strict=True)
        recompute_s = sum(seconds for seconds, policy in rows if policy is ActivationPolicy.RECOMPUTE)
        return self.table.micro_batches * (self.micro_batch_s + recompute_s)

    @property
    def host_step_s(self) -> float:
        """Time of the optimizer's step on the host, which its memory bandwidth limits."""
        assert self.rates.host_bytes_s is not None, "the bandwidth of host memory is unknown"
        return self.host_step_bytes / self.rates.host_bytes_s

    @property
    def host_step_bytes(self) -> int:
        """Host memory traffic of that step: parameters and state are read and written, gradients are read."""
        return 2 * (sum(self.trained_bytes) + sum(self.state_bytes)) + sum(self.gradient_bytes)


def recompute_where_possible(blocks: Iterable[BlockCosts]) -> tuple[ActivationPolicy, ...]:
    return tuple(ActivationPolicy.RECOMPUTE if block.recomputable else ActivationPolicy.KEEP for block in blocks)


def _streams_trained(block: BlockCosts) -> bool:
    return block.trained_bytes > block.frozen_bytes

"""A step in one table, block by block: what a plan is made from, whoever knew it (a trace, or a test's own hand).

A block is a piece of the denoiser that runs as a whole and can be recomputed as a whole; what runs before the first and
after the last is a block too. Figures are of one micro-batch in which every activation is kept: what recomputing or
sending away would change is worked out from them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """What operators do, whatever machine they do it on."""

    matmul_flops: float = 0.0
    """Of matrix products and attention: what tensor cores do, in the precision of the run."""
    other_flops: float = 0.0
    gpu_bytes: float = 0.0
    """Read and written in the memory that the GPU computes from, each operator by itself."""
    operators: int = 0

    def __add__(self, other: OperatorWork) -> OperatorWork:
        return OperatorWork(
            self.matmul_flops + other.matmul_flops,
            self.other_flops + other.other_flops,
            self.gpu_bytes + other.gpu_bytes,
            self.operators + other.operators,
        )


@dataclass(frozen=True, slots=True)
class BlockCosts:
    name: str
    """As in the module: `blocks.7`; `(before)` and `(after)` for what no block holds."""
    frozen_bytes: int
    """Weights that are not trained."""
    trained_bytes: int
    """Parameters that are."""
    gradient_bytes: int
    state_bytes: int
    """What the optimizer keeps about them, with averages."""
    saved_bytes: int
    """Activations that the forward pass leaves for the backward pass, if nothing is recomputed."""
    input_bytes: int
    """What recomputing the block would start from and must stay then; among what is saved, or instead of it."""
    forward: OperatorWork
    backward: OperatorWork
    """Without recomputation."""
    forward_peak_bytes: int
    """The most that its forward pass takes at once beyond what it and the blocks before it save."""
    backward_peak_bytes: int
    """The same of its backward pass, with what they saved still there."""
    recomputable: bool = True
    """Whether it can be run again in the backward pass, as a whole."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """One optimizer step of one expert."""

    phase: str
    """`train high_noise`."""
    blocks: tuple[BlockCosts, ...]
    """In the order of the forward pass."""
    batch_bytes: int
    """Of one micro-batch."""
    micro_batches: int
    """In the largest window of the run."""
    update: OperatorWork
    """Clipping, the optimizer's step and averages, once a window."""
    update_peak_bytes: int
    """Of tensors that live within it only, the most at once."""
    idle_bytes: int = 0
    """Weights, gradients' and optimizer's bytes of experts that are not in training in this phase."""
    by_pieces: bool = True
    """Whether the optimizer can step some parameters before others. Where it cannot, what comes to the GPU for its step
    comes all at once."""

    @property
    def weight_bytes(self) -> int:
        return sum(block.frozen_bytes + block.trained_bytes for block in self.blocks)

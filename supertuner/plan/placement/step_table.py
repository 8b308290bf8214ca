"""One optimizer step as a table of costs by block: the input of planning. Built from a trace, or by hand in tests.

A block is a part of the denoiser that runs as a whole and can be recomputed as a whole, usually a transformer block;
what runs before the first and after the last one is a block too. Figures are for one micro-batch in which every
activation is kept; the effect of recomputing or offloading is derived from them.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """The work of some operators, independent of the machine."""

    matmul_flops: float = 0.0
    """Operations of matrix products and attention, which tensor cores compute in the precision of the run."""
    other_flops: float = 0.0
    gpu_bytes: float = 0.0
    """Bytes that operators read from and write to GPU memory, without reuse between operators."""
    operators: int = 0

    def __add__(self, other: OperatorWork) -> OperatorWork:
        return OperatorWork(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: OperatorWork) -> OperatorWork:
        return OperatorWork(*map(operator.sub, astuple(self), astuple(other)))

    def __mul__(self, repeats: int) -> OperatorWork:
        return OperatorWork(*(figure * repeats for figure in astuple(self)))


@dataclass(frozen=True, slots=True)
class BlockCosts:
    name: str
    """As in the module: `blocks.7`; `(before)` and `(after)` for operators outside all blocks."""
    frozen_bytes: int
    """Frozen weights."""
    trained_bytes: int
    """Trained parameters."""
    gradient_bytes: int
    state_bytes: int
    """Optimizer state and EMA weights of the trained parameters."""
    saved_bytes: int
    """Activations that the forward pass saves for the backward pass, without recomputation."""
    input_bytes: int
    """Inputs of the block that must be kept if it is recomputed: they are kept instead of the saved activations."""
    forward: OperatorWork
    backward: OperatorWork
    """Without recomputation."""
    forward_peak_bytes: int
    """Peak of its forward pass beyond what it and the blocks before it save."""
    backward_peak_bytes: int
    """Peak of its backward pass beyond the same, with all of it still in memory."""
    recomputable: bool = True
    """Whether the backward pass can run the block's forward pass again."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """One optimizer step of one expert, with `micro_batches` forward and backward passes."""

    phase: str
    """`train high_noise`."""
    blocks: tuple[BlockCosts, ...]
    """In the order of the forward pass."""
    batch_bytes: int
    """The tensors of one micro-batch."""
    micro_batches: int
    """Micro-batches of the largest window of the run."""
    update: OperatorWork
    """Gradient clipping, the optimizer's step and EMA, once per window."""
    update_peak_bytes: int
    """Peak of the temporaries of the update."""
    idle_bytes: int = 0
    """Weights and optimizer state of experts that are not trained in this phase."""
    by_pieces: bool = True
    """Whether the optimizer can step some parameters before others. If not, everything that is copied to the GPU for
    the step is there at once."""

    @property
    def weight_bytes(self) -> int:
        return sum(block.frozen_bytes + block.trained_bytes for block in self.blocks)

"""What a plan says: for each block and class of tensor where it lives, what is fetched when, and why.

A plan decides about time and memory, never about values: whatever it says, a step computes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WeightPlacement(StrEnum):
    """Where the weights of a block live."""

    GPU = "gpu"
    """In the GPU's memory, for good."""
    STREAMED = "streamed"
    """At home in host memory; copied into a slot of GPU memory ahead of each use and dropped after it. Frozen weights
    need no way back."""


class ActivationPolicy(StrEnum):
    """What becomes of a block's activations between its forward and its backward pass."""

    KEEP = "keep"
    SEND = "send"
    """To host memory behind the computation, and back ahead of the backward pass."""
    RECOMPUTE = "recompute"


class OptimizerPlacement(StrEnum):
    """Where the optimizer's state lives and steps."""

    GPU = "gpu"
    STREAMED = "streamed"
    """State at home in host memory, brought to the GPU piece by piece."""
    HOST = "host"
    """Gradients go to the host, which steps; weights come back."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    name: str
    weights: WeightPlacement
    activations: ActivationPolicy
    reason: str


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """What the plan's step would take by the model. Never measured."""

    seconds: float
    bound_s: float
    """No plan takes less."""
    bounded_by: str
    """`compute`, `gpu memory`, `link to gpu`, `link to host`, `host memory`."""
    gpu_peak_bytes: int
    host_peak_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    phase: str
    machine: str
    fits: bool
    blocks: tuple[BlockPlan, ...]
    ahead: int
    """How many blocks before its use a streamed block is fetched; there are `ahead` + 1 slots."""
    stepping: OptimizerPlacement
    idle_at_home: bool
    """Whether experts that are not in training wait in host memory."""
    modelled: PlanEstimate | None
    """None: a figure of the machine that it needs is not known."""
    reasons: tuple[str, ...] = ()

    @property
    def keeps_all_on_gpu(self) -> bool:
        """Everything stays in GPU memory, nothing is recomputed: a plan that costs nothing."""
        return (
            not self.idle_at_home
            and self.stepping is OptimizerPlacement.GPU
            and all(b.weights is WeightPlacement.GPU and b.activations is ActivationPolicy.KEEP for b in self.blocks)
        )

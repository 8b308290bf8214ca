"""A memory plan as data: for each block, where its weights and activations are kept, how far ahead they are fetched,
and why.

A plan changes the time and the memory of a step, never its values: every plan computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from supertuner.core.types import JSON


class WeightPlacement(StrEnum):
    """Where the weights of a block are kept."""

    GPU = "gpu"
    """In GPU memory while its expert is trained."""
    STREAMED = "streamed"
    """In host memory; copied into a slot of GPU memory ahead of each use. After the use the slot is reused: frozen
    weights are not copied back."""


class ActivationPolicy(StrEnum):
    """What happens to a block's activations between its forward and its backward pass."""

    KEEP = "keep"
    """They stay in GPU memory."""
    SEND = "send"
    """They are copied to host memory during the forward pass, and fetched ahead of the block's backward pass."""
    RECOMPUTE = "recompute"
    """They are freed; the backward pass runs the block's forward pass again (gradient checkpointing)."""


class OptimizerPlacement(StrEnum):
    """Where the optimizer's state is kept, and which processor steps."""

    GPU = "gpu"
    STREAMED = "streamed"
    """State in host memory, copied to the GPU piece by piece for the step."""
    HOST = "host"
    """State in host memory; gradients are copied to the host, the CPU steps, and weights are copied back."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    name: str
    weights: WeightPlacement
    activations: ActivationPolicy
    reason: str


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Modelled time and memory of a step under the plan. Never measured."""

    seconds: float
    bound_s: float
    """Lower bound: no plan takes less."""
    bounded_by: str
    """`compute`, `gpu memory`, `link to gpu`, `link to host`, `host memory`."""
    gpu_peak_bytes: int
    """Peak of the bytes that live tensors occupy on the GPU."""
    host_peak_bytes: int
    gpu_reserved_bytes: int | None = None
    """Peak of what torch's caching allocator reserves for them, gaps included: this must fit. None: not modelled."""

    @property
    def gpu_bytes(self) -> int:
        """What the step takes of the GPU: the reserved bytes, if they are modelled."""
        return max(self.gpu_peak_bytes, self.gpu_reserved_bytes or 0)

    @property
    def gap_bytes(self) -> int:
        """What is reserved beyond the live bytes."""
        return self.gpu_bytes - self.gpu_peak_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    phase: str
    machine: str
    fits: bool
    blocks: tuple[BlockPlan, ...]
    ahead: int
    """How many blocks ahead of its use a streamed block is fetched; there are `ahead` + 1 slots."""
    stepping: OptimizerPlacement
    idle_at_home: bool
    """Whether experts that are not being trained are kept in host memory."""
    modelled: PlanEstimate | None
    """Modelled time and memory of a step. None: a rate of the machine is unknown, or a setting has changed the plan
    since it was modelled."""
    reasons: tuple[str, ...] = ()

    @property
    def keeps_all_on_gpu(self) -> bool:
        """True: everything stays in GPU memory and nothing is recomputed, so the plan costs no time."""
        return (
            not self.idle_at_home
            and self.stepping is OptimizerPlacement.GPU
            and all(b.weights is WeightPlacement.GPU and b.activations is ActivationPolicy.KEEP for b in self.blocks)
        )

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values. JSON has no infinity: the time of a plan that does not fit is None."""
        plan: dict[str, JSON] = _without_infinities(asdict(self))
        return plan


ReservedBytesModel: TypeAlias = Callable[[MemoryPlan, int | None], int | None]
"""(plan, GPU memory or None for unlimited) → the peak of what the caching allocator reserves for a step under the plan;
None: the step runs out of memory (`plan/trace/planned_allocation.py`)."""


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinities(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

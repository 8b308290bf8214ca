"""Settings of the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.block import TRAINER, Block, Remark


class TrainSettings(Block):
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Samples in one micro-batch of one process."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1), TRAINER] = 1
    """Micro-batches per optimizer step and process."""
    max_steps: Annotated[int | None, Field(ge=1), TRAINER] = None
    """Optimizer steps after which training ends."""
    num_epochs: Annotated[int | None, Field(ge=1), TRAINER] = None
    """Passes over the data after which training ends; not together with `max_steps`."""
    mixed_precision: Annotated[Literal["bf16", "fp16", "fp32"], TRAINER] = "bf16"
    """Number format of the forward and backward pass."""
    gradient_checkpointing: Annotated[bool, TRAINER] = False
    """Recompute activations in the backward pass instead of keeping them."""
    max_grad_norm: Annotated[float | None, Field(gt=0), TRAINER] = None
    """Gradients with a larger norm are scaled down to it; unset: no clipping."""

    def contradictions(self) -> Iterator[Remark]:
        if self.max_steps is not None and self.num_epochs is not None:
            yield Remark("num_epochs", "give max_steps or num_epochs, not both", ("max_steps",))

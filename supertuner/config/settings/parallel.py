"""Settings of many processes that train one run together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock


class ParallelSettings(SettingsBlock):
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How processes share the work: "ddp": each has the whole model, and gradients are added up; "fsdp": each has a
    part of the weights, and a block's are brought together while it is computed; "auto": what the launcher says,
    otherwise "ddp"."""
    cpu_offload: bool = False
    """fsdp: weights, gradients and the optimizer's state wait in host memory, and the CPU steps."""
    reshard_after_forward: bool = True
    """fsdp: let go of a block's weights between its forward and backward pass; false: hold them, and gather once."""
    reduce_every_batch: bool = False
    """fsdp, all weights trained: add up gradients after each micro-batch, so that a process keeps only its part of
    them; false: once in a window, until when each has them whole."""
    timeout_s: Annotated[float, Field(ge=1)] = 600
    """How long processes wait for one that is gone, stopped or hanging, until the job ends and says which it was."""

"""Settings of distributed training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock


class ParallelSettings(SettingsBlock):
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How ranks share the work. "ddp": each has the whole model, and gradients are all-reduced. "fsdp": each has a
    shard of the weights, and the weights of a block are gathered while it computes (FSDP2). "auto": as the launcher
    selects, else "ddp"."""
    cpu_offload: bool = False
    """fsdp: keep weights, gradients and optimizer state in host memory; the CPU computes the optimizer step. Refused
    where CPU and GPU share one memory."""
    reshard_after_forward: bool = True
    """fsdp: free the gathered weights of a block between its forward and backward pass. false: keep them, and gather
    them only once."""
    reduce_every_batch: bool = False
    """fsdp with full training: reduce-scatter gradients after each micro-batch, so that each rank keeps only its shard.
    false: once per window; until then each rank keeps full gradients."""
    timeout_s: Annotated[float, Field(ge=1)] = 600
    """How long ranks wait for one that has exited, stopped or hangs. Then the job ends and reports which one it was."""

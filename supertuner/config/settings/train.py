"""Settings of the training loop, its checkpoints, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, name_or_folder

_DEVICES = r"^(auto|cpu|(cuda|xpu|mps|npu|hpu)(:[0-9]{1,4})?)$"
_DEVICE = {"allowed": '"auto", or a device such as "cpu", "cuda" or "cuda:1"'}


_NAME = {"allowed": "text of letters, digits, spaces and . _ - that starts with a letter or digit"}


class RunSettings(SettingsBlock):
    name: Annotated[
        str | None, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$", json_schema_extra=_NAME)
    ] = None
    """Name of the run, and of its folder below `output_dir`; unset: the file's name and a digest of its settings."""
    output_dir: Path = Path("runs")
    """Folder that holds run folders; made when needed."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Order of samples, augmentation and captions are pure functions of this number, the epoch and the sample."""


class TrainSettings(SettingsBlock):
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Samples in one micro-batch of one process."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per optimizer step and process."""
    max_steps: Annotated[int | None, Field(ge=1)] = None
    """Optimizer steps after which training ends; together with `num_epochs`, whichever is reached first."""
    num_epochs: Annotated[int | None, Field(ge=1)] = None
    """Passes over the data after which training ends; unset, and no `max_steps` either: one."""
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Number format of the forward and backward pass; what is trained is kept in fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    max_grad_norm: Annotated[float | None, Field(gt=0)] = None
    """Gradients with a larger norm are scaled down to it; unset: no clipping."""
    ema_decay: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Keep an exponential moving average of what is trained, with this decay; it is what is validated and exported."""
    max_nonfinite: Annotated[int, Field(ge=1)] = 3
    """Stop after so many windows in a row whose loss or gradient is not finite; such a window changes no weight."""
    device: Annotated[str, Field(pattern=_DEVICES, json_schema_extra=_DEVICE)] = "auto"
    """Where to compute: a GPU if there is one ("auto"), or a device by its name in PyTorch."""


class CheckpointSettings(SettingsBlock):
    every_steps: Annotated[int, Field(ge=0)] = 500
    """Optimizer steps between checkpoints; 0: only at the end, on request and on a signal."""
    keep: Annotated[int, Field(ge=1)] = 3
    """How many of the last checkpoints are kept."""
    in_background: bool = True
    """Copy what is saved into host memory and write it while training goes on; training waits where the copy has no
    room."""
    resume: Annotated[str, Field(min_length=1, json_schema_extra=name_or_folder("latest", "never"))] = "latest"
    """What a run that is started again goes on from: "latest", a checkpoint's folder, or "never": it must be new."""


class ReportSettings(SettingsBlock):
    tensorboard: bool = True
    """Write TensorBoard files into the run's folder."""
    wandb: Annotated[str | None, Field(min_length=1)] = None
    """Report to this project of Weights & Biases; needs the package wandb."""
    every_steps: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two points of TensorBoard and wandb; the run's own log has every step."""
    memory_every_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps between two samples of the machine's memory; 0: none."""

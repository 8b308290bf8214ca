"""Settings of the run, the training loop, checkpoints, exports and reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue, name_or_folder

_DEVICES = r"^(auto|cpu|(cuda|xpu|mps|npu|hpu)(:[0-9]{1,4})?)$"
_DEVICE = {"allowed": '"auto", or a device such as "cpu", "cuda" or "cuda:1"'}
_REPOSITORIES = r"^[A-Za-z0-9_]+([.-][A-Za-z0-9_]+)*/[A-Za-z0-9_]+([.-][A-Za-z0-9_]+)*$"
_REPOSITORY = {"allowed": 'OWNER/NAME, such as "someone/my-lora": letters, digits, and single . _ - between them'}
_LICENSES = r"^[a-z0-9][a-z0-9.+_-]*$"
_LICENSE = {"allowed": 'the hub\'s name of a licence, such as "apache-2.0", "cc-by-nc-4.0" or "other"'}


_NAME = {"allowed": "text of letters, digits, spaces and . _ - that starts with a letter or digit"}


class RunSettings(SettingsBlock):
    name: Annotated[
        str | None, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$", json_schema_extra=_NAME)
    ] = None
    """Name of the run and of its folder below `output_dir`. Unset: name of the configuration file and a digest of the
    settings."""
    output_dir: Path = Path("runs")
    """Folder that contains the run folders; created if missing."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Random seed. The order of samples, augmentations and choices of captions are pure functions of it, the epoch and
    the sample."""


class TrainSettings(SettingsBlock):
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Samples per micro-batch and rank."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per optimizer step and rank."""
    max_steps: Annotated[int | None, Field(ge=1)] = None
    """Optimizer steps after which training ends. If `num_epochs` is also set, the first to be reached counts."""
    num_epochs: Annotated[int | None, Field(ge=1)] = None
    """Epochs after which training ends. If neither this nor `max_steps` is set: 1."""
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Number format of the forward and backward pass; trained weights are kept in fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them in memory."""
    max_grad_norm: Annotated[float | None, Field(gt=0)] = None
    """Clip gradients to this norm. Unset: no clipping."""
    max_grad_value: Annotated[float | None, Field(gt=0)] = None
    """Clip each element of the gradients to this absolute value. Unset: no clipping. Not together with
    `max_grad_norm`."""
    ema_decay: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Decay of an exponential moving average of the trained weights, which is then validated and exported. Unset: no
    average."""
    max_nonfinite: Annotated[int, Field(ge=1)] = 3
    """Stop after this many consecutive windows with a loss or gradient that is not finite. Such a window changes no
    weight."""
    device: Annotated[str, Field(pattern=_DEVICES, json_schema_extra=_DEVICE)] = "auto"
    """PyTorch device. "auto": a GPU if there is one, else the CPU."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            yield SettingsIssue("max_grad_value", "and max_grad_norm are both set: remove one", ("max_grad_norm",))


class CheckpointSettings(SettingsBlock):
    every_steps: Annotated[int, Field(ge=0)] = 500
    """Optimizer steps between checkpoints. 0: only at the end, on request and on a signal."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Number of most recent checkpoints to keep."""
    in_background: bool = True
    """Copy the state to host memory and write it while training continues. Training waits if host memory is too small
    for the copy."""
    resume: Annotated[str, Field(min_length=1, json_schema_extra=name_or_folder("latest", "never"))] = "latest"
    """What an existing run resumes from: "latest", the folder of a checkpoint, or "never", which requires a new run."""


class ExportSettings(SettingsBlock):
    when: Literal["checkpoints", "end", "never"] | None = None
    """When the trained weights are written for other programs, into `exports/step-NUMBER` of the run folder: with each
    scheduled checkpoint, after the last step, or never. Unset: "checkpoints", and "end" if all weights are trained."""
    formats: Annotated[tuple[Literal["diffusers", "comfyui", "kohya"], ...], Field(min_length=1)] = ("diffusers",)
    """The programs whose key names the files have; each gets its own files. "diffusers": LoRA for diffusers, other
    adapters for lycoris-lora. Has no effect if all weights are trained."""
    keep: Annotated[int | None, Field(ge=1)] = None
    """Number of most recent steps whose exports are kept. Unset: all."""
    weights: Literal["averaged", "trained", "both"] = "averaged"
    """With `train.ema_decay` or a schedule-free optimizer: export the average, the weights that are trained, or both.
    Without an average, all three mean the trained weights."""
    push_to_hub: Annotated[str | None, Field(max_length=193, pattern=_REPOSITORIES, json_schema_extra=_REPOSITORY)] = (
        None
    )
    """Repository on the Hugging Face hub, OWNER/NAME, to which the adapter of the last step, its samples and a model
    card are pushed when training ends. It is created if it does not exist. Unset: nothing is pushed."""
    hub_private: bool = True
    """Whether a repository that a push creates is private."""
    license: Annotated[str | None, Field(max_length=100, pattern=_LICENSES, json_schema_extra=_LICENSE)] = None
    """Licence of the adapter in its model card, as the hub names it. Unset: the card names no licence."""
    trigger_word: Annotated[str | None, Field(min_length=1)] = None
    """Word in the model card that prompts should contain. Unset: `captions.trigger_word` of the datasets."""


class ReportSettings(SettingsBlock):
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: Annotated[str | None, Field(min_length=1)] = None
    """Report to this project of Weights & Biases; needs the package wandb. Unset: no report."""
    every_steps: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two points in TensorBoard and wandb; losses.jsonl has every step."""
    memory_every_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps between two measurements of the machine's memory. 0: none."""

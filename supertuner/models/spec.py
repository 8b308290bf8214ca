"""What a family of models says about itself: facts and functions in one record, and the only thing others know of it.

    Source ──read──► Model      what this model is, from its config files alone: no weights are touched
                       ├── media_encoder / text_encoder   made when something must be encoded, dropped afterwards
                       ├── denoiser                       one module per expert; adapters are put on it by adapters.py
                       ├── denoise                        the module's forward pass in our terms
                       └── sampler                        the family's own diffusers pipeline, for samples

Noise levels are numbers from 0 (clean) to 1 (noise): t / 1000 in the models' own counting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.core.types import MediaKind

Tensors: TypeAlias = dict[str, torch.Tensor]
"""Named tensors: what an encoder makes of a sample, or of a batch of them."""
PredictionType: TypeAlias = Literal["flow", "epsilon", "v"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from."""

    path: str
    """A folder with a diffusers pipeline, or a name on the hub."""
    revision: str | None = None
    variant: str | None = None
    offline: bool = False
    single_files: Mapping[str, Path] = field(default_factory=dict)
    """Part → a .safetensors file that its weights come from instead."""
    without_weights: bool = False
    """Its parts are made from their configs alone, without weights and files: for a forecast."""
    assumed_caption_tokens: int = 576
    """Hollow: as many tokens is a caption taken for where the model reads it whole."""


@dataclass(frozen=True, slots=True)
class Expert:
    """A denoiser and the noise levels it is for: `low` ≤ level < `high`, and 1 too where `high` is 1."""

    name: str
    """`high_noise`, `low_noise`; a model with only one calls it `model`."""
    component: str
    """Its name in the pipeline: `transformer`, `transformer_2`."""
    sigma_min: float = 0.0
    sigma_max: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """One model of a family, as its config files describe it."""

    source: ModelSource
    title: str
    """For people: `Wan2.2 text-to-video, two experts`."""
    experts: tuple[Expert, ...]
    """In the order in which sampling uses them: high noise first."""
    media_kinds: frozenset[MediaKind]
    """What it can be trained on."""
    shift: float
    """How far its scheduler moves noise levels towards noise; 1: not at all."""
    configs: Mapping[str, Mapping[str, object]]
    """Config of the pipeline (`""`) and of each part, as read."""

    needs_first_frame: bool = False
    """A sample of it needs a first frame."""
    edits_images: bool = False
    """It changes a picture into another. Every sample has the picture that it is made from; `denoise` gets that as the
    condition `condition`, latents of the same media encoder, and the text encoder sees it too."""
    micro_conditioning: bool = False
    """It is told how each picture was framed: `denoise` gets the condition `framing`, with a row for each sample of its
    height and width as a file, what was cut off at its top and left, and its height and width in the batch."""
    prediction: PredictionType | None = None
    """Where the models of a family differ in what they predict; None: what the family says."""
    alphas_cumprod: tuple[float, ...] | None = None
    """The table that a model of epsilon or v was trained on: DDPM's ᾱ_t, from the first timestep to the last."""

    def config_value(self, component: str, key: str) -> object:
        """One entry of a part's config, which must be there."""
        return self.configs[component][key]


class MediaEncoder(Protocol):
    """Pixels or sound to latents. Deterministic: the same input gives the same bits on the same device."""

    def encode(self, media: torch.Tensor) -> Tensors:
        """uint8 BCHW or BCFHW, or float32 BCT in [-1, 1] → fields of B rows each, fp32 on the CPU, detached.

        `latents` is what noise is added to; other fields are conditions that `denoise` gets as they are.
        """


class TextEncoder(Protocol):
    @property
    def truncated_captions(self) -> int:
        """How many captions so far were longer than the model reads, and were cut."""

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        """For each caption its fields, on the CPU, detached, without padding and without a batch dimension."""


@runtime_checkable
class ImageTextEncoder(TextEncoder, Protocol):
    """Of a model that edits: a caption says what to do with a picture, and is encoded together with it."""

    def encode_with_images(self, captions: Sequence[str], images: Sequence[torch.Tensor]) -> list[Tensors]:
        """`encode`, each caption with its picture: uint8 CHW."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    prompt: str
    negative_prompt: str
    seed: int
    width: int
    height: int
    frames: int
    inference_steps: int
    guidance_scale: float
    image: NDArray[np.uint8] | None = None
    """HWC: the first frame, for models that start from one; the picture to change, for models that edit."""


class ModelSampler(Protocol):
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        """The sample as frames, FHWC; a picture has one. Draws on no global random state."""


@dataclass(frozen=True, eq=False, slots=True)
class Family:
    name: str
    prediction: PredictionType
    read_model: Callable[[ModelSource], ModelDescription]
    media_files: Callable[[ModelDescription], Sequence[Path]]
    """The files that decide what the media encoder computes: weights and configs. Their content is its identity."""
    text_files: Callable[[ModelDescription], Sequence[Path]]
    """The same of the text encoders and tokenizers."""
    build_media_encoder: Callable[[ModelDescription, torch.device], MediaEncoder]
    build_text_encoder: Callable[[ModelDescription, torch.device, torch.dtype], TextEncoder]
    unsupported_reason: Callable[[ModelDescription, tuple[int, ...]], str | None]
    """Why media of this shape (CHW, CFHW, CT) cannot be encoded or denoised; None if it can."""
    load_denoiser: Callable[[ModelDescription, Expert, torch.dtype], nn.Module]
    """The expert's module on the CPU, in eval mode, no gradient required, aligned so that results are repeatable."""
    denoise: Callable[[ModelDescription, nn.Module, torch.Tensor, torch.Tensor, Tensors, Tensors], torch.Tensor]
    """(model, module, noisy, levels, text, conditions) → prediction, of the shape of `noisy`. Levels: fp32, one per
    sample. Runs under the caller's autocast."""
    pad_text: Callable[[ModelDescription, Sequence[Tensors]], Tensors]
    """Encoded captions as one batch, padded as the family's pipeline does."""
    token_count: Callable[[ModelDescription, tuple[int, ...]], int]
    """Tokens that latents of this shape (without batch) are for the denoiser."""
    build_sampler: Callable[[ModelDescription, Mapping[str, nn.Module], torch.device, torch.dtype], ModelSampler]
    """(model, part → module, device, dtype): a pipeline around these modules; a part that is not given is loaded."""
    target_presets: Mapping[str, Sequence[str]]
    """Presets of adapter targets: endings of module names."""
    export_prefix: Mapping[str, str]
    """Part → prefix of its adapter's keys in an exported file that diffusers loads."""
    write_tiny_pipeline: Callable[[Path, int], None]
    """Write a tiny random pipeline of the family into a new folder, from a seed."""
    batched_guidance: bool = False
    """Its sampler predicts with and without the prompt in one batch; otherwise in one pass after the other."""

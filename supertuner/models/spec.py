"""The interface of a model family: one record of facts and functions. No other package knows more about a family.

    ModelSource ──read_model──► ModelDescription     from the config files alone, without reading weights
                       ├── build_media_encoder, build_text_encoder   built when something must be encoded, then released
                       ├── load_denoiser                             one module per expert; adapters are attached to it
                       ├── denoise                                   the module's forward pass with our arguments
                       └── build_sampler                             the family's diffusers pipeline, for samples

A sigma is a noise level from 0 (clean) to 1 (pure noise): timestep / 1000 in the models' own units.
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
"""Named tensors: an encoder's output for one sample or for a batch."""
PredictionType: TypeAlias = Literal["flow", "epsilon", "v"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files come from."""

    path: str
    """The folder of a diffusers pipeline, or a repository on the Hugging Face hub."""
    revision: str | None = None
    variant: str | None = None
    offline: bool = False
    single_files: Mapping[str, Path] = field(default_factory=dict)
    """Component → a .safetensors file to load its weights from instead."""
    without_weights: bool = False
    """Build components from their configs alone, without files and memory for weights, for a forecast."""
    loads_tokenizers: bool = False
    """Without weights: load the tokenizers all the same, whose files are small."""
    assumed_caption_tokens: int = 576
    """Without weights: the assumed length of a caption, for models that do not pad captions to a fixed length."""


@dataclass(frozen=True, slots=True)
class Expert:
    """A denoiser and its range of sigmas: `sigma_min` ≤ sigma < `sigma_max`, and also 1 if `sigma_max` is 1."""

    name: str
    """For example `high_noise` and `low_noise`; the expert of a model with only one is named `model`."""
    component: str
    """Its component of the pipeline, for example `transformer_2`."""
    sigma_min: float = 0.0
    sigma_max: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """One model of a family, from its config files."""

    source: ModelSource
    title: str
    """A title for messages, for example `Wan2.2 text-to-video, two experts`."""
    experts: tuple[Expert, ...]
    """In the order in which sampling uses them, high noise first."""
    media_kinds: frozenset[MediaKind]
    """The kinds of media that it can be trained on."""
    shift: float
    """The shift of its scheduler, which moves sigmas towards 1; 1 moves nothing."""
    configs: Mapping[str, Mapping[str, object]]
    """The configs of the pipeline (key `""`) and of each component."""

    needs_first_frame: bool = False
    """Whether a sample starts from a given first frame (image-to-video)."""
    edits_images: bool = False
    """Whether it edits a reference image. Every training sample then has one: `denoise` receives its latents, by the
    same media encoder, as the condition `condition`, and the text encoder is an `ImageTextEncoder`."""
    micro_conditioning: bool = False
    """Whether it is conditioned on sizes and crops (SDXL). `denoise` then receives the condition `framing` with one row
    per sample: original height and width, crop offset from the top and the left, height and width in the batch."""
    training_guidance: float | None = None
    """The guidance input of the denoiser during training, for a model that was distilled from a guided one; None: it
    has no such input. `objective.guidance` replaces this value in a run."""
    prediction: PredictionType | None = None
    """Overrides the family's prediction type; None: as the family says."""
    alphas_cumprod: tuple[float, ...] | None = None
    """ᾱ_t of DDPM for each timestep of the model's scheduler, for models that predict epsilon or v."""

    def config_value(self, component: str, key: str) -> object:
        """One entry of a component's config. Raises KeyError if it is missing."""
        return self.configs[component][key]


class MediaEncoder(Protocol):
    """Encodes pixels or sound to latents. Deterministic: equal inputs give equal bits on the same device."""

    def encode(self, media: torch.Tensor) -> Tensors:
        """Takes uint8 BCHW or BCFHW, or float32 BCT in [-1, 1]; returns fields of B rows, fp32, detached, on the CPU.

        Training adds noise to the field `latents`; other fields are conditions that `denoise` receives unchanged.
        """


class TextEncoder(Protocol):
    @property
    def truncated_captions(self) -> int:
        """The number of captions so far that were longer than the model reads and were truncated."""

    def is_truncated(self, caption: str) -> bool:
        """Whether the model reads only the beginning of this caption. Needs the tokenizers alone."""

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        """The fields of each caption: detached, on the CPU, without padding and without a batch dimension."""


@runtime_checkable
class ImageTextEncoder(TextEncoder, Protocol):
    """The text encoder of an editing model, which encodes a caption together with its reference image."""

    def encode_with_images(self, captions: Sequence[str], images: Sequence[torch.Tensor]) -> list[Tensors]:
        """Like `encode`, for captions with their images (uint8 CHW)."""


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
    """HWC: the first frame for image-to-video models, the reference image for editing models."""


class ModelSampler(Protocol):
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        """The sample as frames FHWC; an image has one frame. Does not use torch's global random state."""


class DenoiserLoader(Protocol):
    def __call__(
        self,
        model: ModelDescription,
        expert: Expert,
        dtype: torch.dtype,
        place: Callable[[nn.Module], object] = ...,
        /,
    ) -> nn.Module:
        """The expert's module in eval mode, frozen.

        `place` is called with the loaded module, whose tensors may be mapped from files, and copies them to the memory
        that it chooses. By default that is aligned memory of the host, so that results are repeatable.
        """


@dataclass(frozen=True, eq=False, slots=True)
class Family:
    name: str
    prediction: PredictionType
    read_model: Callable[[ModelSource], ModelDescription]
    media_files: Callable[[ModelDescription], Sequence[Path]]
    """The files that determine the media encoder's output: weights and configs. Caches are keyed by their content."""
    text_files: Callable[[ModelDescription], Sequence[Path]]
    """The same for text encoders and tokenizers."""
    build_media_encoder: Callable[[ModelDescription, torch.device], MediaEncoder]
    build_text_encoder: Callable[[ModelDescription, torch.device, torch.dtype], TextEncoder]
    unsupported_reason: Callable[[ModelDescription, tuple[int, ...]], str | None]
    """Why media of this shape (CHW, CFHW or CT) cannot be encoded or denoised; None if they can."""
    load_denoiser: DenoiserLoader
    denoise: Callable[[ModelDescription, nn.Module, torch.Tensor, torch.Tensor, Tensors, Tensors], torch.Tensor]
    """(model, module, noisy, sigmas, text, conditions) → prediction with the shape of `noisy`. Sigmas are fp32, one per
    sample. Runs under the caller's autocast."""
    pad_text: Callable[[ModelDescription, Sequence[Tensors]], Tensors]
    """Encoded captions as one batch, padded as in the family's pipeline."""
    token_count: Callable[[ModelDescription, tuple[int, ...]], int]
    """The number of tokens of latents of this shape (without batch) in the denoiser."""
    build_sampler: Callable[[ModelDescription, Mapping[str, nn.Module], torch.device, torch.dtype], ModelSampler]
    """(model, component → module, device, dtype) → a sampler that uses these modules and loads the other components."""
    target_presets: Mapping[str, Sequence[str]]
    """Presets of adapter targets: preset → endings of module names."""
    export_prefix: Mapping[str, str]
    """Component → prefix of its adapter's keys in an exported file for diffusers."""
    write_tiny_pipeline: Callable[[Path, int], None]
    """(folder, seed): write a tiny pipeline of the family with random weights into a new folder."""
    batched_guidance: bool = False
    """Whether the sampler predicts with and without the prompt in one batch instead of one after the other."""
    modelspec_architecture: str | None = None
    """Its architecture in Stability's ModelSpec, for the metadata of exported files; None: the family's name."""

"""Defaults for families of image models: an AutoencoderKL, 2×2 latents per token, samples by the diffusers pipeline.

`ImageFamily` fills in every function of a `Family` that most image models share, so that a family states only what
differs. Images are encoded one by one: the stored latents of a sample do not depend on the samples beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from supertuner.core.types import MediaKind
from supertuner.models import loading
from supertuner.models.families.sampling_common import PipelineOptions
from supertuner.models.families.text_common import stack_text
from supertuner.models.pipeline_files import ConfigDict, text_files, vae_files
from supertuner.models.spec import (
    DenoiserLoader,
    Expert,
    Family,
    MediaEncoder,
    ModelDescription,
    ModelSource,
    PredictionType,
    SampleRequest,
    Tensors,
)

PATCH_SIZE = 2
"""Latents per token along each side, where the pipeline packs latents into tokens (Flux, Qwen-Image)."""


def image_model(
    source: ModelSource, configs: Mapping[str, ConfigDict], *, title: str, shift: float, **facts: Any
) -> ModelDescription:
    """A model that is trained on images and has one expert; `facts` are further fields of `ModelDescription`."""
    facts = {"experts": (Expert("model", "transformer"),), **facts}
    return ModelDescription(
        source=source, title=title, media_kinds=frozenset({MediaKind.IMAGE}), shift=shift, configs=configs, **facts
    )


# ── images and latents ────────────────────────────────────────────────────────────────────────────────────────────────


class ImageVaeEncoder:
    """Images to the normalized mode of an AutoencoderKL's latent distribution."""

    def __init__(self, vae: Any, device: torch.device) -> None:
        self._vae = vae
        self._device = device

    @torch.no_grad()
    def encode(self, media: torch.Tensor) -> Tensors:
        pixels = (image[None].to(self._device, torch.float32) / 255.0 * 2.0 - 1.0 for image in media.unbind())
        return {"latents": torch.cat([self._encode_one(image) for image in pixels]).cpu()}

    def _encode_one(self, pixels: torch.Tensor) -> torch.Tensor:
        shift, scale_factor = _latent_shift_and_scale(self._vae)
        latents: torch.Tensor = (self._vae.encode(pixels).latent_dist.mode() - shift) * scale_factor
        return latents


def build_media_encoder(model: ModelDescription, device: torch.device) -> ImageVaeEncoder:
    return ImageVaeEncoder(loading.load_module(model, "vae", torch.float32, loading.to_device(device)), device)


def decode_image(pipeline: Any, latents: torch.Tensor) -> Any:
    """The image of a sampler's latents. The VAE decodes in fp32 whatever the denoiser computes in."""
    shift, scale_factor = _latent_shift_and_scale(pipeline.vae)
    pixels = pipeline.vae.decode(latents.float() / scale_factor + shift, return_dict=False)[0]
    return pipeline.image_processor.postprocess(pixels, output_type="np")


def _latent_shift_and_scale(vae: Any) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """What is subtracted from latents, and what the difference is multiplied by.

    Both are per channel if the config has means and standard deviations, otherwise one number for all channels.
    """
    config = vae.config
    if config.latents_mean is None or config.latents_std is None:
        return config.shift_factor or 0.0, config.scaling_factor
    statistics = config.latents_mean, config.latents_std
    mean, std = (torch.tensor(numbers, device=vae.device).view(1, -1, 1, 1) for numbers in statistics)
    return mean, config.scaling_factor / std


def pixels_per_latent(model: ModelDescription) -> int:
    """Pixels per latent along each side: every level of the VAE except the last halves the sides.

    AutoencoderKL lists its levels, the VAEs of Wan and Qwen-Image the steps between them (`temperal_downsample` [sic]).
    """
    config = model.configs["vae"]
    steps = config.get("temperal_downsample")
    levels = config.get("block_out_channels", (0, 0, 0, 0)) if steps is None else (0, *_sequence(steps))
    return int(2 ** (len(_sequence(levels)) - 1))


def _sequence(value: object) -> Sequence[object]:
    assert isinstance(value, list | tuple), value
    return value


def image_unsupported_reason(shape: tuple[int, ...], multiple: int) -> str | None:
    """Why media of this shape are not RGB images whose sides are multiples of `multiple`; None if they are."""
    if len(shape) != 3 or shape[0] != 3:
        return f"its shape is {shape}, and this model takes RGB images (3 × height × width)"
    if shape[1] % multiple or shape[2] % multiple:
        return f"it is {shape[2]}×{shape[1]}, and both sides must be multiples of {multiple}"
    return None


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    """Sides must be whole tokens of `PATCH_SIZE` latents."""
    return image_unsupported_reason(shape, pixels_per_latent(model) * PATCH_SIZE)


# ── latents and tokens, as the pipelines of Flux and Qwen-Image pack them ─────────────────────────────────────────────


def token_count(model: ModelDescription, shape: tuple[int, ...]) -> int:
    """Tokens of latents of shape CHW."""
    _, height, width = shape
    return (height // PATCH_SIZE) * (width // PATCH_SIZE)


def pack_latents(latents_BCHW: torch.Tensor) -> torch.Tensor:
    """Latents as tokens: one row of 4·C numbers for each 2×2 patch."""
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.reshape(batch, channels, height // PATCH_SIZE, PATCH_SIZE, width // PATCH_SIZE, PATCH_SIZE)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH_SIZE * PATCH_SIZE)


def unpack_latents(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `pack_latents` for latents of this shape (BCHW)."""
    batch, channels, height, width = shape
    patches = packed.reshape(batch, height // PATCH_SIZE, width // PATCH_SIZE, channels, PATCH_SIZE, PATCH_SIZE)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(shape)


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def image_call_arguments(model: ModelDescription, request: SampleRequest) -> dict[str, Any]:
    guidance = {"guidance_scale": request.guidance_scale, "negative_prompt": request.negative_prompt}
    return {**guidance, "output_type": "latent"}


IMAGE_PIPELINE: Final = PipelineOptions(
    unsupported_reason, image_call_arguments, lambda pipeline, output, _request: decode_image(pipeline, output.images)
)


# ── the record ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ImageFamily(Family):
    """A `Family` whose functions default to those above: flow matching, one transformer, text of a fixed length.

    A family states `name`, `read_model`, `build_text_encoder`, `denoise`, `build_sampler`, `target_presets` and
    `write_tiny_pipeline`.
    """

    prediction: PredictionType = "flow"
    media_files: Callable[[ModelDescription], Sequence[Path]] = vae_files
    text_files: Callable[[ModelDescription], Sequence[Path]] = text_files
    build_media_encoder: Callable[[ModelDescription, torch.device], MediaEncoder] = build_media_encoder
    unsupported_reason: Callable[[ModelDescription, tuple[int, ...]], str | None] = unsupported_reason
    load_denoiser: DenoiserLoader = loading.load_denoiser
    pad_text: Callable[[ModelDescription, Sequence[Tensors]], Tensors] = stack_text
    token_count: Callable[[ModelDescription, tuple[int, ...]], int] = token_count
    export_prefix: Mapping[str, str] = field(default_factory=lambda: {"transformer": "transformer"})

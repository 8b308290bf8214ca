"""Samples of SD3.5 through its own diffusers pipeline, and which pictures it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.models import pictures, sampling
from supertuner.models.spec import Model, SampleRequest

PARTS: Final = (
    "transformer",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
    "scheduler",
)


def why_not(model: Model, shape: tuple[int, ...]) -> str | None:
    """Sides are whole patches, and no longer than the positions that the model knows."""
    side = pictures.scale(model) * patch(model)
    if (why := pictures.why_not(shape, side)) is not None:
        return why
    most = _whole(model, "pos_embed_max_size", 96) * side
    if max(shape[1:]) > most:
        return f"it is {shape[2]}×{shape[1]}, and this model knows positions up to {most} pixels"
    return None


def patch(model: Model) -> int:
    """Latents per token, along each side."""
    return _whole(model, "patch_size", 2)


def _whole(model: Model, key: str, default: int) -> int:
    value = model.configs["transformer"].get(key, default)
    assert isinstance(value, int)
    return value


class Sd35Sampler:
    def __init__(self, model: Model, pipeline: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._pipeline = pipeline
        self._device = device
        self._dtype = dtype

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        pictures.require_picture(request, why_not(self._model, (3, request.height, request.width)))
        with sampling.computing([self._pipeline.transformer], self._device, self._dtype):
            latents = self._pipeline(
                prompt=request.prompt,
                negative_prompt=request.negative_prompt,
                height=request.height,
                width=request.width,
                num_inference_steps=request.inference_steps,
                guidance_scale=request.guidance_scale,
                generator=torch.Generator().manual_seed(request.seed),
                output_type="latent",
            ).images
        pixels = pictures.decoded(self._pipeline.vae, latents)
        return sampling.uint8(self._pipeline.image_processor.postprocess(pixels, output_type="np"))


def sampler(model: Model, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> Sd35Sampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.StableDiffusion3Pipeline(**sampling.parts(model, modules, PARTS, device, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return Sd35Sampler(model, pipeline, device, dtype)

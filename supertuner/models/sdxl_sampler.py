"""Samples of SDXL through its own diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.models import pictures, sampling
from supertuner.models.sdxl_encoders import empty_is_zero
from supertuner.models.spec import Model, SampleRequest

PARTS: Final = (
    "unet",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "scheduler",
)


def why_not(model: Model, shape: tuple[int, ...]) -> str | None:
    """Sides need no more than the VAE asks for: the UNet meets odd ones on its way down, and comes back to them."""
    return pictures.why_not(shape, pictures.scale(model))


class SdxlSampler:
    """A sample is told that it is a whole picture of its own size: nothing cut off, nothing made smaller."""

    def __init__(self, model: Model, pipeline: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._pipeline = pipeline
        self._device = device
        self._dtype = dtype

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        pictures.require_picture(request, why_not(self._model, (3, request.height, request.width)))
        with sampling.computing([self._pipeline.unet], self._device, self._dtype):
            latents = self._pipeline(
                prompt=request.prompt,
                negative_prompt=request.negative_prompt or None,  # none at all can be zeros, an empty one cannot
                height=request.height,
                width=request.width,
                num_inference_steps=request.inference_steps,
                guidance_scale=request.guidance_scale,
                generator=torch.Generator().manual_seed(request.seed),
                output_type="latent",
            ).images
        pixels = pictures.decoded(self._pipeline.vae, latents)
        return sampling.uint8(self._pipeline.image_processor.postprocess(pixels, output_type="np"))


def sampler(model: Model, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> SdxlSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.StableDiffusionXLPipeline(
        **sampling.parts(model, modules, PARTS, device, dtype),
        force_zeros_for_empty_prompt=empty_is_zero(model),
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return SdxlSampler(model, pipeline, device, dtype)

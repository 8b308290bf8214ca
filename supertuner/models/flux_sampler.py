"""Samples of Flux through its own diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models import sampling
from supertuner.models.flux_shapes import why_not
from supertuner.models.spec import Model, SampleRequest

PARTS: Final = (
    "transformer",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "scheduler",
)


class FluxSampler:
    """Flux was distilled: guidance is an input of the model, and there is no negative prompt."""

    def __init__(self, model: Model, pipeline: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._pipeline = pipeline
        self._device = device
        self._dtype = dtype

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        if request.frames != 1:
            raise ModelError(f"the sample {request.prompt!r} has {request.frames} frames, and Flux makes pictures")
        if why := why_not(self._model, (3, request.height, request.width)):
            raise ModelError(f"the sample {request.prompt!r} cannot be made: {why}")
        with sampling.computing([self._pipeline.transformer], self._device, self._dtype):
            packed = self._pipeline(
                prompt=request.prompt,
                height=request.height,
                width=request.width,
                num_inference_steps=request.inference_steps,
                guidance_scale=request.guidance_scale,
                generator=torch.Generator().manual_seed(request.seed),
                output_type="latent",
            ).images
        return sampling.uint8(self._pixels(packed, request))

    def _pixels(self, packed: torch.Tensor, request: SampleRequest) -> Any:
        """The end of the pipeline, with the VAE in fp32: it would decode in the precision of the text encoder."""
        pipeline = self._pipeline
        latents = pipeline._unpack_latents(packed.float(), request.height, request.width, pipeline.vae_scale_factor)
        latents = latents / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor
        decoded = pipeline.vae.decode(latents, return_dict=False)[0]
        return pipeline.image_processor.postprocess(decoded, output_type="np")


def sampler(model: Model, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> FluxSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.FluxPipeline(**sampling.parts(model, modules, PARTS, device, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return FluxSampler(model, pipeline, device, dtype)

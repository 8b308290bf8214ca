"""Samples of SDXL through its own diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import diffusers
import torch
from torch import nn

from supertuner.models.families import image_common as pictures
from supertuner.models.families import sampling_common as sampling
from supertuner.models.families.image_common import ImagePipelineSampler
from supertuner.models.families.sdxl.encoders import zeros_for_empty_prompt
from supertuner.models.spec import ModelDescription, SampleRequest

COMPONENTS: Final = (
    "unet",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "scheduler",
)


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    """Sides need no more than the VAE asks for: the UNet meets odd ones on its way down, and comes back to them."""
    return pictures.image_unsupported_reason(shape, pictures.vae_scale_factor(model))


def build_sampler(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> ImagePipelineSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.StableDiffusionXLPipeline(
        **sampling.pipeline_components(model, modules, COMPONENTS, device, dtype),
        force_zeros_for_empty_prompt=zeros_for_empty_prompt(model),
        add_watermarker=False,
    )
    return ImagePipelineSampler(
        pipeline, "unet", partial(unsupported_reason, model), device, dtype, extra_arguments=_pipeline_arguments
    )


def _pipeline_arguments(request: SampleRequest) -> dict[str, Any]:
    """No negative prompt at all can be zeros, an empty one cannot. Unsaid, a sample is a whole picture of its size."""
    return {"negative_prompt": request.negative_prompt or None}

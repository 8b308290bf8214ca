"""Samples of Flux through its own diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import diffusers
import torch
from torch import nn

from supertuner.models.families import sampling_common as sampling
from supertuner.models.families.flux.shapes import unsupported_reason
from supertuner.models.families.image_common import ImagePipelineSampler
from supertuner.models.spec import ModelDescription, SampleRequest

COMPONENTS: Final = (
    "transformer",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "scheduler",
)


def build_sampler(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> ImagePipelineSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.FluxPipeline(**sampling.pipeline_components(model, modules, COMPONENTS, device, dtype))

    def unpack_latents(packed: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        latents: torch.Tensor = pipeline._unpack_latents(
            packed, request.height, request.width, pipeline.vae_scale_factor
        )
        return latents

    return ImagePipelineSampler(
        pipeline,
        "transformer",
        partial(unsupported_reason, model),
        device,
        dtype,
        extra_arguments=_pipeline_arguments,
        unpack_latents=unpack_latents,
    )


def _pipeline_arguments(request: SampleRequest) -> dict[str, Any]:
    """Flux was distilled: guidance is an input of the model, and there is no negative prompt."""
    return {}

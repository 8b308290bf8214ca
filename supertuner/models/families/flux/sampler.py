"""Samples of Flux through its own diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import diffusers
import torch
from torch import nn

from supertuner.models.families import sampling_common as sampling
from supertuner.models.families.flux.shapes import why_not
from supertuner.models.families.image_common import PictureSampler
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


def sampler(model: Model, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> PictureSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.FluxPipeline(**sampling.parts(model, modules, PARTS, device, dtype))

    def unpacked(packed: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        latents: torch.Tensor = pipeline._unpack_latents(
            packed, request.height, request.width, pipeline.vae_scale_factor
        )
        return latents

    return PictureSampler(
        pipeline, "transformer", partial(why_not, model), device, dtype, told=_told, unpacked=unpacked
    )


def _told(request: SampleRequest) -> dict[str, Any]:
    """Flux was distilled: guidance is an input of the model, and there is no negative prompt."""
    return {}

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
from supertuner.models.families.image_common import PictureSampler
from supertuner.models.families.sdxl.encoders import empty_is_zero
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


def sampler(model: Model, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> PictureSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.StableDiffusionXLPipeline(
        **sampling.parts(model, modules, PARTS, device, dtype),
        force_zeros_for_empty_prompt=empty_is_zero(model),
        add_watermarker=False,
    )
    return PictureSampler(pipeline, "unet", partial(why_not, model), device, dtype, told=_told)


def _told(request: SampleRequest) -> dict[str, Any]:
    """No negative prompt at all can be zeros, an empty one cannot. Unsaid, a sample is a whole picture of its size."""
    return {"negative_prompt": request.negative_prompt or None}

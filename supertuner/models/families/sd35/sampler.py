"""Samples of SD3.5 through its own diffusers pipeline, and which pictures it takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import diffusers
import torch
from torch import nn

from supertuner.models.families import image_common as pictures
from supertuner.models.families import sampling_common as sampling
from supertuner.models.families.image_common import ImagePipelineSampler
from supertuner.models.spec import ModelDescription

COMPONENTS: Final = (
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


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    """Sides are whole patches, and no longer than the positions that the model knows."""
    multiple = pictures.vae_scale_factor(model) * patch_size(model)
    if (reason := pictures.image_unsupported_reason(shape, multiple)) is not None:
        return reason
    max_side = _transformer_integer(model, "pos_embed_max_size", 96) * multiple
    if max(shape[1:]) > max_side:
        return f"it is {shape[2]}×{shape[1]}, and this model knows positions up to {max_side} pixels"
    return None


def patch_size(model: ModelDescription) -> int:
    """Latents per token, along each side."""
    return _transformer_integer(model, "patch_size", 2)


def _transformer_integer(model: ModelDescription, key: str, default: int) -> int:
    value = model.configs["transformer"].get(key, default)
    assert isinstance(value, int)
    return value


def build_sampler(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> ImagePipelineSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.StableDiffusion3Pipeline(
        **sampling.pipeline_components(model, modules, COMPONENTS, device, dtype)
    )
    return ImagePipelineSampler(pipeline, "transformer", partial(unsupported_reason, model), device, dtype)

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
from supertuner.models.families.image_common import PictureSampler
from supertuner.models.spec import Model

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


def sampler(model: Model, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> PictureSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    pipeline = diffusers.StableDiffusion3Pipeline(**sampling.parts(model, modules, PARTS, device, dtype))
    return PictureSampler(pipeline, "transformer", partial(why_not, model), device, dtype)

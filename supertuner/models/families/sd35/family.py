"""Stable Diffusion 3 and 3.5: pictures from captions by flow matching, with three text encoders and one expert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from supertuner.core.types import MediaKind
from supertuner.models import loading, reading
from supertuner.models.adapters.targets import JOINT_ATTENTION, presets
from supertuner.models.families import image_common as pictures
from supertuner.models.families.sd35.encoders import text_encoder
from supertuner.models.families.sd35.sampler import PARTS, patch, sampler, why_not
from supertuner.models.families.sd35.tiny import tiny
from supertuner.models.spec import Expert, Family, Model, Source, Tensors

NAME: Final = "sd3.5"


def read(source: Source) -> Model:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_parts(source, index, PARTS)
    return Model(
        source=source,
        title=f"Stable Diffusion {'3.5' if configs['transformer'].get('qk_norm') else '3'}",
        experts=(Expert("model", "transformer"),),
        kinds=frozenset({MediaKind.IMAGE}),
        shift=reading.largest_shift(source, configs, 1.16),
        configs=configs,
    )


def text_files(model: Model) -> Sequence[Path]:
    return reading.files_of(model.source, tuple(part for part in PARTS if part.startswith(("text", "token"))))


def denoise(
    model: Model, module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    """As the pipeline calls it: latents as they are, and the level in thousandths."""
    predicted: torch.Tensor = module(
        hidden_states=noisy,
        timestep=levels * 1000,
        encoder_hidden_states=text["embeds"],
        pooled_projections=text["pooled"],
        return_dict=False,
    )[0]
    return predicted


def pad_text(model: Model, captions: Sequence[Tensors]) -> Tensors:
    """All captions have the same length: see `Sd35TextEncoder`."""
    return {name: torch.stack([caption[name] for caption in captions]) for name in ("embeds", "pooled")}


def tokens(model: Model, shape: tuple[int, ...]) -> int:
    """Latents are CHW."""
    _, height, width = shape
    return (height // patch(model)) * (width // patch(model))


_MLP: Final = ("net.0.proj", "net.2")
_REST: Final = ("context_embedder", "linear_1", "linear_2", "linear", "proj_out")
"""Embedders, the layers that modulate norms, and the last layer."""

FAMILY: Final = Family(
    name=NAME,
    prediction="flow",
    read=read,
    media_files=reading.vae_files,
    text_files=text_files,
    media_encoder=pictures.media_encoder,
    text_encoder=text_encoder,
    why_not=why_not,
    denoiser=loading.denoiser,
    denoise=denoise,
    pad_text=pad_text,
    tokens=tokens,
    sampler=sampler,
    targets=presets(JOINT_ATTENTION, _MLP, _REST),
    export_prefix={"transformer": "transformer"},
    tiny=tiny,
    guides_together=True,
)

"""Flux: pictures from captions, one expert, with guidance as an input (dev) or without (schnell)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from supertuner.core.types import MediaKind
from supertuner.models import loading, reading
from supertuner.models.adapters.targets import JOINT_ATTENTION, presets
from supertuner.models.families.flux.encoders import text_encoder
from supertuner.models.families.flux.sampler import PARTS, sampler
from supertuner.models.families.flux.shapes import pack, positions, tokens, unpack, why_not
from supertuner.models.families.flux.tiny import tiny
from supertuner.models.families.image_common import media_encoder
from supertuner.models.spec import Expert, Family, Model, Source, Tensors

NAME: Final = "flux"
GUIDANCE: Final = 1.0
"""What a distilled model is told while it learns: no guidance, so that what it learns is the data."""


def read(source: Source) -> Model:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_parts(source, index, PARTS)
    distilled = configs["transformer"].get("guidance_embeds")
    return Model(
        source=source,
        title=f"Flux, {'guidance is an input' if distilled else 'without guidance'}",
        experts=(Expert("model", "transformer"),),
        kinds=frozenset({MediaKind.IMAGE}),
        shift=reading.largest_shift(source, configs, 1.15),
        configs=configs,
    )


def text_files(model: Model) -> Sequence[Path]:
    return reading.files_of(model.source, ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))


def denoise(
    model: Model, module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    """As the pipeline calls it: tokens in rows, where each stands, and the level as it is (the model multiplies)."""
    embeds = text["embeds"]
    guided = bool(model.configs["transformer"].get("guidance_embeds"))
    predicted = module(
        hidden_states=pack(noisy),
        timestep=levels,
        guidance=torch.full_like(levels, GUIDANCE) if guided else None,
        pooled_projections=text["pooled"],
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(embeds.shape[1], 3, device=noisy.device),
        img_ids=positions(noisy.shape, noisy.device),
        return_dict=False,
    )[0]
    return unpack(predicted, noisy.shape)


def pad_text(model: Model, captions: Sequence[Tensors]) -> Tensors:
    """All captions have the same length: see `FluxTextEncoder`."""
    return {name: torch.stack([caption[name] for caption in captions]) for name in ("embeds", "pooled")}


_MLP: Final = ("net.0.proj", "net.2", "proj_mlp", "proj_out")
_REST: Final = ("x_embedder", "context_embedder", "linear_1", "linear_2", "linear")
"""Embedders, and the layers that modulate norms; schnell has one embedder less, so they are named by their endings."""

FAMILY: Final = Family(
    name=NAME,
    prediction="flow",
    read=read,
    media_files=reading.vae_files,
    text_files=text_files,
    media_encoder=media_encoder,
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
)

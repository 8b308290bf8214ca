"""Flux: pictures from captions, one expert, with guidance as an input (dev) or without (schnell)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from supertuner.core.types import MediaKind
from supertuner.models import loading
from supertuner.models import pipeline_files as reading
from supertuner.models.adapters.targets import JOINT_ATTENTION, target_presets
from supertuner.models.families.flux.encoders import build_text_encoder
from supertuner.models.families.flux.sampler import COMPONENTS, build_sampler
from supertuner.models.families.flux.shapes import (
    pack_latents,
    token_coordinates,
    token_count,
    unpack_latents,
    unsupported_reason,
)
from supertuner.models.families.flux.tiny import write_tiny_pipeline
from supertuner.models.families.image_common import build_media_encoder
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource, Tensors

NAME: Final = "flux"
TRAINING_GUIDANCE: Final = 1.0
"""What a distilled model is told while it learns: no guidance, so that what it learns is the data."""


def read_model(source: ModelSource) -> ModelDescription:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_component_configs(source, index, COMPONENTS)
    distilled = configs["transformer"].get("guidance_embeds")
    return ModelDescription(
        source=source,
        title=f"Flux, {'guidance is an input' if distilled else 'without guidance'}",
        experts=(Expert("model", "transformer"),),
        media_kinds=frozenset({MediaKind.IMAGE}),
        shift=reading.largest_shift(source, configs, 1.15),
        configs=configs,
    )


def text_files(model: ModelDescription) -> Sequence[Path]:
    return reading.component_files(model.source, ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))


def denoise(
    model: ModelDescription,
    module: nn.Module,
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    text: Tensors,
    conditions: Tensors,
) -> torch.Tensor:
    """As the pipeline calls it: tokens in rows, where each stands, and the level as it is (the model multiplies)."""
    embeds = text["embeds"]
    has_guidance_input = bool(model.configs["transformer"].get("guidance_embeds"))
    predicted = module(
        hidden_states=pack_latents(noisy),
        timestep=sigmas,
        guidance=torch.full_like(sigmas, TRAINING_GUIDANCE) if has_guidance_input else None,
        pooled_projections=text["pooled"],
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(embeds.shape[1], 3, device=noisy.device),
        img_ids=token_coordinates(noisy.shape, noisy.device),
        return_dict=False,
    )[0]
    return unpack_latents(predicted, noisy.shape)


def pad_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """All captions have the same length: see `FluxTextEncoder`."""
    return {name: torch.stack([caption[name] for caption in captions]) for name in ("embeds", "pooled")}


_MLP: Final = ("net.0.proj", "net.2", "proj_mlp", "proj_out")
_OTHER_LINEAR: Final = ("x_embedder", "context_embedder", "linear_1", "linear_2", "linear")
"""Embedders, and the layers that modulate norms; schnell has one embedder less, so they are named by their endings."""

FAMILY: Final = Family(
    name=NAME,
    prediction="flow",
    read_model=read_model,
    media_files=reading.vae_files,
    text_files=text_files,
    build_media_encoder=build_media_encoder,
    build_text_encoder=build_text_encoder,
    unsupported_reason=unsupported_reason,
    load_denoiser=loading.load_denoiser,
    denoise=denoise,
    pad_text=pad_text,
    token_count=token_count,
    build_sampler=build_sampler,
    target_presets=target_presets(JOINT_ATTENTION, _MLP, _OTHER_LINEAR),
    export_prefix={"transformer": "transformer"},
    write_tiny_pipeline=write_tiny_pipeline,
)

"""Stable Diffusion 3 and 3.5: pictures from captions by flow matching, with three text encoders and one expert."""

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
from supertuner.models.families import image_common as pictures
from supertuner.models.families.sd35.encoders import build_text_encoder
from supertuner.models.families.sd35.sampler import COMPONENTS, build_sampler, patch_size, unsupported_reason
from supertuner.models.families.sd35.tiny import write_tiny_pipeline
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource, Tensors

NAME: Final = "sd3.5"


def read_model(source: ModelSource) -> ModelDescription:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_component_configs(source, index, COMPONENTS)
    return ModelDescription(
        source=source,
        title=f"Stable Diffusion {'3.5' if configs['transformer'].get('qk_norm') else '3'}",
        experts=(Expert("model", "transformer"),),
        media_kinds=frozenset({MediaKind.IMAGE}),
        shift=reading.largest_shift(source, configs, 1.16),
        configs=configs,
    )


def text_files(model: ModelDescription) -> Sequence[Path]:
    return reading.component_files(
        model.source, tuple(part for part in COMPONENTS if part.startswith(("text", "token")))
    )


def denoise(
    model: ModelDescription,
    module: nn.Module,
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    text: Tensors,
    conditions: Tensors,
) -> torch.Tensor:
    """As the pipeline calls it: latents as they are, and the level in thousandths."""
    predicted: torch.Tensor = module(
        hidden_states=noisy,
        timestep=sigmas * 1000,
        encoder_hidden_states=text["embeds"],
        pooled_projections=text["pooled"],
        return_dict=False,
    )[0]
    return predicted


def pad_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """All captions have the same length: see `Sd35TextEncoder`."""
    return {name: torch.stack([caption[name] for caption in captions]) for name in ("embeds", "pooled")}


def token_count(model: ModelDescription, shape: tuple[int, ...]) -> int:
    """Latents are CHW."""
    _, height, width = shape
    return (height // patch_size(model)) * (width // patch_size(model))


_MLP: Final = ("net.0.proj", "net.2")
_OTHER_LINEAR: Final = ("context_embedder", "linear_1", "linear_2", "linear", "proj_out")
"""Embedders, the layers that modulate norms, and the last layer."""

FAMILY: Final = Family(
    name=NAME,
    prediction="flow",
    read_model=read_model,
    media_files=reading.vae_files,
    text_files=text_files,
    build_media_encoder=pictures.build_media_encoder,
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
    batched_guidance=True,
)

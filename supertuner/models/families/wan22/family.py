"""Wan2.2: text-to-video and image-to-video with two experts, and the 5B with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models import loading
from supertuner.models import pipeline_files as reading
from supertuner.models.adapters.targets import SELF_ATTENTION, target_presets
from supertuner.models.families.wan22.encoders import MAX_TEXT_TOKENS, build_media_encoder, build_text_encoder
from supertuner.models.families.wan22.sampler import build_sampler
from supertuner.models.families.wan22.shapes import token_count, unsupported_reason
from supertuner.models.families.wan22.tiny import write_tiny_pipeline
from supertuner.models.pipeline_files import ConfigDict
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource, Tensors

NAME: Final = "wan2.2"
TRAIN_TIMESTEPS: Final = 1000


def read_model(source: ModelSource) -> ModelDescription:
    source, index = reading.read_index(source, NAME)
    experts = _experts(source, index)
    components = (*(expert.component for expert in experts), "vae", "text_encoder", "tokenizer", "scheduler")
    configs = reading.read_component_configs(source, index, components)
    if reason := _unsupported_variant(index, configs):
        raise ModelError(f"{source.path} {reason}")
    return ModelDescription(
        source=source,
        title=_title(index, len(experts)),
        experts=experts,
        media_kinds=frozenset({MediaKind.VIDEO} if _is_image_to_video(index) else {MediaKind.IMAGE, MediaKind.VIDEO}),
        shift=reading.positive_number(source, configs, "scheduler", ("flow_shift", "shift"), 1.0),
        configs=configs,
        needs_first_frame=_is_image_to_video(index),
    )


def _experts(source: ModelSource, index: ConfigDict) -> tuple[Expert, ...]:
    """The pipeline gives timesteps from the boundary on to the first, and those below it to the second."""
    boundary = index.get("boundary_ratio")
    if boundary is None:
        return (Expert("model", "transformer"),)
    if not isinstance(boundary, float) or not 0 < boundary < 1:
        raise ModelError(f"{source.path}: {reading.INDEX_NAME}: boundary_ratio is {boundary!r}, not between 0 and 1")
    return (
        Expert("high_noise", "transformer", sigma_min=float(boundary)),
        Expert("low_noise", "transformer_2", sigma_max=float(boundary)),
    )


def _title(index: ConfigDict, experts: int) -> str:
    version = "Wan2.2" if experts == 2 or index.get("expand_timesteps") else "Wan2.1"
    task = "image-to-video" if _is_image_to_video(index) else "text-to-video"
    return f"{version} {task}, {'two experts' if experts == 2 else 'one expert'}"


def _is_image_to_video(index: ConfigDict) -> bool:
    return bool(index["_class_name"] == "WanImageToVideoPipeline")


def _unsupported_variant(index: ConfigDict, configs: Mapping[str, ConfigDict]) -> str | None:
    if configs["transformer"].get("image_dim") is not None:
        return "reads its first frame through an image encoder, as Wan2.1 did; Wan2.2 image-to-video is supported"
    if _is_image_to_video(index) and index.get("expand_timesteps"):
        return "is the 5B as image-to-video; its repository's WanPipeline (text-to-video) is supported"
    return None


def text_files(model: ModelDescription) -> Sequence[Path]:
    return reading.component_files(model.source, ("text_encoder", "tokenizer"))


def denoise(
    model: ModelDescription,
    module: nn.Module,
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    text: Tensors,
    conditions: Tensors,
) -> torch.Tensor:
    """As the pipelines call it: a condition beside the latents; in the 5B a timestep for every token."""
    timestep = sigmas * TRAIN_TIMESTEPS
    if model.configs[""].get("expand_timesteps"):
        timestep = timestep[:, None].expand(-1, token_count(model, tuple(noisy.shape[1:])))
    if "condition" in conditions:
        noisy = torch.cat([noisy, conditions["condition"].to(noisy.dtype)], dim=1)
    predicted = module(hidden_states=noisy, timestep=timestep, encoder_hidden_states=text["embeds"], return_dict=False)[
        0
    ]
    assert isinstance(predicted, torch.Tensor)
    return predicted


def pad_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """Zeros up to the length that the pipeline uses; the model sees them, so they belong to it."""
    first = captions[0]["embeds"]
    padded = first.new_zeros(len(captions), MAX_TEXT_TOKENS, first.shape[-1])
    for row, caption in zip(padded, captions, strict=True):
        row[: len(caption["embeds"])] = caption["embeds"]
    return {"embeds": padded}


_MLP: Final = ("ffn.net.0.proj", "ffn.net.2")
_OTHER_LINEAR: Final = ("linear_1", "linear_2", "time_proj", "proj_out")
"""Embedders of time and text, and the last layer."""

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
    target_presets=target_presets(SELF_ATTENTION, _MLP, _OTHER_LINEAR),
    # Each expert's adapter is a file of its own, and diffusers wants the same prefix in both (load_into_transformer_2).
    export_prefix={"transformer": "transformer", "transformer_2": "transformer"},
    write_tiny_pipeline=write_tiny_pipeline,
)

"""Qwen-Image: pictures from captions, one expert, told by a language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models import loading
from supertuner.models import pipeline_files as reading
from supertuner.models.adapters.targets import JOINT_ATTENTION, target_presets
from supertuner.models.families.flux.shapes import pack_latents, token_count, unpack_latents
from supertuner.models.families.qwen_image.encoders import build_media_encoder, build_text_encoder, pad_text
from supertuner.models.families.qwen_image.sampler import COMPONENTS, build_sampler
from supertuner.models.families.qwen_image.shapes import token_grid, unsupported_reason
from supertuner.models.families.qwen_image.tiny import write_tiny_pipeline
from supertuner.models.pipeline_files import ConfigDict
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource, Tensors

NAME: Final = "qwen-image"
REFERENCE_TOKENS: Final = 4096
"""Of a picture of 1024×1024."""


def read_model(source: ModelSource) -> ModelDescription:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_component_configs(source, index, COMPONENTS)
    require_supported(source, configs)
    return ModelDescription(
        source=source,
        title="Qwen-Image",
        experts=(Expert("model", "transformer"),),
        media_kinds=frozenset({MediaKind.IMAGE}),
        shift=scheduler_shift(source, configs),
        configs=configs,
    )


def require_supported(source: ModelSource, configs: Mapping[str, ConfigDict]) -> None:
    for key in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
        if configs["transformer"].get(key):
            raise ModelError(f"{source.path}: the config of transformer: {key} is true, which is not trained here")


def scheduler_shift(source: ModelSource, configs: Mapping[str, ConfigDict]) -> float:
    """With dynamic shifting the scheduler's shift grows with the picture; this is that of 1024×1024."""
    if not configs["scheduler"].get("use_dynamic_shifting"):
        return reading.positive_number(source, configs, "scheduler", ("shift",), 1.0)

    def entry(key: str, default: float) -> float:
        return reading.positive_number(source, configs, "scheduler", (key,), default)

    low, high = entry("base_shift", 0.5), entry("max_shift", 1.15)
    few, many = entry("base_image_seq_len", 256), entry("max_image_seq_len", 4096)
    return math.exp(low + (high - low) * (REFERENCE_TOKENS - few) / (many - few))


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
    """As the pipeline calls it: tokens in rows, how many rows and columns they were, and the level as it is."""
    return unpack_latents(
        predict_tokens(module, pack_latents(noisy), [token_grid(noisy.shape)], sigmas, text), noisy.shape
    )


def predict_tokens(
    module: nn.Module, packed: torch.Tensor, grids: Sequence[tuple[int, int, int]], sigmas: torch.Tensor, text: Tensors
) -> Any:
    """What the module says about tokens of pictures of these grids, one behind the other."""
    return module(
        hidden_states=packed,
        timestep=sigmas,
        guidance=None,
        encoder_hidden_states_mask=text.get("mask"),
        encoder_hidden_states=text["embeds"],
        img_shapes=[list(grids)] * len(packed),
        attention_kwargs={},
        return_dict=False,
    )[0]


_MLP: Final = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
_OTHER_LINEAR: Final = (
    "img_mod.1",
    "txt_mod.1",
    "img_in",
    "txt_in",
    "linear_1",
    "linear_2",
    "norm_out.linear",
    "proj_out",
)
"""Layers that modulate norms, embedders, and the last layers."""

TARGET_PRESETS: Final[Mapping[str, Sequence[str]]] = target_presets(JOINT_ATTENTION, _MLP, _OTHER_LINEAR)

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
    target_presets=TARGET_PRESETS,
    export_prefix={"transformer": "transformer"},
    write_tiny_pipeline=write_tiny_pipeline,
)

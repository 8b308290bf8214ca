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
from supertuner.models import loading, reading
from supertuner.models.adapters.targets import JOINT_ATTENTION, presets
from supertuner.models.families.flux.shapes import pack, tokens, unpack
from supertuner.models.families.qwen_image.encoders import media_encoder, pad_text, text_encoder
from supertuner.models.families.qwen_image.sampler import PARTS, sampler
from supertuner.models.families.qwen_image.shapes import grid, why_not
from supertuner.models.families.qwen_image.tiny import tiny
from supertuner.models.reading import Config
from supertuner.models.spec import Expert, Family, Model, Source, Tensors

NAME: Final = "qwen-image"
TOKENS: Final = 4096
"""Of a picture of 1024×1024."""


def read(source: Source) -> Model:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_parts(source, index, PARTS)
    require_supported(source, configs)
    return Model(
        source=source,
        title="Qwen-Image",
        experts=(Expert("model", "transformer"),),
        kinds=frozenset({MediaKind.IMAGE}),
        shift=scheduler_shift(source, configs),
        configs=configs,
    )


def require_supported(source: Source, configs: Mapping[str, Config]) -> None:
    for key in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
        if configs["transformer"].get(key):
            raise ModelError(f"{source.path}: the config of transformer: {key} is true, which is not trained here")


def scheduler_shift(source: Source, configs: Mapping[str, Config]) -> float:
    """With dynamic shifting the scheduler's shift grows with the picture; this is that of 1024×1024."""
    if not configs["scheduler"].get("use_dynamic_shifting"):
        return reading.positive(source, configs, "scheduler", ("shift",), 1.0)

    def entry(key: str, default: float) -> float:
        return reading.positive(source, configs, "scheduler", (key,), default)

    low, high = entry("base_shift", 0.5), entry("max_shift", 1.15)
    few, many = entry("base_image_seq_len", 256), entry("max_image_seq_len", 4096)
    return math.exp(low + (high - low) * (TOKENS - few) / (many - few))


def text_files(model: Model) -> Sequence[Path]:
    return reading.files_of(model.source, ("text_encoder", "tokenizer"))


def denoise(
    model: Model, module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    """As the pipeline calls it: tokens in rows, how many rows and columns they were, and the level as it is."""
    return unpack(told(module, pack(noisy), [grid(noisy.shape)], levels, text), noisy.shape)


def told(
    module: nn.Module, packed: torch.Tensor, grids: Sequence[tuple[int, int, int]], levels: torch.Tensor, text: Tensors
) -> Any:
    """What the module says about tokens of pictures of these grids, one behind the other."""
    return module(
        hidden_states=packed,
        timestep=levels,
        guidance=None,
        encoder_hidden_states_mask=text.get("mask"),
        encoder_hidden_states=text["embeds"],
        img_shapes=[list(grids)] * len(packed),
        attention_kwargs={},
        return_dict=False,
    )[0]


_MLP: Final = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
_REST: Final = ("img_mod.1", "txt_mod.1", "img_in", "txt_in", "linear_1", "linear_2", "norm_out.linear", "proj_out")
"""Layers that modulate norms, embedders, and the last layers."""

TARGETS: Final[Mapping[str, Sequence[str]]] = presets(JOINT_ATTENTION, _MLP, _REST)

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
    targets=TARGETS,
    export_prefix={"transformer": "transformer"},
    tiny=tiny,
)

"""Wan2.2: text-to-video and image-to-video with two experts, and the 5B with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models import loading, reading
from supertuner.models.adapters.targets import SELF_ATTENTION, presets
from supertuner.models.families.wan22.encoders import TEXT_LENGTH, media_encoder, text_encoder
from supertuner.models.families.wan22.sampler import sampler
from supertuner.models.families.wan22.shapes import tokens, why_not
from supertuner.models.families.wan22.tiny import tiny
from supertuner.models.reading import Config
from supertuner.models.spec import Expert, Family, Model, Source, Tensors

NAME: Final = "wan2.2"
TRAIN_STEPS: Final = 1000


def read(source: Source) -> Model:
    source, index = reading.read_index(source, NAME)
    experts = _experts(source, index)
    parts = (*(expert.part for expert in experts), "vae", "text_encoder", "tokenizer", "scheduler")
    configs = reading.read_parts(source, index, parts)
    if why := _unsupported(index, configs):
        raise ModelError(f"{source.path} {why}")
    return Model(
        source=source,
        title=_title(index, len(experts)),
        experts=experts,
        kinds=frozenset({MediaKind.VIDEO} if _from_image(index) else {MediaKind.IMAGE, MediaKind.VIDEO}),
        shift=reading.positive(source, configs, "scheduler", ("flow_shift", "shift"), 1.0),
        configs=configs,
        starts_from_frame=_from_image(index),
    )


def _experts(source: Source, index: Config) -> tuple[Expert, ...]:
    """The pipeline gives timesteps from the boundary on to the first, and those below it to the second."""
    boundary = index.get("boundary_ratio")
    if boundary is None:
        return (Expert("model", "transformer"),)
    if not isinstance(boundary, float) or not 0 < boundary < 1:
        raise ModelError(f"{source.path}: {reading.INDEX}: boundary_ratio is {boundary!r}, not between 0 and 1")
    return (
        Expert("high_noise", "transformer", low=float(boundary)),
        Expert("low_noise", "transformer_2", high=float(boundary)),
    )


def _title(index: Config, experts: int) -> str:
    version = "Wan2.2" if experts == 2 or index.get("expand_timesteps") else "Wan2.1"
    what = "image-to-video" if _from_image(index) else "text-to-video"
    return f"{version} {what}, {'two experts' if experts == 2 else 'one expert'}"


def _from_image(index: Config) -> bool:
    return bool(index["_class_name"] == "WanImageToVideoPipeline")


def _unsupported(index: Config, configs: Mapping[str, Config]) -> str | None:
    if configs["transformer"].get("image_dim") is not None:
        return "reads its first frame through an image encoder, as Wan2.1 did; Wan2.2 image-to-video is supported"
    if _from_image(index) and index.get("expand_timesteps"):
        return "is the 5B as image-to-video; its repository's WanPipeline (text-to-video) is supported"
    return None


def text_files(model: Model) -> Sequence[Path]:
    return reading.files_of(model.source, ("text_encoder", "tokenizer"))


def denoise(
    model: Model, module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    """As the pipelines call it: a condition beside the latents; in the 5B a timestep for every token."""
    timestep = levels * TRAIN_STEPS
    if model.configs[""].get("expand_timesteps"):
        timestep = timestep[:, None].expand(-1, tokens(model, tuple(noisy.shape[1:])))
    if "condition" in conditions:
        noisy = torch.cat([noisy, conditions["condition"].to(noisy.dtype)], dim=1)
    predicted = module(hidden_states=noisy, timestep=timestep, encoder_hidden_states=text["embeds"], return_dict=False)[
        0
    ]
    assert isinstance(predicted, torch.Tensor)
    return predicted


def pad_text(model: Model, captions: Sequence[Tensors]) -> Tensors:
    """Zeros up to the length that the pipeline uses; the model sees them, so they belong to it."""
    first = captions[0]["embeds"]
    padded = first.new_zeros(len(captions), TEXT_LENGTH, first.shape[-1])
    for row, caption in zip(padded, captions, strict=True):
        row[: len(caption["embeds"])] = caption["embeds"]
    return {"embeds": padded}


_MLP: Final = ("ffn.net.0.proj", "ffn.net.2")
_REST: Final = ("linear_1", "linear_2", "time_proj", "proj_out")
"""Embedders of time and text, and the last layer."""

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
    targets=presets(SELF_ATTENTION, _MLP, _REST),
    # Each expert's adapter is a file of its own, and diffusers wants the same prefix in both (load_into_transformer_2).
    export_prefix={"transformer": "transformer", "transformer_2": "transformer"},
    tiny=tiny,
)

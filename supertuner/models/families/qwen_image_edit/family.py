"""Qwen-Image-Edit: a picture changed as a caption says; Qwen-Image with that picture beside noise and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models import reading
from supertuner.models.families.flux.shapes import pack, unpack
from supertuner.models.families.qwen_image import family as qwen_image
from supertuner.models.families.qwen_image.sampler import PARTS
from supertuner.models.families.qwen_image.shapes import grid
from supertuner.models.families.qwen_image_edit import sampler as qwen_image_edit_sampler
from supertuner.models.families.qwen_image_edit.text import text_encoder
from supertuner.models.families.qwen_image_edit.tiny import tiny
from supertuner.models.spec import Expert, Model, Sampler, Source, Tensors

NAME: Final = "qwen-image-edit"


def read(source: Source) -> Model:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_parts(source, index, PARTS)
    qwen_image.require_supported(source, configs)
    if not index.get("processor"):
        raise ModelError(f"{source.path}: its {reading.INDEX} names no processor, which this family needs")
    return Model(
        source=source,
        title="Qwen-Image-Edit",
        experts=(Expert("model", "transformer"),),
        kinds=frozenset({MediaKind.IMAGE}),
        shift=qwen_image.scheduler_shift(source, configs),
        configs=configs,
        edits=True,
    )


def text_files(model: Model) -> Sequence[Path]:
    folder = reading.folder_of(model.source, ("processor",)) / "processor"
    prepared = sorted(file for file in folder.iterdir() if file.suffix in reading.SMALL and file.is_file())
    return (*qwen_image.text_files(model), *prepared)


def denoise(
    model: Model, module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    """As the pipeline calls it: the tokens of the picture to change behind those of the noise, and left out after."""
    source = conditions["condition"].to(noisy.dtype)
    tokens = pack(noisy)
    both = torch.cat([tokens, pack(source)], dim=1)
    said = qwen_image.told(module, both, [grid(noisy.shape), grid(source.shape)], levels, text)
    return unpack(said[:, : tokens.shape[1]], noisy.shape)


def sampler(model: Model, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> Sampler:
    return qwen_image_edit_sampler.sampler(model, denoise, modules, device, dtype)


FAMILY: Final = replace(
    qwen_image.FAMILY,
    name=NAME,
    read=read,
    text_files=text_files,
    text_encoder=text_encoder,
    denoise=denoise,
    sampler=sampler,
    tiny=tiny,
)

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
from supertuner.models import pipeline_files as reading
from supertuner.models.families.flux.shapes import pack_latents, unpack_latents
from supertuner.models.families.qwen_image import family as qwen_image
from supertuner.models.families.qwen_image.sampler import COMPONENTS
from supertuner.models.families.qwen_image.shapes import token_grid
from supertuner.models.families.qwen_image_edit import sampler as qwen_image_edit_sampler
from supertuner.models.families.qwen_image_edit.encoders import build_text_encoder
from supertuner.models.families.qwen_image_edit.tiny import write_tiny_pipeline
from supertuner.models.spec import Expert, ModelDescription, ModelSampler, ModelSource, Tensors

NAME: Final = "qwen-image-edit"


def read_model(source: ModelSource) -> ModelDescription:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_component_configs(source, index, COMPONENTS)
    qwen_image.require_supported(source, configs)
    if not index.get("processor"):
        raise ModelError(f"{source.path}: its {reading.INDEX_NAME} names no processor, which this family needs")
    return ModelDescription(
        source=source,
        title="Qwen-Image-Edit",
        experts=(Expert("model", "transformer"),),
        media_kinds=frozenset({MediaKind.IMAGE}),
        shift=qwen_image.scheduler_shift(source, configs),
        configs=configs,
        edits_images=True,
    )


def text_files(model: ModelDescription) -> Sequence[Path]:
    folder = reading.pipeline_folder(model.source, ("processor",)) / "processor"
    processor_files = sorted(
        file for file in folder.iterdir() if file.suffix in reading.CONFIG_SUFFIXES and file.is_file()
    )
    return (*qwen_image.text_files(model), *processor_files)


def denoise(
    model: ModelDescription,
    module: nn.Module,
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    text: Tensors,
    conditions: Tensors,
) -> torch.Tensor:
    """As the pipeline calls it: the tokens of the picture to change behind those of the noise, and left out after."""
    reference = conditions["condition"].to(noisy.dtype)
    tokens = pack_latents(noisy)
    packed = torch.cat([tokens, pack_latents(reference)], dim=1)
    predicted = qwen_image.predict_tokens(
        module, packed, [token_grid(noisy.shape), token_grid(reference.shape)], sigmas, text
    )
    return unpack_latents(predicted[:, : tokens.shape[1]], noisy.shape)


def build_sampler(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> ModelSampler:
    return qwen_image_edit_sampler.build_sampler(model, denoise, modules, device, dtype)


FAMILY: Final = replace(
    qwen_image.FAMILY,
    name=NAME,
    read_model=read_model,
    text_files=text_files,
    build_text_encoder=build_text_encoder,
    denoise=denoise,
    build_sampler=build_sampler,
    write_tiny_pipeline=write_tiny_pipeline,
)

"""Qwen-Image-Edit: changes an image as a caption says; Qwen-Image with the tokens of that image beside the noise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import Qwen2VLImageProcessorPil

from supertuner.core.errors import ModelError
from supertuner.core.permissions import follow_umask
from supertuner.models import pipeline_files
from supertuner.models.families.image_common import image_model, pack_latents, unpack_latents
from supertuner.models.families.qwen_image import family as qwen_image
from supertuner.models.families.qwen_image.tiny import tiny_qwen_pipeline
from supertuner.models.families.qwen_image_edit.encoders import build_text_encoder
from supertuner.models.families.qwen_image_edit.sampler import QwenEditSampler
from supertuner.models.families.sampling_common import pipeline_components
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.library_guards import quiet_libraries
from supertuner.models.pipeline_files import INDEX_NAME
from supertuner.models.spec import ModelDescription, ModelSource, Tensors

NAME: Final = "qwen-image-edit"


def read_model(source: ModelSource) -> ModelDescription:
    source, configs = pipeline_files.read_pipeline(source, NAME, qwen_image.COMPONENTS)
    qwen_image.require_supported(source, configs)
    if not configs[""].get("processor"):
        raise ModelError(f"{source.path}: its {INDEX_NAME} names no processor, which this family needs")
    shift = qwen_image.scheduler_shift(source, configs)
    return image_model(source, configs, title="Qwen-Image-Edit", shift=shift, edits_images=True)


def text_files(model: ModelDescription) -> Sequence[Path]:
    folder = pipeline_files.pipeline_folder(model.source, ("processor",)) / "processor"
    return (*pipeline_files.text_files(model), *pipeline_files.config_files(folder))


def denoise(
    model: ModelDescription, module: nn.Module, noisy: Tensor, sigmas: Tensor, text: Tensors, conditions: Tensors
) -> Tensor:
    """Calls the transformer as the pipeline does: the reference image's tokens follow those of the noisy latents, and
    the predictions for them are dropped."""
    reference = conditions["condition"].to(noisy.dtype)
    tokens = pack_latents(noisy)
    packed = torch.cat([tokens, pack_latents(reference)], dim=1)
    grids = [qwen_image.token_grid(noisy.shape), qwen_image.token_grid(reference.shape)]
    predicted = qwen_image.predict_tokens(module, packed, grids, sigmas, text)
    return unpack_latents(predicted[:, : tokens.shape[1]], noisy.shape)


def build_sampler(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> QwenEditSampler:
    return QwenEditSampler(model, pipeline_components(model, modules, device, dtype), denoise, device, dtype)


def write_pipeline(folder: Path, seed: int) -> None:
    """Write the tiny Qwen-Image with an image processor into a new folder with the layout of repositories on the hub.

    The index is edited by hand: creating the pipeline's processor class needs torchvision.
    """
    pipeline = build_pipeline(tiny_qwen_pipeline, seed)
    with quiet_libraries():
        pipeline.save_pretrained(folder)
        pipeline.tokenizer.save_pretrained(folder / "processor")
        Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 1280).save_pretrained(folder / "processor")
    index = json.loads((folder / INDEX_NAME).read_bytes())
    index |= {"_class_name": "QwenImageEditPipeline", "processor": ["transformers", "Qwen2VLProcessor"]}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    follow_umask(folder)


FAMILY: Final = replace(
    qwen_image.FAMILY,
    name=NAME,
    read_model=read_model,
    text_files=text_files,
    build_text_encoder=build_text_encoder,
    denoise=denoise,
    build_sampler=build_sampler,
    write_tiny_pipeline=write_pipeline,
)

"""The family's interface: Wan's, with a third denoiser for the lowest noise levels and a sampler of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.core.types import MediaKind
from supertuner.models import loading
from supertuner.models.families.tiny_pipelines import build_pipeline, write_pipeline
from supertuner.models.families.wan22.family import FAMILY as WAN
from supertuner.models.families.wan22.family import tiny_wan_pipeline
from supertuner.models.pipeline_files import INDEX_NAME, read_component_configs, read_index
from supertuner.models.spec import Expert, ModelDescription, ModelSource, SampleRequest

NAME = "three-stages"
EXPERTS = (
    Expert("early", "transformer", sigma_min=0.8),
    Expert("middle", "transformer_2", sigma_min=0.4, sigma_max=0.8),
    Expert("late", "transformer_3", sigma_max=0.4),
)
LATENTS_PER_PIXEL = 8


def read_model(source: ModelSource) -> ModelDescription:
    source, index = read_index(source, NAME)
    components = (*(expert.component for expert in EXPERTS), "vae", "text_encoder", "tokenizer", "scheduler")
    return ModelDescription(
        source=source,
        title="three stages",
        experts=EXPERTS,
        media_kinds=frozenset({MediaKind.IMAGE}),
        shift=1.0,
        configs=read_component_configs(source, index, components),
    )


class EulerSampler:
    """Ten lines of flow matching: each step asks the expert of its noise level."""

    def __init__(self, model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        self._model, self._modules, self._device = model, modules, device
        self._vae = loading.load_module(model, "vae", torch.float32)
        self._text = WAN.build_text_encoder(model, device, torch.float32)

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        text = WAN.pad_text(self._model, self._text.encode([request.prompt]))
        shape = (1, 16, 1, request.height // LATENTS_PER_PIXEL, request.width // LATENTS_PER_PIXEL)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(request.seed))
        sigmas = torch.linspace(1, 0, request.inference_steps + 1)
        for sigma, following in pairwise(sigmas):
            expert = next(one for one in EXPERTS if sigma >= one.sigma_min)
            velocity = WAN.denoise(
                self._model, self._modules[expert.component], latents, sigma.reshape(1), text, {}
            ).float()
            latents = latents + (following - sigma) * velocity
        pixels = self._vae.decode(latents, return_dict=False)[0][0].permute(1, 2, 3, 0)
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()


def build_sampler(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> EulerSampler:
    loaded = {
        one.component: loading.load_denoiser(model, one, dtype) for one in EXPERTS if one.component not in modules
    }
    return EulerSampler(model, {**modules, **loaded}, device)


def write_tiny_pipeline(folder: Path, seed: int) -> None:
    write_pipeline(tiny_wan_pipeline, folder, seed)
    build_pipeline(tiny_wan_pipeline, seed + 1).transformer.save_pretrained(folder / "transformer_3")
    index = json.loads((folder / INDEX_NAME).read_text())
    index |= {"_class_name": "ThreeStagePipeline", "transformer_3": index["transformer_2"]}
    (folder / INDEX_NAME).write_text(json.dumps(index))


FAMILY = replace(
    WAN,
    name=NAME,
    read_model=read_model,
    build_sampler=build_sampler,
    write_tiny_pipeline=write_tiny_pipeline,
    export_prefix={expert.component: "transformer" for expert in EXPERTS},
)

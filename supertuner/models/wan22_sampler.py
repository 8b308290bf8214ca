"""Samples of Wan2.2 through its own diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models import loading, sampling
from supertuner.models.spec import Model, SampleRequest


class WanSampler:
    def __init__(self, pipeline: Any, denoisers: tuple[nn.Module, ...], device: torch.device, dtype: torch.dtype):
        self._pipeline = pipeline
        self._denoisers = denoisers
        self._device = device
        self._dtype = dtype

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        with sampling.computing(self._denoisers, self._device, self._dtype):
            videos = self._pipeline(
                **self._first_frame(request),
                prompt=request.prompt,
                negative_prompt=request.negative_prompt,
                height=request.height,
                width=request.width,
                num_frames=request.frames,
                num_inference_steps=request.inference_steps,
                guidance_scale=request.guidance_scale,
                generator=torch.Generator().manual_seed(request.seed),
                output_type="np",
            ).frames
        return sampling.frames_FHWC(videos[0])

    def _first_frame(self, request: SampleRequest) -> dict[str, Any]:
        if not isinstance(self._pipeline, diffusers.WanImageToVideoPipeline):
            return {}
        if request.image is None:
            raise ModelError(f"no first frame is given for the sample {request.prompt!r}: this model starts from one")
        return {"image": Image.fromarray(request.image)}


def sampler(model: Model, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> WanSampler:
    """The pipeline around `modules`; the VAE computes in fp32, the text encoder in `dtype`."""
    parts: dict[str, Any] = dict(modules)
    for expert in model.experts:
        parts.setdefault(expert.part, None)
        if parts[expert.part] is None:
            parts[expert.part] = loading.module(model, expert.part, dtype).to(device)
    parts.setdefault("transformer_2", None)
    if "vae" not in parts:
        parts["vae"] = loading.module(model, "vae", torch.float32).to(device)
    if "text_encoder" not in parts:
        parts["text_encoder"] = loading.module(model, "text_encoder", dtype).to(device)
    for part in ("tokenizer", "scheduler"):
        parts[part] = loading.plain(model, part)
    index = model.configs[""]
    kind = getattr(diffusers, str(index["_class_name"]))
    if kind is diffusers.WanImageToVideoPipeline:
        parts |= {"image_encoder": None, "image_processor": None}
    pipeline = kind(
        **parts, boundary_ratio=index.get("boundary_ratio"), expand_timesteps=bool(index.get("expand_timesteps"))
    )
    pipeline.set_progress_bar_config(disable=True)
    return WanSampler(pipeline, tuple(parts[expert.part] for expert in model.experts), device, dtype)

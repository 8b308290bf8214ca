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
from supertuner.models.families import sampling_common as sampling
from supertuner.models.families.wan22.shapes import unsupported_reason
from supertuner.models.spec import ModelDescription, SampleRequest


class WanSampler:
    def __init__(self, model: ModelDescription, pipeline: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._pipeline = pipeline
        self._denoisers = [getattr(pipeline, expert.component) for expert in model.experts]
        self._device = device
        self._dtype = dtype

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        if reason := unsupported_reason(self._model, (3, request.frames, request.height, request.width)):
            raise ModelError(f"the sample {request.prompt!r} cannot be made: {reason}")
        with sampling.eval_with_autocast(self._denoisers, self._device, self._dtype):
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
        return sampling.to_uint8(videos[0])

    def _first_frame(self, request: SampleRequest) -> dict[str, Any]:
        if not isinstance(self._pipeline, diffusers.WanImageToVideoPipeline):
            return {}
        if request.image is None:
            raise ModelError(f"the sample {request.prompt!r} has no first frame, and this model starts from one")
        return {"image": Image.fromarray(request.image)}


def build_sampler(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> WanSampler:
    """The pipeline around `modules`; what is not among them is loaded."""
    names = (*(expert.component for expert in model.experts), "vae", "text_encoder", "tokenizer", "scheduler")
    components = sampling.pipeline_components(model, modules, names, device, dtype)
    components.setdefault("transformer_2", None)
    index = model.configs[""]
    pipeline_class = getattr(diffusers, str(index["_class_name"]))
    if pipeline_class is diffusers.WanImageToVideoPipeline:
        components |= {"image_encoder": None, "image_processor": None}
    pipeline = pipeline_class(
        **components, boundary_ratio=index.get("boundary_ratio"), expand_timesteps=bool(index.get("expand_timesteps"))
    )
    pipeline.set_progress_bar_config(disable=True)
    return WanSampler(model, pipeline, device, dtype)

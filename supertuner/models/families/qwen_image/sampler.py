"""Samples of Qwen-Image through its own diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models.families import sampling_common as sampling
from supertuner.models.families.qwen_image.prompts import TEXT_TO_IMAGE
from supertuner.models.families.qwen_image.shapes import unsupported_reason
from supertuner.models.spec import ModelDescription, SampleRequest

COMPONENTS: Final = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")


class QwenSampler:
    """Guidance is by a second prediction for the negative prompt, rescaled to the norm of the first."""

    def __init__(self, model: ModelDescription, pipeline: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._pipeline = pipeline
        self._device = device
        self._dtype = dtype

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        if request.frames != 1:
            raise ModelError(f"the sample {request.prompt!r} has {request.frames} frames; Qwen-Image makes pictures")
        reason = unsupported_reason(self._model, (3, request.height, request.width))
        if reason := reason or too_few_steps_reason(self._pipeline.scheduler, request):
            raise ModelError(f"the sample {request.prompt!r} cannot be made: {reason}")
        guided = request.guidance_scale > 1
        with sampling.eval_with_autocast([self._pipeline.transformer], self._device, self._dtype):
            images = self._pipeline(
                prompt=request.prompt,
                negative_prompt=request.negative_prompt if guided else None,
                true_cfg_scale=request.guidance_scale,
                height=request.height,
                width=request.width,
                num_inference_steps=request.inference_steps,
                generator=torch.Generator().manual_seed(request.seed),
                max_sequence_length=TEXT_TO_IMAGE.max_caption_tokens,
                output_type="np",
            ).images
        return sampling.to_uint8(images)


def too_few_steps_reason(scheduler: Any, request: SampleRequest) -> str | None:
    """The scheduler moves its last level to `shift_terminal` and the others with it, which one alone cannot."""
    if request.inference_steps > 1 or not scheduler.config.shift_terminal:
        return None
    return f"inference_steps is {request.inference_steps}, and this model's scheduler needs at least 2"


def build_sampler(
    model: ModelDescription, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> QwenSampler:
    """The pipeline around `modules`; what is not among them is loaded. Its VAE decodes in fp32."""
    pipeline = diffusers.QwenImagePipeline(**sampling.pipeline_components(model, modules, COMPONENTS, device, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return QwenSampler(model, pipeline, device, dtype)

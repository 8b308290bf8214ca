"""Samples of Qwen-Image-Edit: the loop of its pipeline, with the picture in the size that it has.

The pipeline itself makes every picture one of a megapixel, and wants torchvision. In all else they are the same, to the
bit; a test holds them against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_shift
from numpy.typing import NDArray
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models.families import sampling_common as sampling
from supertuner.models.families.flux.shapes import pack, unpack
from supertuner.models.families.qwen_image.encoders import QwenMediaEncoder
from supertuner.models.families.qwen_image.sampler import PARTS, why_not_so_fast
from supertuner.models.families.qwen_image.shapes import pixels_per_latent, why_not
from supertuner.models.families.qwen_image_edit.text import QwenEditTextEncoder, reader
from supertuner.models.spec import Model, SampleRequest, Tensors

Denoise = Callable[[Model, nn.Module, torch.Tensor, torch.Tensor, Tensors, Tensors], torch.Tensor]


class QwenEditSampler:
    def __init__(
        self, model: Model, parts: Mapping[str, Any], denoise: Denoise, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model, self._denoise, self._device, self._dtype = model, denoise, device, dtype
        self._module, self._vae, self._scheduler = parts["transformer"], parts["vae"], parts["scheduler"]
        self._media = QwenMediaEncoder(parts["vae"], device)
        self._text = QwenEditTextEncoder(reader(model), parts["text_encoder"], device)

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        if why := self._why_not(request):
            raise ModelError(f"the sample {request.prompt!r} cannot be made: {why}")
        source = torch.from_numpy(np.array(request.image)).permute(2, 0, 1)
        with sampling.computing([self._module], self._device, self._dtype):
            latents = self._loop(request, source)
        return sampling.uint8(self._pixels(latents))

    def _why_not(self, request: SampleRequest) -> str | None:
        if request.image is None:
            return "it has no picture, and this model changes one"
        if request.frames != 1:
            return f"it has {request.frames} frames, and Qwen-Image-Edit makes pictures"
        if why := why_not(self._model, (3, *request.image.shape[:2])):
            return f"of the picture to change: {why}"
        return why_not(self._model, (3, request.height, request.width)) or why_not_so_fast(self._scheduler, request)

    def _loop(self, request: SampleRequest, source: torch.Tensor) -> torch.Tensor:
        guided = request.guidance_scale > 1
        texts = [self._told(prompt, source) for prompt in (request.prompt, request.negative_prompt)[: 1 + guided]]
        latents = self._noise(request, texts[0]["embeds"].dtype)
        condition = self._media.encode(source[None])["latents"].to(self._device, latents.dtype)
        for step in self._steps(request, latents):
            level = step.expand(1).to(latents.dtype) / 1000
            said = [
                pack(self._denoise(self._model, self._module, latents, level, text, {"condition": condition}))
                for text in texts
            ]
            predicted = _guided(said[0], said[1], request.guidance_scale) if guided else said[0]
            packed = self._scheduler.step(predicted, step, pack(latents), return_dict=False)[0]
            latents = unpack(packed, latents.shape)
        return latents

    def _told(self, prompt: str, source: torch.Tensor) -> Tensors:
        (fields,) = self._text.encode_of([prompt], [source])
        return {name: one[None].to(self._device) for name, one in fields.items()}

    def _noise(self, request: SampleRequest, dtype: torch.dtype) -> torch.Tensor:
        side = pixels_per_latent(self._model)
        shape = (1, self._vae.config.z_dim, request.height // side, request.width // side)
        own = torch.Generator().manual_seed(request.seed)
        return torch.randn(shape, generator=own, dtype=dtype).to(self._device)

    def _steps(self, request: SampleRequest, latents: torch.Tensor) -> Any:
        config, count = self._scheduler.config, request.inference_steps
        mu = calculate_shift(
            pack(latents).shape[1],
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        self._scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / count, count), mu=mu, device=self._device)
        self._scheduler.set_begin_index(0)
        return self._scheduler.timesteps

    def _pixels(self, latents: torch.Tensor) -> Any:
        config = self._vae.config
        frames = latents.to(self._vae.dtype)[:, :, None]
        shape = (1, config.z_dim, 1, 1, 1)
        mean = torch.tensor(config.latents_mean, device=self._device).view(shape)
        inverse_std = 1.0 / torch.tensor(config.latents_std, device=self._device).view(shape)
        decoded = self._vae.decode(frames / inverse_std + mean, return_dict=False)[0][:, :, 0]
        return VaeImageProcessor().postprocess(decoded, output_type="np")


def _guided(said: torch.Tensor, said_of_negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Away from the negative prompt's prediction, in the norm of the prompt's."""
    combined = said_of_negative + scale * (said - said_of_negative)
    norm, of_combined = (torch.linalg.vector_norm(one, dim=-1, keepdim=True) for one in (said, combined))
    rescaled: torch.Tensor = combined * (norm / of_combined)
    return rescaled


def sampler(
    model: Model, denoise: Denoise, modules: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
) -> QwenEditSampler:
    return QwenEditSampler(model, sampling.parts(model, modules, PARTS, device, dtype), denoise, device, dtype)

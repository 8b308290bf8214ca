"""Samples of Qwen-Image-Edit: the denoising loop of its pipeline, with the reference image at its own size.

The diffusers pipeline resizes every reference image to one megapixel and needs torchvision. In all other respects the
results are equal to the bit; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_shift
from numpy.typing import NDArray
from torch import nn

from supertuner.models.families import image_common, sampling_common
from supertuner.models.families.qwen_image.encoders import QwenMediaEncoder, latent_mean_and_std
from supertuner.models.families.qwen_image_edit.encoders import QwenEditTextEncoder, load_processor
from supertuner.models.spec import ModelDescription, SampleRequest, Tensors

Denoise = Callable[[ModelDescription, nn.Module, torch.Tensor, torch.Tensor, Tensors, Tensors], torch.Tensor]


class QwenEditSampler:
    def __init__(
        self,
        model: ModelDescription,
        components: dict[str, Any],
        denoise: Denoise,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`denoise` is the family's function of that name."""
        self._model, self._denoise, self._device, self._dtype = model, denoise, device, dtype
        self._module, self._vae, self._scheduler = components["transformer"], components["vae"], components["scheduler"]
        self._media_encoder = QwenMediaEncoder(components["vae"], device)
        self._text_encoder = QwenEditTextEncoder(load_processor(model), components["text_encoder"], device)

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        sampling_common.require_possible(request, self._unsupported_reason(request))
        reference = torch.from_numpy(np.array(request.image)).permute(2, 0, 1)
        with sampling_common.eval_with_autocast([self._module], self._device, self._dtype):
            latents = self._denoise_loop(request, reference)
        return sampling_common.to_uint8(self._decode(latents))

    def _unsupported_reason(self, request: SampleRequest) -> str | None:
        if request.image is None:
            return "it has no reference image, and this model edits one"
        if reason := image_common.unsupported_reason(self._model, (3, *request.image.shape[:2])):
            return f"its reference image: {reason}"
        problem = sampling_common.request_problem(self._model, request, image_common.unsupported_reason)
        return problem or sampling_common.too_few_steps_reason(self._scheduler, request)

    def _denoise_loop(self, request: SampleRequest, reference: torch.Tensor) -> torch.Tensor:
        guided = request.guidance_scale > 1
        prompts = [request.prompt, request.negative_prompt] if guided else [request.prompt]
        texts = [self._encode_prompt(prompt, reference) for prompt in prompts]
        latents = self._initial_noise(request, texts[0]["embeds"].dtype)
        condition = self._media_encoder.encode(reference[None])["latents"].to(self._device, latents.dtype)
        for step in self._timesteps(request, latents):
            sigma = step.expand(1).to(latents.dtype) / 1000
            inputs = (self._model, self._module, latents, sigma)
            denoised = [self._denoise(*inputs, text, {"condition": condition}) for text in texts]
            predictions = [image_common.pack_latents(prediction) for prediction in denoised]
            predicted = predictions[0]
            if guided:
                predicted = _apply_guidance(predicted, predictions[1], request.guidance_scale)
            packed = self._scheduler.step(predicted, step, image_common.pack_latents(latents), return_dict=False)[0]
            latents = image_common.unpack_latents(packed, latents.shape)
        return latents

    def _encode_prompt(self, prompt: str, reference: torch.Tensor) -> Tensors:
        (fields,) = self._text_encoder.encode_with_images([prompt], [reference])
        return {name: tensor[None].to(self._device) for name, tensor in fields.items()}

    def _initial_noise(self, request: SampleRequest, dtype: torch.dtype) -> torch.Tensor:
        scale_factor = image_common.pixels_per_latent(self._model)
        shape = (1, self._vae.config.z_dim, request.height // scale_factor, request.width // scale_factor)
        generator = torch.Generator().manual_seed(request.seed)
        return torch.randn(shape, generator=generator, dtype=dtype).to(self._device)

    def _timesteps(self, request: SampleRequest, latents: torch.Tensor) -> Any:
        config, count = self._scheduler.config, request.inference_steps
        mu = calculate_shift(
            image_common.pack_latents(latents).shape[1],
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        self._scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / count, count), mu=mu, device=self._device)
        self._scheduler.set_begin_index(0)
        return self._scheduler.timesteps

    def _decode(self, latents: torch.Tensor) -> Any:
        mean, std = latent_mean_and_std(self._vae)
        frames = latents.to(self._vae.dtype)[:, :, None] / (1.0 / std) + mean
        decoded = self._vae.decode(frames, return_dict=False)[0][:, :, 0]
        return VaeImageProcessor().postprocess(decoded, output_type="np")


def _apply_guidance(conditional: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance, rescaled per token to the norm of the conditional prediction, as in the pipeline."""
    combined = negative + scale * (conditional - negative)
    norm, combined_norm = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (conditional, combined))
    rescaled: torch.Tensor = combined * (norm / combined_norm)
    return rescaled

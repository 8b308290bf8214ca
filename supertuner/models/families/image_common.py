"""What families of pictures with diffusers' AutoencoderKL share: pictures to latents, latents to pixels, samples.

Samples are encoded one by one: what is stored about a sample does not depend on what was encoded beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from supertuner.core.errors import ModelError
from supertuner.models import loading
from supertuner.models.families import sampling_common as sampling
from supertuner.models.spec import ModelDescription, SampleRequest, Tensors


class ImageVaeEncoder:
    def __init__(self, vae: Any, device: torch.device) -> None:
        self._vae = vae.to(device)
        self._device = device

    @torch.no_grad()
    def encode(self, media: torch.Tensor) -> Tensors:
        return {"latents": torch.cat([self._encode_one(picture) for picture in media.unbind()]).cpu()}

    def _encode_one(self, image: torch.Tensor) -> torch.Tensor:
        pixels = image[None].to(self._device, torch.float32) / 255.0 * 2.0 - 1.0
        mode = self._vae.encode(pixels).latent_dist.mode()
        shift, scale_factor = _latent_shift_and_scale(self._vae)
        latents: torch.Tensor = (mode - shift) * scale_factor
        return latents


def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The VAE's pixels of a sampler's latents, in fp32."""
    shift, scale_factor = _latent_shift_and_scale(vae)
    pixels: torch.Tensor = vae.decode(latents.float() / scale_factor + shift, return_dict=False)[0]
    return pixels


class ImagePipelineSampler:
    """Samples through a family's own diffusers pipeline, with the VAE in fp32 whatever the denoiser computes in."""

    def __init__(
        self,
        pipeline: Any,
        component: str,
        unsupported_reason: Callable[[tuple[int, ...]], str | None],
        device: torch.device,
        dtype: torch.dtype,
        *,
        extra_arguments: Callable[[SampleRequest], dict[str, Any]] = lambda request: {
            "negative_prompt": request.negative_prompt
        },
        unpack_latents: Callable[[torch.Tensor, SampleRequest], torch.Tensor] = lambda latents, _request: latents,
    ) -> None:
        """`part` is the denoiser. `told` is what the pipeline is told beside what every one is, and `unpacked` makes
        latents of what it returns."""
        self._pipeline, self._component, self._unsupported_reason = pipeline, component, unsupported_reason
        self._device, self._dtype, self._extra_arguments, self._unpack_latents = (
            device,
            dtype,
            extra_arguments,
            unpack_latents,
        )
        pipeline.set_progress_bar_config(disable=True)

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        require_image_request(request, self._unsupported_reason((3, request.height, request.width)))
        pipeline = self._pipeline
        with sampling.eval_with_autocast([getattr(pipeline, self._component)], self._device, self._dtype):
            latents = pipeline(
                prompt=request.prompt,
                height=request.height,
                width=request.width,
                num_inference_steps=request.inference_steps,
                guidance_scale=request.guidance_scale,
                generator=torch.Generator().manual_seed(request.seed),
                output_type="latent",
                **self._extra_arguments(request),
            ).images
        pixels = decode_latents(pipeline.vae, self._unpack_latents(latents.float(), request))
        return sampling.to_uint8(pipeline.image_processor.postprocess(pixels, output_type="np"))


def vae_scale_factor(model: ModelDescription) -> int:
    """Pixels per latent: each of the VAE's levels but the last halves the sides."""
    widths = model.configs["vae"].get("block_out_channels", (0, 0, 0, 0))
    assert isinstance(widths, list | tuple)
    return int(2 ** (len(widths) - 1))


def image_unsupported_reason(shape: tuple[int, ...], multiple: int) -> str | None:
    """Why media of this shape are no pictures whose sides are multiples of `side`; None if they are."""
    if len(shape) != 3 or shape[0] != 3:
        return f"its shape is {shape}, and this model takes pictures of 3 colours"
    if shape[1] % multiple or shape[2] % multiple:
        return f"it is {shape[2]}×{shape[1]}, and both sides must be multiples of {multiple}"
    return None


def require_image_request(request: SampleRequest, reason: str | None) -> None:
    """ModelError for a sample that is no picture, or that cannot be made for the reason given."""
    if request.frames != 1:
        raise ModelError(f"the sample {request.prompt!r} has {request.frames} frames, and this model makes pictures")
    if reason:
        raise ModelError(f"the sample {request.prompt!r} cannot be made: {reason}")


def build_media_encoder(model: ModelDescription, device: torch.device) -> ImageVaeEncoder:
    return ImageVaeEncoder(loading.load_module(model, "vae", torch.float32), device)


def _latent_shift_and_scale(vae: Any) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """What latents are moved by, and then multiplied by: per channel where the config has both, else for all alike."""
    config = vae.config
    if config.latents_mean is None or config.latents_std is None:
        return config.shift_factor or 0.0, config.scaling_factor
    mean, std = (
        torch.tensor(one, device=vae.device).view(1, -1, 1, 1) for one in (config.latents_mean, config.latents_std)
    )
    return mean, config.scaling_factor / std

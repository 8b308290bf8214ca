"""The inputs that Wan2.2's pipelines compute from videos, images and captions, equal to the bit.

Samples are encoded one by one: what is stored about a sample does not depend on the samples beside it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from supertuner.models import loading
from supertuner.models.families.text_common import CaptionEncoder, load_text_towers
from supertuner.models.spec import ModelDescription, Tensors

MAX_TEXT_TOKENS: Final = 512


class WanMediaEncoder:
    """Pixels to normalized latents; with `conditioned` also the first-frame condition of image-to-video."""

    def __init__(self, vae: Any, device: torch.device, conditioned: bool) -> None:
        self._vae = vae
        self._device = device
        self._conditioned = conditioned
        shape = (1, vae.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean, device=device).view(shape)
        self._inverse_std = 1.0 / torch.tensor(vae.config.latents_std, device=device).view(shape)

    @torch.no_grad()
    def encode(self, media: torch.Tensor) -> Tensors:
        videos_BCFHW = media if media.ndim == 5 else media.unsqueeze(2)
        rows = [self._encode_one(video) for video in videos_BCFHW.unbind()]
        return {name: torch.cat([row[name] for row in rows]).cpu() for name in rows[0]}

    def _encode_one(self, video: torch.Tensor) -> Tensors:
        pixels = video[None].to(self._device, torch.float32) / 255.0 * 2.0 - 1.0
        fields = {"latents": self._latents(pixels)}
        if self._conditioned:
            fields["condition"] = self._condition(pixels)
        return fields

    def _latents(self, pixels: torch.Tensor) -> torch.Tensor:
        mode = self._vae.encode(pixels).latent_dist.mode()
        latents: torch.Tensor = (mode - self._mean) * self._inverse_std
        return latents

    def _condition(self, pixels: torch.Tensor) -> torch.Tensor:
        """Mask and latents of the first frame followed by grey, as in `WanImageToVideoPipeline.prepare_latents`.

        The mask has one channel for each of the frames that a latent covers; the first latent covers only the first
        frame, and all of its channels are set.
        """
        grey = torch.zeros_like(pixels)
        grey[:, :, 0] = pixels[:, :, 0]
        latents = self._latents(grey)
        mask = latents.new_zeros(latents.shape[0], self._vae.config.scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1.0
        return torch.cat([mask, latents], dim=1)


def build_media_encoder(model: ModelDescription, device: torch.device) -> WanMediaEncoder:
    """In fp32, the precision that Wan's VAE is published for."""
    vae = loading.load_module(model, "vae", torch.float32, loading.to_device(device))
    return WanMediaEncoder(vae, device, model.needs_first_frame)


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> CaptionEncoder:
    """`embeds`: UMT5's last hidden states of a caption, encoded at the full padded length as in the pipeline, without
    the padding rows."""
    (tower,) = load_text_towers(model, ("",), device, dtype)

    def encode(caption: str) -> Tensors:
        tokens = tower.tokenize(prompt_clean(caption), MAX_TEXT_TOKENS)
        ids, mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)
        hidden: torch.Tensor = tower.encoder(ids, mask).last_hidden_state[0]
        return {"embeds": hidden[: int(tokens.attention_mask.sum())].cpu().clone()}

    return CaptionEncoder([tower], encode, lambda caption: tower.exceeds(prompt_clean(caption), MAX_TEXT_TOKENS))

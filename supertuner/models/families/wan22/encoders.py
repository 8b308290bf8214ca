"""What Wan2.2 makes of videos, pictures and captions: the inputs of its pipelines, to the bit.

Samples are encoded one by one: what is stored about a sample does not depend on what was encoded beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from supertuner.models import loading
from supertuner.models.spec import ModelDescription, Tensors

MAX_TEXT_TOKENS: Final = 512


class WanMediaEncoder:
    """Pixels to normalised latents, and with `conditioned` the first frame that image-to-video is given."""

    def __init__(self, vae: Any, device: torch.device, conditioned: bool) -> None:
        self._vae = vae.to(device)
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
        """Mask and latents of the first frame followed by grey, as `WanImageToVideoPipeline.prepare_latents` does.

        The mask has one channel per frame that a latent stands for; the first latent stands for one frame four times.
        """
        grey = torch.zeros_like(pixels)
        grey[:, :, 0] = pixels[:, :, 0]
        latents = self._latents(grey)
        mask = latents.new_zeros(latents.shape[0], self._vae.config.scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1.0
        return torch.cat([mask, latents], dim=1)


class WanTextEncoder:
    def __init__(self, tokenizer: Any, encoder: Any, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder.to(device)
        self._device = device
        self.truncated_captions = 0

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        return [{"embeds": self._encode_one(caption)} for caption in captions]

    def _encode_one(self, caption: str) -> torch.Tensor:
        """Encoded at the full length, as the pipeline does: the same bits, whatever the caption's neighbours."""
        text = prompt_clean(caption)
        self.truncated_captions += len(self._tokenizer(text, verbose=False).input_ids) > MAX_TEXT_TOKENS
        tokens = self._tokenizer(
            [text],
            padding="max_length",
            max_length=MAX_TEXT_TOKENS,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
        hidden: torch.Tensor = self._encoder(ids, mask).last_hidden_state[0]
        return hidden[: int(tokens.attention_mask.sum())].cpu().clone()


def build_media_encoder(model: ModelDescription, device: torch.device) -> WanMediaEncoder:
    """In fp32, as Wan's VAE is meant to run."""
    conditioned = model.configs[""]["_class_name"] == "WanImageToVideoPipeline"
    return WanMediaEncoder(loading.load_module(model, "vae", torch.float32), device, conditioned)


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> WanTextEncoder:
    return WanTextEncoder(
        loading.load_tokenizer_or_scheduler(model, "tokenizer"),
        loading.load_module(model, "text_encoder", dtype),
        device,
    )

"""What Qwen-Image makes of pictures and captions: the inputs of its pipeline, to the bit.

Samples are encoded one by one: what is stored about a sample does not depend on what was encoded beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from supertuner.models import loading
from supertuner.models.families.qwen_image.prompts import TEXT_TO_IMAGE
from supertuner.models.spec import ModelDescription, Tensors


class QwenMediaEncoder:
    """The VAE is one of videos; a picture is a video of one frame, and its latents are kept without that dimension."""

    def __init__(self, vae: Any, device: torch.device) -> None:
        self._vae = vae.to(device)
        self._device = device
        shape = (1, vae.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean, device=device).view(shape)
        self._std = torch.tensor(vae.config.latents_std, device=device).view(shape)

    @torch.no_grad()
    def encode(self, media: torch.Tensor) -> Tensors:
        return {"latents": torch.cat([self.encode_one(picture) for picture in media.unbind()]).cpu()}

    def encode_one(self, image: torch.Tensor) -> torch.Tensor:
        pixels = image[None, :, None].to(self._device, torch.float32) / 255.0 * 2.0 - 1.0
        mode = self._vae.encode(pixels).latent_dist.mode()
        latents: torch.Tensor = (mode - self._mean) / self._std
        return latents[:, :, 0]


class QwenTextEncoder:
    """The last hidden states of a language model that is asked to describe a picture, without those of the question."""

    def __init__(self, tokenizer: Any, encoder: Any, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder.to(device)
        self._device = device
        self.truncated_captions = 0

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        return [{"embeds": self._encode_one(caption)} for caption in captions]

    def _encode_one(self, caption: str) -> torch.Tensor:
        """Read whole, and then cut: later tokens have no influence on earlier ones."""
        assert TEXT_TO_IMAGE.max_caption_tokens is not None
        start, end = TEXT_TO_IMAGE.prefix_tokens, TEXT_TO_IMAGE.prefix_tokens + TEXT_TO_IMAGE.max_caption_tokens
        tokens = self._tokenizer([TEXT_TO_IMAGE.with_caption(caption)], return_tensors="pt", verbose=False)
        self.truncated_captions += tokens.input_ids.shape[1] > end
        hidden = self._encoder(
            input_ids=tokens.input_ids[:, :end].to(self._device),
            attention_mask=tokens.attention_mask[:, :end].to(self._device),
            output_hidden_states=True,
            logits_to_keep=1,  # it would predict a word of 150,000 behind each; nobody asks for them
        ).hidden_states[-1]
        assert isinstance(hidden, torch.Tensor)
        return hidden[0, start:].cpu().clone()


def build_media_encoder(model: ModelDescription, device: torch.device) -> QwenMediaEncoder:
    return QwenMediaEncoder(loading.load_module(model, "vae", torch.float32), device)


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> QwenTextEncoder:
    return QwenTextEncoder(
        loading.load_tokenizer_or_scheduler(model, "tokenizer"),
        loading.load_module(model, "text_encoder", dtype),
        device,
    )


def pad_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """Zeros up to the longest, and a mask that says so; captions of one length have none, as in the pipeline."""
    embeds = [caption["embeds"] for caption in captions]
    lengths = torch.tensor([len(one) for one in embeds])
    padded = {"embeds": torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)}
    if bool((lengths != lengths[0]).any()):
        token_indices = torch.arange(padded["embeds"].shape[1])
        padded["mask"] = (token_indices < lengths[:, None]).long()
    return padded

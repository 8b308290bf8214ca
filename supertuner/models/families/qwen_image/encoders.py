"""The inputs that Qwen-Image's pipeline computes from images and captions, equal to the bit.

Samples are encoded one by one: what is stored about a sample does not depend on the samples beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from supertuner.models import loading
from supertuner.models.families.image_common import ImageVaeEncoder
from supertuner.models.families.text_common import CaptionEncoder, load_text_towers
from supertuner.models.spec import ModelDescription, Tensors


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The chat prompt that Qwen's pipelines put around a caption."""

    template: str
    prefix_tokens: int
    """Leading tokens that are the same for every caption; the denoiser does not get them."""
    max_caption_tokens: int | None
    """The largest number of tokens after the prefix that the denoiser gets; None: no limit."""

    def with_caption(self, caption: str) -> str:
        return self.template.replace("{}", caption)


TEXT_TO_IMAGE: Final = PromptTemplate(
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    prefix_tokens=34,
    max_caption_tokens=512,
)
IMAGE_EDIT: Final = PromptTemplate(
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n",
    prefix_tokens=64,
    max_caption_tokens=None,
)


def latent_mean_and_std(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each channel of a VAE for videos, shaped to broadcast over BCFHW."""
    mean, std = (
        torch.tensor(values, device=vae.device) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


class QwenMediaEncoder(ImageVaeEncoder):
    """Encodes an image as a video of one frame, because the VAE is made for videos; latents have no frames."""

    def _encode_one(self, pixels: torch.Tensor) -> torch.Tensor:
        mean, std = latent_mean_and_std(self._vae)
        latents: torch.Tensor = (self._vae.encode(pixels[:, :, None]).latent_dist.mode() - mean) / std
        return latents[:, :, 0]


def build_media_encoder(model: ModelDescription, device: torch.device) -> QwenMediaEncoder:
    return QwenMediaEncoder(loading.load_module(model, "vae", torch.float32, loading.to_device(device)), device)


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> CaptionEncoder:
    """`embeds`: the language model's last hidden states of the prompt, without those of the prefix.

    The prompt is tokenized whole and then cut, as in the pipeline; in a causal model later tokens do not influence
    earlier ones.
    """
    (tower,) = load_text_towers(model, ("",), device, dtype)
    assert TEXT_TO_IMAGE.max_caption_tokens is not None
    start, end = TEXT_TO_IMAGE.prefix_tokens, TEXT_TO_IMAGE.prefix_tokens + TEXT_TO_IMAGE.max_caption_tokens

    def encode(caption: str) -> Tensors:
        tokens = tower.tokenizer([TEXT_TO_IMAGE.with_caption(caption)], return_tensors="pt", verbose=False)
        ids, mask = tokens.input_ids[:, :end].to(device), tokens.attention_mask[:, :end].to(device)
        hidden = last_hidden_state(tower.encoder, input_ids=ids, attention_mask=mask)
        return {"embeds": hidden[0, start:].cpu().clone()}

    return CaptionEncoder([tower], encode, lambda caption: tower.exceeds(TEXT_TO_IMAGE.with_caption(caption), end))


def last_hidden_state(encoder: Any, **inputs: Any) -> torch.Tensor:
    """The last hidden states of a Qwen2.5-VL model for these inputs."""
    # Without logits_to_keep it would compute logits over 150,000 words for every token, which nothing uses.
    hidden = encoder(**inputs, output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
    assert isinstance(hidden, torch.Tensor)
    return hidden


def pad_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """Pads with zeros to the longest caption and adds a mask; without padding there is no mask, as in the pipeline."""
    embeds = [caption["embeds"] for caption in captions]
    lengths = torch.tensor([len(rows) for rows in embeds])
    padded = {"embeds": torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)}
    if bool((lengths != lengths[0]).any()):
        token_indices = torch.arange(padded["embeds"].shape[1])
        padded["mask"] = (token_indices < lengths[:, None]).long()
    return padded

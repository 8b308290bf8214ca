"""What Qwen-Image-Edit's text encoder makes of a caption and the picture that it is about: the pipeline's inputs.

The pipeline's own processor wants torchvision for videos, which nobody gives it. Pictures go the other way that
transformers has for them, by PIL; with torchvision the pipeline resizes them in a slightly other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from PIL import Image
from transformers import BatchFeature, Qwen2VLImageProcessorPil

from supertuner.core.errors import ModelError
from supertuner.models import loading
from supertuner.models.families.qwen_image.prompts import EDIT
from supertuner.models.quiet import quietly
from supertuner.models.reading import folder_of
from supertuner.models.spec import Model, Tensors

PLACE: Final = "<|image_pad|>"
"""Stands in a prompt where the picture is; there are as many as the encoder makes tokens of it."""

TOKEN_SIDE: Final = 28
"""Pixels on a side of what becomes one token of the encoder: two by two patches of 14."""


class Reader:
    """Tokens of prompts, and patches of their pictures; called as the pipeline calls its processor."""

    def __init__(self, tokenizer: Any, pictures: Any) -> None:
        self._tokenizer = tokenizer
        self._pictures = pictures

    def __call__(self, text: Sequence[str], images: Any, padding: bool = True, return_tensors: str = "pt") -> Any:
        seen = self._pictures(images=images, return_tensors=return_tensors)
        sizes = (seen["image_grid_thw"].prod(dim=1) // self._pictures.merge_size**2).tolist()
        written = [prompt.replace(PLACE, PLACE * size) for prompt, size in zip(text, sizes, strict=True)]
        tokens = self._tokenizer(written, padding=padding, return_tensors=return_tensors, verbose=False)
        return BatchFeature({**tokens, **seen})


class QwenEditTextEncoder:
    def __init__(self, reader: Any, encoder: Any, device: torch.device) -> None:
        self._reader = reader
        self._encoder = encoder.to(device)
        self._device = device
        self.cut = 0
        """Captions are never cut: the pipeline gives the denoiser whatever it is told."""

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        raise ModelError("Qwen-Image-Edit is told what to do with a picture; its captions are not encoded without one")

    @torch.no_grad()
    def encode_of(self, captions: Sequence[str], pictures: Sequence[torch.Tensor]) -> list[Tensors]:
        return [{"embeds": self._one(*both)} for both in zip(captions, pictures, strict=True)]

    def _one(self, caption: str, picture_CHW: torch.Tensor) -> torch.Tensor:
        image = Image.fromarray(picture_CHW.permute(1, 2, 0).contiguous().numpy())
        read = self._reader(text=[EDIT.around(caption)], images=image).to(self._device)
        hidden = self._encoder(
            input_ids=read["input_ids"],
            attention_mask=read["attention_mask"],
            pixel_values=read["pixel_values"],
            image_grid_thw=read["image_grid_thw"],
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states[-1]
        assert isinstance(hidden, torch.Tensor)
        return hidden[0, EDIT.dropped :].cpu().clone()


def reader(model: Model) -> Reader:
    folder = folder_of(model.source, ("processor",)) / "processor"
    with quietly():
        try:
            pictures = Qwen2VLImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{folder} does not say how pictures are prepared: {error}; fetch it again") from error
    return Reader(loading.plain(model, "tokenizer"), pictures)


class HollowEditTextEncoder(QwenEditTextEncoder):
    """Of a hollow model: as many tokens as caption and picture would be. What the encoder's eyes compute before them
    depends on values, and is left out."""

    def _one(self, caption: str, picture_CHW: torch.Tensor) -> torch.Tensor:
        seen = round(picture_CHW.shape[1] / TOKEN_SIDE) * round(picture_CHW.shape[2] / TOKEN_SIDE)
        tokens = self._reader([EDIT.around(caption)], max_length=self._reader.tokens + seen)
        hidden = self._encoder(
            input_ids=tokens.input_ids.to(self._device),
            attention_mask=tokens.attention_mask.to(self._device),
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states[-1]
        assert isinstance(hidden, torch.Tensor)
        return hidden[0, EDIT.dropped :].cpu().clone()


def text_encoder(model: Model, device: torch.device, dtype: torch.dtype) -> QwenEditTextEncoder:
    if model.source.hollow:
        tokenizer = loading.plain(model, "tokenizer")
        return HollowEditTextEncoder(tokenizer, loading.module(model, "text_encoder", dtype), device)
    return QwenEditTextEncoder(reader(model), loading.module(model, "text_encoder", dtype), device)

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
from supertuner.models.families.qwen_image.prompts import IMAGE_EDIT
from supertuner.models.library_logging import quiet_libraries
from supertuner.models.pipeline_files import pipeline_folder
from supertuner.models.spec import ModelDescription, Tensors

IMAGE_PAD_TOKEN: Final = "<|image_pad|>"
"""Stands in a prompt where the picture is; there are as many as the encoder makes tokens of it."""

PIXELS_PER_TOKEN_SIDE: Final = 28
"""Pixels on a side of what becomes one token of the encoder: two by two patches of 14."""


class QwenEditProcessor:
    """Tokens of prompts, and patches of their pictures; called as the pipeline calls its processor."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self._tokenizer = tokenizer
        self._image_processor = image_processor

    def __call__(self, text: Sequence[str], images: Any, padding: bool = True, return_tensors: str = "pt") -> Any:
        image_inputs = self._image_processor(images=images, return_tensors=return_tensors)
        token_counts = (image_inputs["image_grid_thw"].prod(dim=1) // self._image_processor.merge_size**2).tolist()
        prompts = [
            prompt.replace(IMAGE_PAD_TOKEN, IMAGE_PAD_TOKEN * size)
            for prompt, size in zip(text, token_counts, strict=True)
        ]
        tokens = self._tokenizer(prompts, padding=padding, return_tensors=return_tensors, verbose=False)
        return BatchFeature({**tokens, **image_inputs})


class QwenEditTextEncoder:
    def __init__(self, processor: Any, encoder: Any, device: torch.device) -> None:
        self._processor = processor
        self._encoder = encoder.to(device)
        self._device = device
        self.truncated_captions = 0
        """Captions are never cut: the pipeline gives the denoiser whatever it is told."""

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        raise ModelError("Qwen-Image-Edit is told what to do with a picture; its captions are not encoded without one")

    @torch.no_grad()
    def encode_with_images(self, captions: Sequence[str], images: Sequence[torch.Tensor]) -> list[Tensors]:
        return [{"embeds": self._encode_one(*both)} for both in zip(captions, images, strict=True)]

    def _encode_one(self, caption: str, image_CHW: torch.Tensor) -> torch.Tensor:
        image = Image.fromarray(image_CHW.permute(1, 2, 0).contiguous().numpy())
        inputs = self._processor(text=[IMAGE_EDIT.with_caption(caption)], images=image).to(self._device)
        hidden = self._encoder(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states[-1]
        assert isinstance(hidden, torch.Tensor)
        return hidden[0, IMAGE_EDIT.prefix_tokens :].cpu().clone()


def load_processor(model: ModelDescription) -> QwenEditProcessor:
    folder = pipeline_folder(model.source, ("processor",)) / "processor"
    with quiet_libraries():
        try:
            image_processor = Qwen2VLImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{folder} does not say how pictures are prepared: {error}; fetch it again") from error
    return QwenEditProcessor(loading.load_tokenizer_or_scheduler(model, "tokenizer"), image_processor)


class WeightlessEditTextEncoder(QwenEditTextEncoder):
    """Of a hollow model: as many tokens as caption and picture would be. What the encoder's eyes compute before them
    depends on values, and is left out."""

    def _encode_one(self, caption: str, image_CHW: torch.Tensor) -> torch.Tensor:
        image_tokens = round(image_CHW.shape[1] / PIXELS_PER_TOKEN_SIDE) * round(
            image_CHW.shape[2] / PIXELS_PER_TOKEN_SIDE
        )
        tokens = self._processor([IMAGE_EDIT.with_caption(caption)], max_length=self._processor.tokens + image_tokens)
        hidden = self._encoder(
            input_ids=tokens.input_ids.to(self._device),
            attention_mask=tokens.attention_mask.to(self._device),
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states[-1]
        assert isinstance(hidden, torch.Tensor)
        return hidden[0, IMAGE_EDIT.prefix_tokens :].cpu().clone()


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> QwenEditTextEncoder:
    if model.source.without_weights:
        tokenizer = loading.load_tokenizer_or_scheduler(model, "tokenizer")
        return WeightlessEditTextEncoder(tokenizer, loading.load_module(model, "text_encoder", dtype), device)
    return QwenEditTextEncoder(load_processor(model), loading.load_module(model, "text_encoder", dtype), device)

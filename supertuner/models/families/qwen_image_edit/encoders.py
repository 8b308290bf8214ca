"""The inputs that Qwen-Image-Edit's pipeline computes from a caption and its reference image.

The pipeline's own processor class needs torchvision, for videos that this family never uses. Here images go through
transformers' PIL-based image processor instead; with torchvision the pipeline resizes them slightly differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from PIL import Image
from transformers import BatchFeature, Qwen2VLImageProcessorPil

from supertuner.core.errors import ModelError
from supertuner.models import loading
from supertuner.models.families.qwen_image.encoders import IMAGE_EDIT, last_hidden_state
from supertuner.models.library_guards import quiet_libraries
from supertuner.models.pipeline_files import pipeline_folder
from supertuner.models.spec import ModelDescription, Tensors

IMAGE_PAD_TOKEN: Final = "<|image_pad|>"
"""Marks the place of the image in a prompt; the processor repeats it once for each image token of the encoder."""

PIXELS_PER_TOKEN_SIDE: Final = 28
"""Pixels along each side of one image token of the encoder: two by two patches of 14."""


class QwenEditProcessor:
    """Tokens of prompts and patches of their images; its call has the signature of the pipeline's processor."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self._tokenizer = tokenizer
        self._image_processor = image_processor

    def __call__(self, text: Sequence[str], images: Any, padding: bool = True, return_tensors: str = "pt") -> Any:
        image_inputs = self._image_processor(images=images, return_tensors=return_tensors)
        token_counts = (image_inputs["image_grid_thw"].prod(dim=1) // self._image_processor.merge_size**2).tolist()
        pairs = zip(text, token_counts, strict=True)
        prompts = [prompt.replace(IMAGE_PAD_TOKEN, IMAGE_PAD_TOKEN * count) for prompt, count in pairs]
        tokens = self._tokenizer(prompts, padding=padding, return_tensors=return_tensors, verbose=False)
        return BatchFeature({**tokens, **image_inputs})


class QwenEditTextEncoder:
    """`embeds`: the last hidden states of caption and image together, without those of the prompt's prefix."""

    def __init__(self, processor: Any, encoder: Any, device: torch.device) -> None:
        self._processor = processor
        self._encoder = encoder
        self._device = device
        self.truncated_captions = 0
        """Always 0: the pipeline passes captions of any length to the denoiser."""

    def is_truncated(self, caption: str) -> bool:
        return False

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        raise ModelError("Qwen-Image-Edit encodes a caption together with its image; use encode_with_images")

    @torch.no_grad()
    def encode_with_images(self, captions: Sequence[str], images: Sequence[torch.Tensor]) -> list[Tensors]:
        hidden = (self._hidden_states(*pair) for pair in zip(captions, images, strict=True))
        return [{"embeds": states[0, IMAGE_EDIT.prefix_tokens :].cpu().clone()} for states in hidden]

    def _hidden_states(self, caption: str, image_CHW: torch.Tensor) -> torch.Tensor:
        image = Image.fromarray(image_CHW.permute(1, 2, 0).contiguous().numpy())
        inputs = self._processor(text=[IMAGE_EDIT.with_caption(caption)], images=image).to(self._device)
        names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
        return last_hidden_state(self._encoder, **{name: inputs[name] for name in names})


class WeightlessEditTextEncoder(QwenEditTextEncoder):
    """The encoder of a model without weights: as many tokens as caption and image would have.

    The vision encoder's shapes depend on the values of its inputs, so it is left out.
    """

    def _hidden_states(self, caption: str, image_CHW: torch.Tensor) -> torch.Tensor:
        rows, columns = (round(side / PIXELS_PER_TOKEN_SIDE) for side in image_CHW.shape[1:])
        tokens = self._processor([IMAGE_EDIT.with_caption(caption)], max_length=self._processor.tokens + rows * columns)
        ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
        return last_hidden_state(self._encoder, input_ids=ids, attention_mask=mask)


def load_processor(model: ModelDescription) -> QwenEditProcessor:
    folder = pipeline_folder(model.source, ("processor",)) / "processor"
    with quiet_libraries():
        try:
            image_processor = Qwen2VLImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{folder} holds no config of an image processor: {error}; download it again") from error
    return QwenEditProcessor(loading.load_tokenizer_or_scheduler(model, "tokenizer"), image_processor)


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> QwenEditTextEncoder:
    if model.source.without_weights:
        tokenizer = loading.load_tokenizer_or_scheduler(model, "tokenizer")
        return WeightlessEditTextEncoder(tokenizer, loading.load_module(model, "text_encoder", dtype), device)
    encoder = loading.load_module(model, "text_encoder", dtype, loading.to_device(device))
    return QwenEditTextEncoder(load_processor(model), encoder, device)

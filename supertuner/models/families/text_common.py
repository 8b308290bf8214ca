"""What text encoders of several families share: a tokenizer with its encoder, and encoding caption by caption.

Captions are encoded one by one: the stored encoding of a caption does not depend on the captions beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from supertuner.models import loading
from supertuner.models.spec import ModelDescription, Tensors


@dataclass(frozen=True, eq=False, slots=True)
class TextTower:
    """One tokenizer of a pipeline and the text encoder that reads its tokens."""

    tokenizer: Any
    encoder: Any
    device: torch.device

    @property
    def max_length(self) -> int:
        """The number of tokens that the tokenizer's config allows."""
        length: int = self.tokenizer.model_max_length
        return length

    def exceeds(self, text: str, length: int) -> bool:
        """Whether the whole text has more than `length` tokens."""
        return len(self.tokenizer(text, verbose=False).input_ids) > length

    def tokenize(self, text: str, length: int) -> Any:
        """Token ids and attention mask of one text, truncated and padded to `length`, on the CPU."""
        size: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
        return self.tokenizer([text], **size, return_attention_mask=True, return_tensors="pt")

    def run(self, text: str, length: int, **options: Any) -> Any:
        """The encoder's output for `length` tokens of one text, without a mask, as pipelines of Flux, SD3 and SDXL."""
        return self.encoder(self.tokenize(text, length).input_ids.to(self.device), **options)


def load_text_towers(
    model: ModelDescription, suffixes: Sequence[str], device: torch.device, dtype: torch.dtype
) -> list[TextTower]:
    """The pipeline's `tokenizer<suffix>` and `text_encoder<suffix>` for each of `suffixes`."""
    towers = []
    for suffix in suffixes:
        tokenizer = loading.load_tokenizer_or_scheduler(model, f"tokenizer{suffix}")
        encoder = loading.load_module(model, f"text_encoder{suffix}", dtype, loading.to_device(device))
        towers.append(TextTower(tokenizer, encoder, device))
    return towers


class CaptionEncoder:
    """A `TextEncoder` built from two functions of one caption: its fields, and whether the model reads only a part."""

    def __init__(
        self, towers: Sequence[TextTower], encode_caption: Callable[[str], Tensors], is_truncated: Callable[[str], bool]
    ) -> None:
        self.modules = [tower.encoder for tower in towers]
        """The forecast counts their weights: an encoder holds its modules in attributes (`plan/trace`)."""
        self._encode_caption, self.is_truncated = encode_caption, is_truncated
        self.truncated_captions = 0

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        self.truncated_captions += sum(map(self.is_truncated, captions))
        return [self._encode_caption(caption) for caption in captions]


def stack_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """`pad_text` of a family whose encodings all have the same length: every row is read by the denoiser."""
    return {name: torch.stack([caption[name] for caption in captions]) for name in captions[0]}

"""What Flux makes of captions: the inputs of its pipeline, to the bit, one caption by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from supertuner.models import loading
from supertuner.models.spec import ModelDescription, Tensors

MAX_TEXT_TOKENS: Final = 512


class FluxTextEncoder:
    """`embeds` of T5 and `pooled` of CLIP.

    The pipeline gives T5 no mask, so what stands behind the end of a caption depends on the caption, and the denoiser
    reads it: all 512 rows are the caption's encoding, and none of them is padding that could be left out.
    """

    def __init__(self, clip: tuple[Any, Any], t5: tuple[Any, Any], device: torch.device) -> None:
        self._clip_tokenizer, self._clip = clip[0], clip[1].to(device)
        self._t5_tokenizer, self._t5 = t5[0], t5[1].to(device)
        self._device = device
        self.truncated_captions = 0
        """CLIP, which gives only a summary, reads 77 tokens of any caption; what counts here is T5."""

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        return [self._encode_one(caption) for caption in captions]

    def _encode_one(self, caption: str) -> Tensors:
        self.truncated_captions += len(self._t5_tokenizer(caption, verbose=False).input_ids) > MAX_TEXT_TOKENS
        pooled = self._clip(self._token_ids(self._clip_tokenizer, caption, self._clip_tokenizer.model_max_length))
        embeds = self._t5(self._token_ids(self._t5_tokenizer, caption, MAX_TEXT_TOKENS))
        return {"embeds": embeds.last_hidden_state[0].cpu().clone(), "pooled": pooled.pooler_output[0].cpu().clone()}

    def _token_ids(self, tokenizer: Any, caption: str, length: int) -> Any:
        tokens = tokenizer([caption], padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return tokens.input_ids.to(self._device)


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> FluxTextEncoder:
    clip = loading.load_tokenizer_or_scheduler(model, "tokenizer"), loading.load_module(model, "text_encoder", dtype)
    t5 = loading.load_tokenizer_or_scheduler(model, "tokenizer_2"), loading.load_module(model, "text_encoder_2", dtype)
    return FluxTextEncoder(clip, t5, device)

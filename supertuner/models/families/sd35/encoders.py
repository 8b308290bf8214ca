"""What SD3.5 makes of captions: the inputs of its pipeline, to the bit. Its pictures are encoded as `pictures` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn.functional import pad

from supertuner.models import loading
from supertuner.models.spec import ModelDescription, Tensors

MAX_TEXT_TOKENS: Final = 256
"""Tokens that T5 reads: the pipeline's own number."""


class Sd35TextEncoder:
    """`embeds`: 77 rows of both CLIPs side by side, filled up with zeros, and 256 rows of T5; `pooled` of both CLIPs.

    No encoder gets a mask: all rows are the caption's encoding, and none of them is padding that could be left out.
    """

    def __init__(self, clips: Sequence[tuple[Any, Any]], t5: tuple[Any, Any], device: torch.device) -> None:
        self._clips = [(tokenizer, encoder.to(device)) for tokenizer, encoder in clips]
        self._t5_tokenizer, self._t5 = t5[0], t5[1].to(device)
        self._clip_length = clips[0][0].model_max_length
        self._device = device
        self.truncated_captions = 0
        """CLIP reads 77 tokens of any caption; what counts here is T5."""

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        return [self._encode_one(caption) for caption in captions]

    def _encode_one(self, caption: str) -> Tensors:
        self.truncated_captions += len(self._t5_tokenizer(caption, verbose=False).input_ids) > MAX_TEXT_TOKENS
        clip_outputs = [
            encoder(self._token_ids(tokenizer, caption, self._clip_length), output_hidden_states=True)
            for tokenizer, encoder in self._clips
        ]
        clip = torch.cat([one.hidden_states[-2] for one in clip_outputs], dim=-1)
        t5 = self._t5(self._token_ids(self._t5_tokenizer, caption, MAX_TEXT_TOKENS))[0]
        embeds = torch.cat([pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], dim=-2)
        return {"embeds": embeds[0].cpu(), "pooled": torch.cat([one[0] for one in clip_outputs], dim=-1)[0].cpu()}

    def _token_ids(self, tokenizer: Any, caption: str, length: int) -> Any:
        tokens = tokenizer([caption], padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return tokens.input_ids.to(self._device)


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> Sd35TextEncoder:
    clip_l, clip_g, t5 = (
        (
            loading.load_tokenizer_or_scheduler(model, f"tokenizer{which}"),
            loading.load_module(model, f"text_encoder{which}", dtype),
        )
        for which in ("", "_2", "_3")
    )
    return Sd35TextEncoder((clip_l, clip_g), t5, device)

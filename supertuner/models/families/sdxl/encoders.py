"""What SDXL makes of captions: the inputs of its pipeline, to the bit. Its pictures are encoded as `pictures` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from supertuner.models import loading
from supertuner.models.spec import ModelDescription, Tensors


class SdxlTextEncoder:
    """`embeds` of both CLIPs side by side, from their last layers but one; `pooled` of the second; `said`, which is 0
    for an empty caption and else 1.

    CLIP gets no mask: all 77 rows are the caption's encoding.
    """

    def __init__(self, clips: Sequence[tuple[Any, Any]], device: torch.device) -> None:
        self._clips = [(tokenizer, encoder.to(device)) for tokenizer, encoder in clips]
        self._device = device
        self.truncated_captions = 0

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        return [self._encode_one(caption) for caption in captions]

    def _encode_one(self, caption: str) -> Tensors:
        first_tokenizer = self._clips[0][0]
        self.truncated_captions += (
            len(first_tokenizer(caption, verbose=False).input_ids) > first_tokenizer.model_max_length
        )
        hidden, pooled = [], torch.empty(0)
        for tokenizer, encoder in self._clips:
            ids = tokenizer(
                [caption],
                padding="max_length",
                max_length=tokenizer.model_max_length,
                truncation=True,
                return_tensors="pt",
            ).input_ids
            output = encoder(ids.to(self._device), output_hidden_states=True)
            hidden.append(output.hidden_states[-2])
            pooled = output[0]
        embeds = torch.cat(hidden, dim=-1)[0].cpu()
        return {"embeds": embeds, "pooled": pooled[0].cpu().clone(), "said": embeds.new_full((1,), bool(caption))}


def pad_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """All captions have the same length. Where the model's index says that no caption is zeros, an empty one is: that
    is what its pipeline guides away from."""
    batch = {name: torch.stack([caption[name] for caption in captions]) for name in ("embeds", "pooled")}
    if zeros_for_empty_prompt(model):
        empty_rows = [row for row, caption in enumerate(captions) if not caption["said"].item()]
        for field in batch.values():
            field[empty_rows] = 0
    return batch


def zeros_for_empty_prompt(model: ModelDescription) -> bool:
    """Whether the pipeline's word for no caption is a row of zeros."""
    return bool(model.configs[""].get("force_zeros_for_empty_prompt", True))


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> SdxlTextEncoder:
    clips = [
        (
            loading.load_tokenizer_or_scheduler(model, f"tokenizer{which}"),
            loading.load_module(model, f"text_encoder{which}", dtype),
        )
        for which in ("", "_2")
    ]
    return SdxlTextEncoder(clips, device)

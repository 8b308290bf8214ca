"""Sizes of a tiny SD3 or SD3.5 pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from supertuner.models.families.tiny_pipelines import (
    VOCABULARY,
    byte_tokenizer,
    clip_encoder_with_projection,
    t5_encoder,
    tiny_image_vae,
    unigram_tokenizer,
)


@dataclass(frozen=True, slots=True)
class TinySd35:
    kind: Literal["medium", "large", "3"] = "medium"
    """`medium` has a second attention in its first block, `large` has none; `3` also lacks query and key norms."""
    heads: int = 2
    clip_widths: tuple[int, int] = (8, 16)
    text_width: int = 32
    """T5's width: at least the sum of both CLIPs' widths."""
    words: tuple[str, ...] = VOCABULARY
    """Words that are one T5 token each."""
    vae_width: int = 8

    def assemble(self) -> StableDiffusion3Pipeline:
        first, second, third = byte_tokenizer(), byte_tokenizer(), unigram_tokenizer(self.words)
        return StableDiffusion3Pipeline(
            tokenizer=first,
            tokenizer_2=second,
            tokenizer_3=third,
            text_encoder=clip_encoder_with_projection(first, self.clip_widths[0], layers=2),
            text_encoder_2=clip_encoder_with_projection(second, self.clip_widths[1], layers=2),
            text_encoder_3=t5_encoder(len(third), self.text_width, layers=1),
            vae=tiny_image_vae(self.vae_width, channels=16, scaling_factor=1.5305, shift_factor=0.0609),
            transformer=self._transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )

    def _transformer(self) -> SD3Transformer2DModel:
        return SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=self.heads,
            joint_attention_dim=self.text_width,
            caption_projection_dim=8 * self.heads,
            pooled_projection_dim=sum(self.clip_widths),
            pos_embed_max_size=16,
            dual_attention_layers=(0,) if self.kind == "medium" else (),
            qk_norm=None if self.kind == "3" else "rms_norm",
        ).eval()

"""Sizes of a tiny Flux pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from supertuner.models.families.tiny_pipelines import (
    VOCABULARY,
    byte_tokenizer,
    clip_encoder,
    t5_encoder,
    tiny_image_vae,
    unigram_tokenizer,
)


@dataclass(frozen=True, slots=True)
class TinyFlux:
    guidance: bool = True
    """Whether guidance is an input of the transformer, as in Flux dev; schnell has none."""
    layers: int = 1
    single_layers: int = 1
    heads: int = 2
    text_width: int = 16
    pooled_width: int = 16
    words: tuple[str, ...] = VOCABULARY
    """Words that are one T5 token each."""
    vae_width: int = 8

    def assemble(self) -> FluxPipeline:
        clip, t5 = byte_tokenizer(), unigram_tokenizer(self.words)
        return FluxPipeline(
            tokenizer=clip,
            tokenizer_2=t5,
            text_encoder=clip_encoder(clip, self.pooled_width, layers=1),
            text_encoder_2=t5_encoder(len(t5), self.text_width, layers=1),
            vae=tiny_image_vae(self.vae_width, channels=16, scaling_factor=0.3611, shift_factor=0.1159),
            transformer=self._transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0 if self.guidance else 1.0, use_dynamic_shifting=self.guidance
            ),
        )

    def _transformer(self) -> FluxTransformer2DModel:
        return FluxTransformer2DModel(
            in_channels=64,
            num_layers=self.layers,
            num_single_layers=self.single_layers,
            attention_head_dim=16,
            num_attention_heads=self.heads,
            joint_attention_dim=self.text_width,
            pooled_projection_dim=self.pooled_width,
            guidance_embeds=self.guidance,
            axes_dims_rope=(4, 6, 6),
        ).eval()

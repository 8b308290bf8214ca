"""A tiny Flux pipeline: the real classes with random weights, a few hundred kilobytes, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from supertuner.models.families.tiny_text import VOCABULARY, byte_tokenizer, clip_encoder, t5_encoder, unigram_tokenizer
from supertuner.models.families.tiny_vae import tiny_image_vae
from supertuner.models.library_logging import quiet_libraries


@dataclass(frozen=True, slots=True)
class TinyFlux:
    """Sizes of a tiny pipeline. What the mathematics depends on (channels, packing, shifts) is as in the real one."""

    guidance: bool = True
    """Whether it was told its guidance when it was made, as Flux dev was and schnell was not."""
    layers: int = 1
    single_layers: int = 1
    heads: int = 2
    text_width: int = 16
    pooled_width: int = 16
    words: tuple[str, ...] = VOCABULARY
    vae_width: int = 8


def build_pipeline(sizes: TinyFlux, seed: int) -> FluxPipeline:
    """The pipeline in memory. The same seed gives the same weights, and nobody else's random numbers are used up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip, t5 = byte_tokenizer(), unigram_tokenizer(sizes.words)
        return FluxPipeline(
            tokenizer=clip,
            tokenizer_2=t5,
            text_encoder=clip_encoder(clip, sizes.pooled_width, layers=1),
            text_encoder_2=t5_encoder(len(t5), sizes.text_width, layers=1),
            vae=tiny_image_vae(sizes.vae_width, channels=16, scaling_factor=0.3611, shift_factor=0.1159),
            transformer=_transformer(sizes),
            scheduler=_scheduler(dynamic=sizes.guidance),
        )


def write_pipeline(folder: Path, sizes: TinyFlux, seed: int) -> None:
    """`build`, as a folder like those on the hub."""
    with quiet_libraries():
        build_pipeline(sizes, seed).save_pretrained(folder)


def write_tiny_pipeline(folder: Path, seed: int) -> None:
    write_pipeline(folder, TinyFlux(), seed)


def _transformer(sizes: TinyFlux) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=sizes.layers,
        num_single_layers=sizes.single_layers,
        attention_head_dim=16,
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text_width,
        pooled_projection_dim=sizes.pooled_width,
        guidance_embeds=sizes.guidance,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def _scheduler(dynamic: bool) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0 if dynamic else 1.0, use_dynamic_shifting=dynamic)

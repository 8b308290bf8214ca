"""A tiny SD3.5 pipeline: the real classes with random weights, a few hundred kilobytes, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from supertuner.models.families.tiny_text import (
    VOCABULARY,
    byte_tokenizer,
    clip_encoder_with_projection,
    t5_encoder,
    unigram_tokenizer,
)
from supertuner.models.families.tiny_vae import tiny_image_vae
from supertuner.models.library_logging import quiet_libraries


@dataclass(frozen=True, slots=True)
class TinySd35:
    """Sizes of a tiny pipeline. What the mathematics depends on (channels, patches, shifts, kinds of blocks) is as in
    the real one."""

    kind: str = "medium"
    """`medium` attends twice in its first block, `large` nowhere; `3` has neither that nor norms of queries."""
    heads: int = 2
    clip_widths: tuple[int, int] = (8, 16)
    text_width: int = 32
    """Of T5: at least both CLIPs side by side."""
    words: tuple[str, ...] = VOCABULARY
    vae_width: int = 8


def build_pipeline(sizes: TinySd35, seed: int) -> StableDiffusion3Pipeline:
    """The pipeline in memory. The same seed gives the same weights, and nobody else's random numbers are used up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second, third = byte_tokenizer(), byte_tokenizer(), unigram_tokenizer(sizes.words)
        return StableDiffusion3Pipeline(
            tokenizer=first,
            tokenizer_2=second,
            tokenizer_3=third,
            text_encoder=clip_encoder_with_projection(first, sizes.clip_widths[0], layers=2),
            text_encoder_2=clip_encoder_with_projection(second, sizes.clip_widths[1], layers=2),
            text_encoder_3=t5_encoder(len(third), sizes.text_width, layers=1),
            vae=tiny_image_vae(sizes.vae_width, channels=16, scaling_factor=1.5305, shift_factor=0.0609),
            transformer=_transformer(sizes),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )


def write_pipeline(folder: Path, sizes: TinySd35, seed: int) -> None:
    """`build`, as a folder like those on the hub."""
    with quiet_libraries():
        build_pipeline(sizes, seed).save_pretrained(folder)


def write_tiny_pipeline(folder: Path, seed: int) -> None:
    write_pipeline(folder, TinySd35(), seed)


def _transformer(sizes: TinySd35) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text_width,
        caption_projection_dim=8 * sizes.heads,
        pooled_projection_dim=sum(sizes.clip_widths),
        pos_embed_max_size=16,
        dual_attention_layers=(0,) if sizes.kind == "medium" else (),
        qk_norm=None if sizes.kind == "3" else "rms_norm",
    ).eval()

"""A tiny Qwen-Image pipeline: the real classes with random weights, a few hundred kilobytes, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from supertuner.models.families.qwen_image.tiny_text import build_tokenizer, build_vision_language_encoder
from supertuner.models.library_logging import quiet_libraries


@dataclass(frozen=True, slots=True)
class TinyQwen:
    """Sizes of a tiny pipeline. What the mathematics depends on (channels, packing, shifts) is as in the real one."""

    layers: int = 2
    heads: int = 2
    text_width: int = 16
    vae_width: int = 8


def build_pipeline(sizes: TinyQwen, seed: int) -> QwenImagePipeline:
    """The pipeline in memory. The same seed gives the same weights, and nobody else's random numbers are used up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built_tokenizer = build_tokenizer()
        return QwenImagePipeline(
            tokenizer=built_tokenizer,
            text_encoder=build_vision_language_encoder(built_tokenizer, sizes.text_width),
            vae=build_vae(sizes),
            transformer=build_transformer(sizes),
            scheduler=build_scheduler(),
        )


def write_pipeline(folder: Path, sizes: TinyQwen, seed: int) -> None:
    """`build`, as a folder like those on the hub."""
    with quiet_libraries():
        build_pipeline(sizes, seed).save_pretrained(folder)


def write_tiny_pipeline(folder: Path, seed: int) -> None:
    write_pipeline(folder, TinyQwen(), seed)


def build_vae(sizes: TinyQwen) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=sizes.vae_width, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()


def build_transformer(sizes: TinyQwen) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        num_layers=sizes.layers,
        attention_head_dim=16,
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text_width,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Of Qwen-Image itself."""
    return FlowMatchEulerDiscreteScheduler(
        base_shift=0.5,
        max_shift=0.9,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
    )

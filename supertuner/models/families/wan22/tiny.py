"""Tiny Wan2.2 pipelines: the real classes with random weights, a few hundred kilobytes, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)

from supertuner.models.families.tiny_text import VOCABULARY, umt5_encoder, unigram_tokenizer
from supertuner.models.library_logging import quiet_libraries

TinyWanKind = Literal["t2v", "i2v", "ti2v"]


@dataclass(frozen=True, slots=True)
class TinyWan:
    """Sizes of a tiny pipeline. What the mathematics depends on (channels, strides, boundary) is as in the real one."""

    kind: TinyWanKind = "t2v"
    """Text to video, image to video (first frame beside the latents), or the 5B's shape: one expert, VAE of 16×."""
    experts: Literal[1, 2] = 2
    """Of `ti2v` there is only one."""
    layers: int = 2
    heads: int = 2
    head_dim: int = 12
    """A multiple of 6: a third each for time, height and width."""
    ffn_dim: int = 48
    text_width: int = 16
    text_layers: int = 1
    words: tuple[str, ...] = VOCABULARY
    """Words that are one token each."""
    vae_width: int = 8
    vae_blocks: int = 1
    latents_mean: tuple[float, ...] | None = None
    """Of the VAE's latents, one per channel; unset: those of the real VAE."""
    latents_std: tuple[float, ...] | None = None
    flow_shift: float = 3.0

    def __post_init__(self) -> None:
        assert self.head_dim % 6 == 0, f"head_width {self.head_dim} is not a multiple of 6"

    @property
    def boundary(self) -> float | None:
        if self.kind == "ti2v" or self.experts == 1:
            return None
        return 0.9 if self.kind == "i2v" else 0.875

    @property
    def channels(self) -> int:
        """Of the VAE's latents."""
        return 48 if self.kind == "ti2v" else 16


def build_pipeline(sizes: TinyWan, seed: int) -> WanPipeline | WanImageToVideoPipeline:
    """The pipeline in memory. The same seed gives the same weights, and nobody else's random numbers are used up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = unigram_tokenizer(sizes.words)
        components: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": umt5_encoder(len(tokenizer), sizes.text_width, sizes.text_layers),
            "vae": _vae(sizes),
            "transformer": _transformer(sizes),
            "transformer_2": _transformer(sizes) if sizes.boundary is not None else None,
            "scheduler": _scheduler(sizes.flow_shift),
            "boundary_ratio": sizes.boundary,
            "expand_timesteps": sizes.kind == "ti2v",
        }
    if sizes.kind == "i2v":
        return WanImageToVideoPipeline(**components, image_encoder=None, image_processor=None)
    return WanPipeline(**components)


def write_pipeline(folder: Path, sizes: TinyWan, seed: int) -> None:
    """`build`, as a folder like those on the hub."""
    with quiet_libraries():
        build_pipeline(sizes, seed).save_pretrained(folder)


def write_tiny_pipeline(folder: Path, seed: int) -> None:
    """Text to video with two experts, in the default sizes."""
    write_pipeline(folder, TinyWan(), seed)


def _vae(sizes: TinyWan) -> AutoencoderKLWan:
    vae_config: dict[str, Any] = {
        "base_dim": sizes.vae_width,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": sizes.vae_blocks,
        "z_dim": sizes.channels,
    }
    if sizes.kind == "ti2v":
        vae_config |= {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
        vae_config |= {"scale_factor_spatial": 16, "decoder_base_dim": sizes.vae_width}
        vae_config |= {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    if sizes.latents_mean is not None:
        vae_config["latents_mean"] = list(sizes.latents_mean)
    if sizes.latents_std is not None:
        vae_config["latents_std"] = list(sizes.latents_std)
    return AutoencoderKLWan(**vae_config).eval()


def _transformer(sizes: TinyWan) -> WanTransformer3DModel:
    channels = sizes.channels
    return WanTransformer3DModel(
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head_dim,
        in_channels=2 * channels + 4 if sizes.kind == "i2v" else channels,
        out_channels=channels,
        text_dim=sizes.text_width,
        freq_dim=32,
        ffn_dim=sizes.ffn_dim,
        num_layers=sizes.layers,
    ).eval()


def _scheduler(flow_shift: float) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
    )

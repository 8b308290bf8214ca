"""The full-size denoisers of every family on the meta device, from their published configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import nn


@cache
def architecture(family: str) -> nn.Module:
    with torch.device("meta"):
        return _MADE[family]()


@cache
def layers(family: str) -> tuple[str, ...]:
    """Names of all modules with a weight that an adapter can change: linear, convolution and norm layers."""
    return _adaptable(architecture(family))


def _adaptable(module: nn.Module) -> tuple[str, ...]:
    kinds = ("Linear", "Conv2d", "Conv3d", "RMSNorm", "LayerNorm", "FP32LayerNorm", "GroupNorm")
    return tuple(
        name
        for name, module in module.named_modules()
        if type(module).__name__ in kinds and list(module.parameters(recurse=False))
    )


def _wan() -> nn.Module:
    """Wan2.2 14B, with the image layers of Wan2.1 image-to-video, whose names are the same."""
    return WanTransformer3DModel(
        num_attention_heads=40, attention_head_dim=128, num_layers=40, ffn_dim=13824, added_kv_proj_dim=5120,
        image_dim=1280,
    )  # fmt: skip


def _flux() -> nn.Module:
    return FluxTransformer2DModel(guidance_embeds=True)


def _sd35() -> nn.Module:
    """SD3.5 medium, whose first 13 blocks have a second attention; the names in large are a subset."""
    return SD3Transformer2DModel(
        sample_size=128, num_layers=24, num_attention_heads=24, attention_head_dim=64, pos_embed_max_size=384,
        joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048, in_channels=16,
        out_channels=16, qk_norm="rms_norm", dual_attention_layers=tuple(range(13)),
    )  # fmt: skip


def _sdxl() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=128, in_channels=4, out_channels=4, block_out_channels=(320, 640, 1280), layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=2048,
        transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
    )  # fmt: skip


def _wan_as_published(**differs: Any) -> nn.Module:
    """Wan2.2 14B as published, with changed entries."""
    sizes = {"num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824}
    return WanTransformer3DModel(**{**sizes, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", **differs})


def _sd35_large() -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=128, num_layers=38, num_attention_heads=38, attention_head_dim=64, pos_embed_max_size=192,
        joint_attention_dim=4096, caption_projection_dim=2432, pooled_projection_dim=2048, in_channels=16,
        out_channels=16, qk_norm="rms_norm",
    )  # fmt: skip


VARIANTS: Mapping[str, tuple[str, Callable[[], nn.Module]]] = {
    "Wan2.2-T2V-A14B": ("wan2.2", _wan_as_published),
    "Wan2.2-I2V-A14B": ("wan2.2", partial(_wan_as_published, in_channels=36)),
    "Wan2.2-TI2V-5B": (
        "wan2.2",
        partial(
            _wan_as_published, num_attention_heads=24, num_layers=30, ffn_dim=14336, in_channels=48, out_channels=48
        ),
    ),
    "FLUX.1-schnell": ("flux", FluxTransformer2DModel),
    "stable-diffusion-3.5-large": ("sd3.5", _sd35_large),
}
"""Other published sizes: name → (family, function that builds the denoiser)."""


@cache
def variant_layers(name: str) -> tuple[str, ...]:
    with torch.device("meta"):
        return _adaptable(VARIANTS[name][1]())


_MADE = {"wan2.2": _wan, "flux": _flux, "qwen-image": QwenImageTransformer2DModel, "sd3.5": _sd35, "sdxl": _sdxl}
FAMILIES = tuple(_MADE)

"""Tiny Wan2.2 pipelines."""

from __future__ import annotations

from typing import Any, Literal

import diffusers

from supertuner.models.families.tiny_pipelines import umt5_encoder, unigram_tokenizer


def tiny_wan_pipeline(
    kind: Literal["t2v", "i2v", "ti2v"] = "t2v", experts: Literal[1, 2] = 2
) -> diffusers.WanPipeline | diffusers.WanImageToVideoPipeline:
    """Text-to-video, image-to-video (the first frame beside the latents), or like the 5B: one expert, a VAE with stride
    16. `experts` is ignored for `ti2v`."""
    boundary = {"t2v": 0.875, "i2v": 0.9}.get(kind) if experts == 2 else None
    tokenizer = unigram_tokenizer()
    components: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": umt5_encoder(len(tokenizer), 16),
        "vae": _tiny_vae(residual=kind == "ti2v"),
        "transformer": _tiny_transformer(kind),
        "transformer_2": None if boundary is None else _tiny_transformer(kind),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        "boundary_ratio": boundary,
        "expand_timesteps": kind == "ti2v",
    }
    if kind == "i2v":
        return diffusers.WanImageToVideoPipeline(**components, image_encoder=None, image_processor=None)
    return diffusers.WanPipeline(**components)


def _tiny_vae(residual: bool) -> diffusers.AutoencoderKLWan:
    """`residual`: with the stride and the channels of the 5B's VAE."""
    config: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    if residual:
        config |= {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 8}
        config |= {"scale_factor_spatial": 16, "z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    return diffusers.AutoencoderKLWan(**config).eval()


def _tiny_transformer(kind: str) -> diffusers.WanTransformer3DModel:
    channels = 48 if kind == "ti2v" else 16
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,  # a multiple of 6: a third each for time, height and width
        in_channels=2 * channels + 4 if kind == "i2v" else channels,
        out_channels=channels,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
    ).eval()

"""Small denoisers of several families, built from a seed, and their outputs for fixed inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, StableAudioDiTModel, WanTransformer3DModel
from torch import nn


def wan(seed: int = 0) -> WanTransformer3DModel:
    return _build(
        seed, WanTransformer3DModel, num_attention_heads=2, attention_head_dim=12, num_layers=2, ffn_dim=32,
        text_dim=16, freq_dim=16, in_channels=16, out_channels=16, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip


def flux(seed: int = 0) -> FluxTransformer2DModel:
    return _build(
        seed, FluxTransformer2DModel, patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def stable_audio(seed: int = 0) -> StableAudioDiTModel:
    """A denoiser without `add_adapter`."""
    return _build(
        seed, StableAudioDiTModel, sample_size=4, in_channels=3, num_layers=2, attention_head_dim=4,
        num_attention_heads=2, num_key_value_attention_heads=1, out_channels=3, cross_attention_dim=4,
        time_proj_dim=8, global_states_input_dim=8, cross_attention_input_dim=4,
    )  # fmt: skip


def wan_output(module: nn.Module) -> torch.Tensor:
    noisy, text = random_tensor(2, 16, 2, 4, 4), random_tensor(2, 6, 16)
    return module(noisy, torch.tensor([900.0, 400.0]), text, return_dict=False)[0]  # type: ignore[no-any-return]


def flux_output(module: nn.Module) -> torch.Tensor:
    out: torch.Tensor = module(
        hidden_states=random_tensor(2, 16, 4),
        timestep=torch.tensor([0.9, 0.4]),
        encoder_hidden_states=random_tensor(2, 5, 32),
        pooled_projections=random_tensor(2, 32),
        txt_ids=torch.zeros(5, 3),
        img_ids=torch.zeros(16, 3),
        return_dict=False,
    )[0]
    return out


def stable_audio_output(module: nn.Module) -> torch.Tensor:
    out: torch.Tensor = module(
        hidden_states=random_tensor(2, 3, 4),
        timestep=torch.tensor([0.9, 0.4]),
        encoder_hidden_states=random_tensor(2, 4, 4),
        global_hidden_states=random_tensor(2, 1, 8),
        rotary_embedding=None,
        return_dict=False,
    )[0]
    return out


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _build(seed: int, kind: Callable[..., Any], **sizes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(**sizes).eval().requires_grad_(False)

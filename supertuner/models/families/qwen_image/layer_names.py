"""Names of Qwen-Image's layers: the original code has the names of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from supertuner.models.adapters.keys_modules import FamilyLayers

_BLOCK: Final = (
    *("img_mod.1", "txt_mod.1", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    *("attn.to_out.0", "attn.to_add_out"),
    *("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"),
)
_OTHER: Final = (
    *("time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2"),
    *("txt_norm", "img_in", "txt_in", "norm_out.linear", "proj_out"),
)
_ORIGINAL_NAMES: Final[Mapping[str, str | None]] = {
    **{name: name for name in _OTHER},
    **{f"transformer_blocks.#.{name}": f"transformer_blocks.#.{name}" for name in _BLOCK},
}

LAYERS: Final = FamilyLayers(
    published_sizes=((3072, 60),),
    family="qwen-image",
    original_names=_ORIGINAL_NAMES,
    comfyui_scheme="original",
    comfyui_reads={
        "original": ("diffusion_model", "lora_unet"),
        "diffusers": ("diffusion_model", "lora_unet", "diffusers", "lycoris", "bare"),
    },
)

"""Names of Flux's layers in diffusers and in its original code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from supertuner.models.adapters.keys_modules import FamilyLayers

_EMBEDDERS: Final = {
    "timestep_embedder": "time_in",
    "guidance_embedder": "guidance_in",
    "text_embedder": "vector_in",
}
_ORIGINAL_NAMES: Final[Mapping[str, str | None]] = {
    **{f"time_text_embed.{ours}.linear_1": f"{theirs}.in_layer" for ours, theirs in _EMBEDDERS.items()},
    **{f"time_text_embed.{ours}.linear_2": f"{theirs}.out_layer" for ours, theirs in _EMBEDDERS.items()},
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "transformer_blocks.#.norm1.linear": "double_blocks.#.img_mod.lin",
    "transformer_blocks.#.norm1_context.linear": "double_blocks.#.txt_mod.lin",
    "transformer_blocks.#.(attn.to_q+attn.to_k+attn.to_v)": "double_blocks.#.img_attn.qkv",
    "transformer_blocks.#.(attn.add_q_proj+attn.add_k_proj+attn.add_v_proj)": "double_blocks.#.txt_attn.qkv",
    "transformer_blocks.#.attn.to_q": None,
    "transformer_blocks.#.attn.to_k": None,
    "transformer_blocks.#.attn.to_v": None,
    "transformer_blocks.#.attn.add_q_proj": None,
    "transformer_blocks.#.attn.add_k_proj": None,
    "transformer_blocks.#.attn.add_v_proj": None,
    "transformer_blocks.#.attn.norm_q": "double_blocks.#.img_attn.norm.query_norm",
    "transformer_blocks.#.attn.norm_k": "double_blocks.#.img_attn.norm.key_norm",
    "transformer_blocks.#.attn.norm_added_q": "double_blocks.#.txt_attn.norm.query_norm",
    "transformer_blocks.#.attn.norm_added_k": "double_blocks.#.txt_attn.norm.key_norm",
    "transformer_blocks.#.attn.to_out.0": "double_blocks.#.img_attn.proj",
    "transformer_blocks.#.attn.to_add_out": "double_blocks.#.txt_attn.proj",
    "transformer_blocks.#.ff.net.0.proj": "double_blocks.#.img_mlp.0",
    "transformer_blocks.#.ff.net.2": "double_blocks.#.img_mlp.2",
    "transformer_blocks.#.ff_context.net.0.proj": "double_blocks.#.txt_mlp.0",
    "transformer_blocks.#.ff_context.net.2": "double_blocks.#.txt_mlp.2",
    "single_transformer_blocks.#.norm.linear": "single_blocks.#.modulation.lin",
    "single_transformer_blocks.#.(attn.to_q+attn.to_k+attn.to_v+proj_mlp)": "single_blocks.#.linear1",
    "single_transformer_blocks.#.attn.to_q": None,
    "single_transformer_blocks.#.attn.to_k": None,
    "single_transformer_blocks.#.attn.to_v": None,
    "single_transformer_blocks.#.proj_mlp": None,
    "single_transformer_blocks.#.attn.norm_q": "single_blocks.#.norm.query_norm",
    "single_transformer_blocks.#.attn.norm_k": "single_blocks.#.norm.key_norm",
    "single_transformer_blocks.#.proj_out": "single_blocks.#.linear2",
    "norm_out.linear": None,  # the original stores scale and shift in the opposite order
    "proj_out": "final_layer.linear",
}

LAYERS: Final = FamilyLayers(
    family="flux",
    original_names=_ORIGINAL_NAMES,
    comfyui_scheme="diffusers",
    comfyui_reads={
        "original": ("diffusion_model", "lora_unet"),
        "diffusers": ("diffusers", "lycoris", "lora_transformer", "bare"),
    },
    processor_names={  # XLabs
        "double_blocks.#.processor.qkv_lora1": "transformer_blocks.#.(attn.to_q+attn.to_k+attn.to_v)",
        "double_blocks.#.processor.qkv_lora2": "transformer_blocks.#.(attn.add_q_proj+attn.add_k_proj+attn.add_v_proj)",
        "double_blocks.#.processor.proj_lora1": "transformer_blocks.#.attn.to_out.0",
        "double_blocks.#.processor.proj_lora2": "transformer_blocks.#.attn.to_add_out",
        "single_blocks.#.processor.qkv_lora": "single_transformer_blocks.#.(attn.to_q+attn.to_k+attn.to_v)",
        "single_blocks.#.processor.proj_lora": "single_transformer_blocks.#.proj_out",
    },
    published_sizes=((3072, 19),),
)

"""Names of the layers of Stable Diffusion 3.5 in diffusers and in its original code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from supertuner.models.adapters.keys_modules import FamilyLayers

_ATTENTION: Final = {"norm_q": "ln_q", "norm_k": "ln_k", "to_out.0": "proj"}
_ORIGINAL_NAMES: Final[Mapping[str, str | None]] = {
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "transformer_blocks.#.norm1.linear": "joint_blocks.#.x_block.adaLN_modulation.1",
    # In the last block the original stores scale and shift in the opposite order.
    "transformer_blocks.#.norm1_context.linear": None,
    "transformer_blocks.#.(attn.to_q+attn.to_k+attn.to_v)": "joint_blocks.#.x_block.attn.qkv",
    "transformer_blocks.#.(attn2.to_q+attn2.to_k+attn2.to_v)": "joint_blocks.#.x_block.attn2.qkv",
    "transformer_blocks.#.(attn.add_q_proj+attn.add_k_proj+attn.add_v_proj)": "joint_blocks.#.context_block.attn.qkv",
    **{f"transformer_blocks.#.{one}.to_{to}": None for one in ("attn", "attn2") for to in "qkv"},
    **{f"transformer_blocks.#.attn.add_{to}_proj": None for to in "qkv"},
    **{
        f"transformer_blocks.#.{one}.{ours}": f"joint_blocks.#.x_block.{one}.{theirs}"
        for one in ("attn", "attn2")
        for ours, theirs in _ATTENTION.items()
    },
    "transformer_blocks.#.attn.norm_added_q": "joint_blocks.#.context_block.attn.ln_q",
    "transformer_blocks.#.attn.norm_added_k": "joint_blocks.#.context_block.attn.ln_k",
    "transformer_blocks.#.attn.to_add_out": "joint_blocks.#.context_block.attn.proj",
    "transformer_blocks.#.ff.net.0.proj": "joint_blocks.#.x_block.mlp.fc1",
    "transformer_blocks.#.ff.net.2": "joint_blocks.#.x_block.mlp.fc2",
    "transformer_blocks.#.ff_context.net.0.proj": "joint_blocks.#.context_block.mlp.fc1",
    "transformer_blocks.#.ff_context.net.2": "joint_blocks.#.context_block.mlp.fc2",
    "norm_out.linear": None,  # the original stores scale and shift in the opposite order
    "proj_out": "final_layer.linear",
}

LAYERS: Final = FamilyLayers(
    family="sd3.5",
    original_names=_ORIGINAL_NAMES,
    convolutions=frozenset({"pos_embed.proj"}),
    comfyui_scheme="diffusers",
    published_sizes=((1536, 24), (2432, 38)),
    comfyui_reads={
        "original": ("diffusion_model", "lora_unet"),
        "diffusers": ("diffusers", "lycoris", "lora_transformer", "peft"),
    },
)

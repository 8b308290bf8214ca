"""Names of Wan's layers in diffusers and in its original code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from supertuner.models.adapters.keys_modules import FamilyLayers

_ATTENTION: Final = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
_ORIGINAL_NAMES: Final[Mapping[str, str | None]] = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    **{f"blocks.#.attn1.{ours}": f"blocks.#.self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"blocks.#.attn2.{ours}": f"blocks.#.cross_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    "blocks.#.attn2.add_k_proj": "blocks.#.cross_attn.k_img",
    "blocks.#.attn2.add_v_proj": "blocks.#.cross_attn.v_img",
    "blocks.#.attn2.norm_added_k": "blocks.#.cross_attn.norm_k_img",
    "blocks.#.norm2": "blocks.#.norm3",
    "blocks.#.ffn.net.0.proj": "blocks.#.ffn.0",
    "blocks.#.ffn.net.2": "blocks.#.ffn.2",
    "proj_out": "head.head",
}

LAYERS: Final = FamilyLayers(
    family="wan2.2",
    original_names=_ORIGINAL_NAMES,
    convolutions=frozenset({"patch_embedding"}),
    comfyui_scheme="original",
    comfyui_reads={"original": ("diffusion_model", "lora_unet")},
)

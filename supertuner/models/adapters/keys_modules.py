"""Tables of each family's layer names: in diffusers, and in the model's original code (used by ComfyUI and kohya).

A row is `name in diffusers: name in the original code`, with `#` for any number; the numbers of both names correspond
in order. Tests compare every row with the full-size architecture and with diffusers' converters of original weights
(loaders/single_file_utils.py). A row with None has no counterpart: either the original fuses the layer with others, or
it stores the layer's rows in another order, so that renaming alone would not convert it.

The original code of Flux and SD3 holds queries, keys and values in one fused layer. Its canonical name lists its parts:
`transformer_blocks.0.(attn.to_q+attn.to_k+attn.to_v)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from supertuner.core.errors import ModelError

NUMBER_PLACEHOLDER: Final = "#"


@dataclass(frozen=True, slots=True)
class FamilyLayers:
    """The layers of a family with their names."""

    family: str
    component: str
    """The pipeline component that holds them; the first one if there are two."""
    experts: tuple[str, ...]
    original_names: Mapping[str, str | None]
    """The rows: name in diffusers → name in the original code."""
    convolutions: frozenset[str] = frozenset()
    """The rows (names in diffusers) that are convolutions."""


def fused_members(module: str) -> tuple[str, ...]:
    """The diffusers layers of a canonical name: one, or the parts of a fused layer."""
    if not module.endswith(")"):
        return (module,)
    base, _, member_suffixes = module[:-1].partition("(")
    return tuple(f"{base}{suffix}" for suffix in member_suffixes.split("+"))


def fill_numbers(name: str, numbers: tuple[str, ...]) -> str:
    """A row's name with `#` replaced by these numbers, in order."""
    parts = name.split(NUMBER_PLACEHOLDER)
    assert len(parts) == len(numbers) + 1, f"{name} takes {len(parts) - 1} numbers, not {numbers}"
    return parts[0] + "".join(f"{number}{part}" for number, part in zip(numbers, parts[1:], strict=True))


# ── Wan 2.x ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_WAN_ATTENTION: Final = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
_WAN: Final[Mapping[str, str | None]] = {
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
    **{f"blocks.#.attn1.{ours}": f"blocks.#.self_attn.{theirs}" for ours, theirs in _WAN_ATTENTION.items()},
    **{f"blocks.#.attn2.{ours}": f"blocks.#.cross_attn.{theirs}" for ours, theirs in _WAN_ATTENTION.items()},
    "blocks.#.attn2.add_k_proj": "blocks.#.cross_attn.k_img",
    "blocks.#.attn2.add_v_proj": "blocks.#.cross_attn.v_img",
    "blocks.#.attn2.norm_added_k": "blocks.#.cross_attn.norm_k_img",
    "blocks.#.norm2": "blocks.#.norm3",
    "blocks.#.ffn.net.0.proj": "blocks.#.ffn.0",
    "blocks.#.ffn.net.2": "blocks.#.ffn.2",
    "proj_out": "head.head",
}

# ── Flux 1 ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_FLUX_EMBEDDERS: Final = {
    "timestep_embedder": "time_in",
    "guidance_embedder": "guidance_in",
    "text_embedder": "vector_in",
}
_FLUX: Final[Mapping[str, str | None]] = {
    **{f"time_text_embed.{ours}.linear_1": f"{theirs}.in_layer" for ours, theirs in _FLUX_EMBEDDERS.items()},
    **{f"time_text_embed.{ours}.linear_2": f"{theirs}.out_layer" for ours, theirs in _FLUX_EMBEDDERS.items()},
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

# ── Stable Diffusion 3.5 ──────────────────────────────────────────────────────────────────────────────────────────────

_SD3_ATTENTION: Final = {"norm_q": "ln_q", "norm_k": "ln_k", "to_out.0": "proj"}
_SD3: Final[Mapping[str, str | None]] = {
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
        for ours, theirs in _SD3_ATTENTION.items()
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

# ── Qwen-Image: the original code has the names of diffusers ──────────────────────────────────────────────────────────

_QWEN_BLOCK: Final = (
    *("img_mod.1", "txt_mod.1", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    *("attn.to_out.0", "attn.to_add_out"),
    *("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"),
)
_QWEN_OTHER: Final = (
    *("time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2"),
    *("txt_norm", "img_in", "txt_in", "norm_out.linear", "proj_out"),
)
_QWEN: Final[Mapping[str, str | None]] = {
    **{name: name for name in _QWEN_OTHER},
    **{f"transformer_blocks.#.{name}": f"transformer_blocks.#.{name}" for name in _QWEN_BLOCK},
}

# ── Stable Diffusion XL: diffusers numbers blocks, and layers within them; the original numbers all layers in a row ───

_SDXL_RESNET: Final = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_SDXL_ATTENTION: Final = (
    *("norm", "proj_in", "proj_out"),
    *(f"transformer_blocks.#.norm{number}" for number in (1, 2, 3)),
    *(
        f"transformer_blocks.#.{attention}.{name}"
        for attention in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    *("transformer_blocks.#.ff.net.0.proj", "transformer_blocks.#.ff.net.2"),
)
_SDXL_LAYERS_PER_BLOCK: Final = 2


def _sdxl_layer_positions() -> Iterator[tuple[str, str, bool]]:
    """(a layer's prefix in diffusers, its prefix in the original, whether it is attention instead of a resnet)."""
    for block in range(3):
        for layer in range(_SDXL_LAYERS_PER_BLOCK):
            original_index = 1 + block * (_SDXL_LAYERS_PER_BLOCK + 1) + layer
            yield f"down_blocks.{block}.resnets.{layer}", f"input_blocks.{original_index}.0", False
            yield f"down_blocks.{block}.attentions.{layer}", f"input_blocks.{original_index}.1", True
        for layer in range(_SDXL_LAYERS_PER_BLOCK + 1):
            original_index = block * (_SDXL_LAYERS_PER_BLOCK + 1) + layer
            yield f"up_blocks.{block}.resnets.{layer}", f"output_blocks.{original_index}.0", False
            yield f"up_blocks.{block}.attentions.{layer}", f"output_blocks.{original_index}.1", True
    yield "mid_block.resnets.0", "middle_block.0", False
    yield "mid_block.attentions.0", "middle_block.1", True
    yield "mid_block.resnets.1", "middle_block.2", False


def _sdxl_rows() -> Iterator[tuple[str, str | None]]:
    yield from {
        "conv_in": "input_blocks.0.0",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
        "down_blocks.1.downsamplers.0.conv": "input_blocks.6.0.op",
        "up_blocks.0.upsamplers.0.conv": "output_blocks.2.2.conv",
        "up_blocks.1.upsamplers.0.conv": "output_blocks.5.2.conv",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }.items()
    for ours, theirs, attention in _sdxl_layer_positions():
        for name, original_name in (
            {name: name for name in _SDXL_ATTENTION}.items() if attention else _SDXL_RESNET.items()
        ):
            yield f"{ours}.{name}", f"{theirs}.{original_name}"


_SDXL: Final[Mapping[str, str | None]] = {row: original for row, original in _sdxl_rows()}
_CONVOLUTION_SUFFIXES: Final = (".conv1", ".conv2", ".conv_shortcut", ".conv", "conv_in", "conv_out")

FAMILY_LAYERS: Final[Mapping[str, FamilyLayers]] = {
    layout.family: layout
    for layout in (
        FamilyLayers("wan2.2", "transformer", ("high_noise", "low_noise"), _WAN, frozenset({"patch_embedding"})),
        FamilyLayers("flux", "transformer", ("model",), _FLUX),
        FamilyLayers("qwen-image", "transformer", ("model",), _QWEN),
        FamilyLayers("sd3.5", "transformer", ("model",), _SD3, frozenset({"pos_embed.proj"})),
        FamilyLayers(
            "sdxl", "unet", ("model",), _SDXL, frozenset(name for name in _SDXL if name.endswith(_CONVOLUTION_SUFFIXES))
        ),
    )
}
"""By family, in order of preference for files that fit several."""

SHARED_LAYERS: Final[Mapping[str, str]] = {"qwen-image-edit": "qwen-image"}
"""Family → the family whose denoiser architecture it shares."""


def layer_table_family(family: str) -> str:
    """The family whose table of layers this family uses. Raises ModelError for an unknown family."""
    table_family = SHARED_LAYERS.get(family, family)
    if table_family not in FAMILY_LAYERS:
        raise ModelError(f"the family is {family!r}; use one of {', '.join((*FAMILY_LAYERS, *SHARED_LAYERS))}")
    return table_family

"""Names of SDXL's layers in diffusers and in its original code.

diffusers numbers blocks, and layers within them; the original code numbers all layers in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from supertuner.models.adapters.keys_modules import FamilyLayers

_RESNET: Final = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_ATTENTION: Final = (
    *("norm", "proj_in", "proj_out"),
    *(f"transformer_blocks.#.norm{number}" for number in (1, 2, 3)),
    *(
        f"transformer_blocks.#.{attention}.{name}"
        for attention in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    *("transformer_blocks.#.ff.net.0.proj", "transformer_blocks.#.ff.net.2"),
)
_LAYERS_PER_BLOCK: Final = 2


def _layer_positions() -> Iterator[tuple[str, str, bool]]:
    """(a layer's prefix in diffusers, its prefix in the original, whether it is attention instead of a resnet)."""
    for block in range(3):
        for layer in range(_LAYERS_PER_BLOCK):
            original_index = 1 + block * (_LAYERS_PER_BLOCK + 1) + layer
            yield f"down_blocks.{block}.resnets.{layer}", f"input_blocks.{original_index}.0", False
            yield f"down_blocks.{block}.attentions.{layer}", f"input_blocks.{original_index}.1", True
        for layer in range(_LAYERS_PER_BLOCK + 1):
            original_index = block * (_LAYERS_PER_BLOCK + 1) + layer
            yield f"up_blocks.{block}.resnets.{layer}", f"output_blocks.{original_index}.0", False
            yield f"up_blocks.{block}.attentions.{layer}", f"output_blocks.{original_index}.1", True
    yield "mid_block.resnets.0", "middle_block.0", False
    yield "mid_block.attentions.0", "middle_block.1", True
    yield "mid_block.resnets.1", "middle_block.2", False


def _rows() -> Iterator[tuple[str, str | None]]:
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
    for ours, theirs, attention in _layer_positions():
        for name, original_name in {name: name for name in _ATTENTION}.items() if attention else _RESNET.items():
            yield f"{ours}.{name}", f"{theirs}.{original_name}"


_ORIGINAL_NAMES: Final = {row: original for row, original in _rows()}
_CONVOLUTION_SUFFIXES: Final = (".conv1", ".conv2", ".conv_shortcut", ".conv", "conv_in", "conv_out")

LAYERS: Final = FamilyLayers(
    family="sdxl",
    original_names=_ORIGINAL_NAMES,
    convolutions=frozenset(name for name in _ORIGINAL_NAMES if name.endswith(_CONVOLUTION_SUFFIXES)),
    comfyui_scheme="kohya",
    comfyui_reads={"original": ("diffusion_model", "lora_unet"), "diffusers": ("lora_unet", "lycoris")},
    processor_names={  # diffusers before 0.22
        row.replace(f".{name}", f".processor.{name.removesuffix('.0')}_lora"): row
        for row in _ORIGINAL_NAMES
        for name in ("to_q", "to_k", "to_v", "to_out.0")
        if row.endswith(f".{name}")
    },
)

"""A family's layer names: in diffusers, and in the model's original code (used by ComfyUI and kohya).

Each family has a table in `families/<family>/layer_names.py`. A row is `name in diffusers: name in the original code`,
with `#` for any number; the numbers of both names correspond in order. Tests compare every row with the full-size
architecture and with diffusers' converters of original weights (loaders/single_file_utils.py). A row with None has no
counterpart: either the original fuses the layer with others, or it stores the layer's rows in another order, so that
renaming alone would not convert it.

The original code of Flux and SD3 holds queries, keys and values in one fused layer. Its canonical name lists its parts:
`transformer_blocks.0.(attn.to_q+attn.to_k+attn.to_v)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supertuner.config.families import FAMILIES
from supertuner.models.adapters.keys_schemes import KeyScheme, LayerNaming

NUMBER_PLACEHOLDER: Final = "#"


@dataclass(frozen=True, slots=True)
class FamilyLayers:
    """The names of a family's layers in diffusers and in the original code, and which keys ComfyUI reads for them."""

    family: str
    original_names: Mapping[str, str | None]
    """The rows: name in diffusers → name in the original code."""
    comfyui_scheme: str
    """The key scheme of exports for ComfyUI: one in which separate q, k and v layers stay separate."""
    comfyui_reads: Mapping[LayerNaming, Sequence[str]]
    """Naming → the styles whose keys ComfyUI maps to layers: a summary of `model_lora_keys_unet` in its comfy/lora.py.

    For every model it accepts `diffusion_model.NAME` and `lora_unet_NAME` with original layer names; for a UNet also
    the names of diffusers after `lora_unet_` and `lycoris_`; for SD3, Flux and Qwen-Image the names of diffusers after
    the other prefixes. For Wan it accepts no names of diffusers. SDXL with `unet.` is left out: there ComfyUI expects
    the older `.processor.` names.
    """
    convolutions: frozenset[str] = field(default_factory=frozenset)
    """The rows (names in diffusers) that are convolutions."""
    processor_names: Mapping[str, str] = field(default_factory=dict)
    """Name in files of trainers that made LoRAs attention processors → canonical name. Such files are read, not
    written; their tensors are named `down.weight` and `up.weight`."""
    published_sizes: tuple[tuple[int, int], ...] = ()
    """(size of the hidden states, number of `transformer_blocks`) of each published model; they tell families with
    equal names apart."""

    @property
    def experts(self) -> Mapping[str, str]:
        """Name of each expert → the pipeline component that holds its layers, high noise first."""
        return FAMILIES[self.family].experts

    @property
    def component(self) -> str:
        """The pipeline component of the first expert."""
        return next(iter(self.experts.values()))

    def comfyui_loads(self, scheme: KeyScheme, dora: bool = False) -> bool:
        """Whether ComfyUI reads all keys of a file: LoRA matrices in both spellings, DoRA only in that of kohya."""
        readable = scheme.style in self.comfyui_reads.get(scheme.naming, ())
        return readable and scheme.spelling in (("kohya",) if dora else ("peft", "kohya"))


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

"""The schemes by which programs write keys: prefix, separator, naming of layers, spelling of tensors.

    lycoris_transformer_1_  │  blocks_0_attn1_to_q   │  .lokr_w1
    diffusion_model.        │  blocks.0.self_attn.q  │  .lora_A.weight
    style: prefix, separator   naming of the layer      spelling of the tensor

The three are independent: a scheme is one of each, and every combination can be read and written. docs/adapters.md
lists which program uses which scheme, with sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

HIGH_NOISE: Final = "high_noise"
LOW_NOISE: Final = "low_noise"
KIND_PLACEHOLDER: Final = "{kind}"
"""In a prefix: replaced by `conv` for convolutions and `linear` for other layers."""
COMPONENT_PLACEHOLDER: Final = "{part}"
"""In a prefix: replaced by the pipeline component, `transformer` or `unet`."""

LayerNaming: TypeAlias = Literal["diffusers", "original"]
LAYER_NAMINGS: Final[tuple[LayerNaming, ...]] = ("diffusers", "original")


@dataclass(frozen=True, slots=True)
class KeyStyle:
    prefixes: Mapping[str | None, str]
    """Expert → prefix of its keys. The expert None means that keys do not name their expert."""
    separator: str
    """Between the parts of a layer's name. The tensor's name always follows a dot."""


def _stage_prefixes(before: str, after: str) -> dict[str | None, str]:
    return {HIGH_NOISE: f"{before}1{after}", LOW_NOISE: f"{before}2{after}"}


KEY_STYLES: Final[Mapping[str, KeyStyle]] = {
    "diffusers": KeyStyle({None: f"{COMPONENT_PLACEHOLDER}."}, "."),
    "diffusers-pair": KeyStyle({HIGH_NOISE: "transformer.", LOW_NOISE: "transformer_2."}, "."),
    "diffusion_model": KeyStyle({None: "diffusion_model."}, "."),
    "model.diffusion_model": KeyStyle({None: "model.diffusion_model."}, "."),
    "peft": KeyStyle({None: "base_model.model."}, "."),
    "bare": KeyStyle({None: ""}, "."),
    "stages": KeyStyle(_stage_prefixes("transformer_", "."), "."),
    "stages-in-transformer": KeyStyle(_stage_prefixes("transformer.transformer_", "."), "."),
    "stages-in-diffusion_model": KeyStyle(_stage_prefixes("diffusion_model.transformer_", "."), "."),
    "dollars": KeyStyle({None: "transformer$$"}, "$$"),
    "dollar-stages": KeyStyle(_stage_prefixes("transformer_", "$$"), "$$"),
    "dollar-stages-in-transformer": KeyStyle(_stage_prefixes("transformer$$transformer_", "$$"), "$$"),
    "lora_unet": KeyStyle({None: "lora_unet_"}, "_"),
    "lora_unet-stages": KeyStyle(_stage_prefixes("lora_unet_transformer_", "_"), "_"),
    "lora_transformer": KeyStyle({None: "lora_transformer_"}, "_"),
    "lora_transformer-stages": KeyStyle(_stage_prefixes("lora_transformer_", "_"), "_"),
    "lycoris": KeyStyle({None: "lycoris_"}, "_"),
    "lycoris-stages": KeyStyle(_stage_prefixes("lycoris_transformer_", "_"), "_"),
    "lycoris-pair": KeyStyle({HIGH_NOISE: "lycoris_transformer_", LOW_NOISE: "lycoris_transformer_2_"}, "_"),
    "lycoris-dots": KeyStyle({None: "lycoris."}, "."),
    "lycoris-dots-stages": KeyStyle(_stage_prefixes("lycoris.transformer_", "."), "."),
    "short-stages": KeyStyle(_stage_prefixes("transformer", "_"), "_"),
    "short-stages-dots": KeyStyle(_stage_prefixes("transformer", "."), "."),
    "kinds": KeyStyle({None: f"lora_{KIND_PLACEHOLDER}_"}, "_"),
    "kinds-stages": KeyStyle(_stage_prefixes(f"lora_{KIND_PLACEHOLDER}_transformer_", "_"), "_"),
}
"""In order of preference for files that fit several."""

_COMMON_TENSORS: Final = (
    *("alpha", "lora_mid.weight", "diff", "diff_b", "w_norm", "b_norm", "scalar", "magnitude"),
    *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t1", "lokr_t2"),
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    *("oft_blocks", "rescale", "on_input", "a1.weight", "a2.weight", "b1.weight", "b2.weight", "bm.weight"),
)
LORA_A: Final = "lora_A"
LORA_B: Final = "lora_B"
LORA_BIAS: Final = "lora_B.bias"
ALPHA: Final = "alpha"
DORA_SCALE: Final = "dora_scale"

TENSOR_SPELLINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "peft": {
        LORA_A: "lora_A.weight",
        LORA_B: "lora_B.weight",
        LORA_BIAS: "lora_B.bias",
        DORA_SCALE: "lora_magnitude_vector",
    },
    "peft, adapter named": {
        LORA_A: "lora_A.default.weight",
        LORA_B: "lora_B.default.weight",
        LORA_BIAS: "lora_B.default.bias",
        DORA_SCALE: "lora_magnitude_vector.default.weight",
    },
    "kohya": {
        LORA_A: "lora_down.weight",
        LORA_B: "lora_up.weight",
        LORA_BIAS: "lora_up.bias",
        DORA_SCALE: "dora_scale",
    },
    "old diffusers": {
        LORA_A: "lora.down.weight",
        LORA_B: "lora.up.weight",
        LORA_BIAS: "lora.up.bias",
        DORA_SCALE: "lora_magnitude_vector.weight",
    },
}
"""Spelling → canonical tensor → name. All other tensors have the same name everywhere."""

CANONICAL_TENSORS: Final = (LORA_A, LORA_B, LORA_BIAS, DORA_SCALE, *_COMMON_TENSORS)
"""All canonical tensors."""


def spell_tensor(tensor: str, spelling: str) -> str:
    return TENSOR_SPELLINGS[spelling].get(tensor, tensor)


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """A scheme of keys: style, naming of layers and spelling of tensors."""

    style: str
    naming: LayerNaming
    spelling: str

    @property
    def name(self) -> str:
        """Its name in `KEY_SCHEMES`, or else a description."""
        known_name = next((name for name, scheme in KEY_SCHEMES.items() if scheme == self), None)
        return known_name or f"{self.style} / {self.naming} names / {self.spelling}"

    @property
    def marks_experts(self) -> bool:
        return None not in KEY_STYLES[self.style].prefixes

    @property
    def stores_alpha(self) -> bool:
        """Whether its readers expect an `.alpha` tensor with a LoRA."""
        return self.spelling == "kohya"


KEY_SCHEMES: Final[Mapping[str, KeyScheme]] = {
    "diffusers": KeyScheme("diffusers", "diffusers", "peft"),
    "diffusers-pair": KeyScheme("diffusers-pair", "diffusers", "peft"),
    "peft": KeyScheme("peft", "diffusers", "peft"),
    "bare": KeyScheme("bare", "diffusers", "peft"),
    "original": KeyScheme("diffusion_model", "original", "peft"),
    "original-down-up": KeyScheme("diffusion_model", "original", "kohya"),
    "kohya": KeyScheme("lora_unet", "original", "kohya"),
    "kohya-diffusers": KeyScheme("lora_unet", "diffusers", "kohya"),
    "onetrainer": KeyScheme("lora_transformer", "diffusers", "kohya"),
    "lycoris": KeyScheme("lycoris", "diffusers", "kohya"),
    "lycoris-stages": KeyScheme("lycoris-stages", "diffusers", "kohya"),
    "lycoris-pair": KeyScheme("lycoris-pair", "diffusers", "kohya"),
    "lycoris-dots": KeyScheme("lycoris-dots", "diffusers", "kohya"),
    "lycoris-dots-stages": KeyScheme("lycoris-dots-stages", "diffusers", "kohya"),
    "ai-toolkit": KeyScheme("stages", "diffusers", "peft"),
    "ai-toolkit-in-transformer": KeyScheme("stages-in-transformer", "diffusers", "peft"),
    "ai-toolkit-in-diffusion_model": KeyScheme("stages-in-diffusion_model", "original", "peft"),
    "ai-toolkit-dollars": KeyScheme("dollar-stages", "diffusers", "kohya"),
    "ai-toolkit-dollars-in-transformer": KeyScheme("dollar-stages-in-transformer", "diffusers", "kohya"),
    "ai-toolkit-short": KeyScheme("short-stages", "diffusers", "kohya"),
    "ai-toolkit-kinds": KeyScheme("kinds-stages", "diffusers", "kohya"),
}
"""Schemes that can be chosen by name."""

COMFYUI_SCHEMES: Final[Mapping[str, str]] = {
    "wan2.2": "original",
    "flux": "diffusers",
    "qwen-image": "original",
    "sd3.5": "diffusers",
    "sdxl": "kohya",
}
"""Family → a scheme that ComfyUI loads and that needs no fusing of layers."""

COMFYUI_READABLE: Final[Mapping[str, frozenset[tuple[str, LayerNaming]]]] = {
    "wan2.2": frozenset({("diffusion_model", "original"), ("lora_unet", "original")}),
    "flux": frozenset(
        {
            *(("diffusion_model", "original"), ("lora_unet", "original")),
            *(("diffusers", "diffusers"), ("lycoris", "diffusers"), ("lora_transformer", "diffusers")),
            ("bare", "diffusers"),
        }
    ),
    "qwen-image": frozenset(
        {
            *(("diffusion_model", "original"), ("lora_unet", "original")),
            *(("diffusion_model", "diffusers"), ("lora_unet", "diffusers")),
            *(("diffusers", "diffusers"), ("lycoris", "diffusers"), ("bare", "diffusers")),
        }
    ),
    "sd3.5": frozenset(
        {
            *(("diffusion_model", "original"), ("lora_unet", "original")),
            *(("diffusers", "diffusers"), ("lycoris", "diffusers"), ("lora_transformer", "diffusers")),
            ("peft", "diffusers"),
        }
    ),
    "sdxl": frozenset(
        {
            *(("diffusion_model", "original"), ("lora_unet", "original")),
            *(("lora_unet", "diffusers"), ("lycoris", "diffusers")),
        }
    ),
}
"""Family → the (style, naming) pairs whose keys ComfyUI maps to layers: a summary of `model_lora_keys_unet` in its
comfy/lora.py.

For every model it accepts `diffusion_model.NAME` and `lora_unet_NAME` with original layer names; for a UNet also the
names of diffusers after `lora_unet_` and `lycoris_`; for SD3, Flux and Qwen-Image the names of diffusers after the
other prefixes. For Wan it accepts no names of diffusers. SDXL with `unet.` is left out: there ComfyUI expects the older
`.processor.` names.
"""


def comfyui_reads(family: str, scheme: KeyScheme, dora: bool = False) -> bool:
    """Whether ComfyUI reads all keys of a file. It knows both spellings of LoRA matrices, but only kohya's of DoRA."""
    readable = (scheme.style, scheme.naming) in COMFYUI_READABLE.get(family, frozenset())
    return readable and scheme.spelling in (("kohya",) if dora else ("peft", "kohya"))

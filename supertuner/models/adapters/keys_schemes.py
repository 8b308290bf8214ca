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

KIND_PLACEHOLDER: Final = "{kind}"
"""In a prefix: replaced by `conv` for convolutions and `linear` for other layers."""
COMPONENT_PLACEHOLDER: Final = "{part}"
"""In a prefix: replaced by the pipeline component of the first expert, `transformer` or `unet`."""
EXPERT_COMPONENT_PLACEHOLDER: Final = "{expert part}"
"""In a prefix: replaced by the pipeline component of the key's expert, such as `transformer_2`."""
STAGE_PLACEHOLDER: Final = "{stage}"
"""In a prefix: replaced by the number of the key's expert, 1 for the highest noise levels."""

LayerNaming: TypeAlias = Literal["diffusers", "original"]
LAYER_NAMINGS: Final[tuple[LayerNaming, ...]] = ("diffusers", "original")


@dataclass(frozen=True, slots=True)
class KeyStyle:
    prefix: str
    separator: str
    """Between the parts of a layer's name. The tensor's name always follows a dot."""

    @property
    def marks_experts(self) -> bool:
        """Whether a key names its expert."""
        return STAGE_PLACEHOLDER in self.prefix or EXPERT_COMPONENT_PLACEHOLDER in self.prefix


KEY_STYLES: Final[Mapping[str, KeyStyle]] = {
    "diffusers": KeyStyle(f"{COMPONENT_PLACEHOLDER}.", "."),
    "diffusers-pair": KeyStyle(f"{EXPERT_COMPONENT_PLACEHOLDER}.", "."),
    "diffusion_model": KeyStyle("diffusion_model.", "."),
    "model.diffusion_model": KeyStyle("model.diffusion_model.", "."),
    "peft": KeyStyle("base_model.model.", "."),
    "bare": KeyStyle("", "."),
    "stages": KeyStyle(f"transformer_{STAGE_PLACEHOLDER}.", "."),
    "stages-in-transformer": KeyStyle(f"transformer.transformer_{STAGE_PLACEHOLDER}.", "."),
    "stages-in-diffusion_model": KeyStyle(f"diffusion_model.transformer_{STAGE_PLACEHOLDER}.", "."),
    "dollars": KeyStyle("transformer$$", "$$"),
    "dollar-stages": KeyStyle(f"transformer_{STAGE_PLACEHOLDER}$$", "$$"),
    "dollar-stages-in-transformer": KeyStyle(f"transformer$$transformer_{STAGE_PLACEHOLDER}$$", "$$"),
    "lora_unet": KeyStyle("lora_unet_", "_"),
    "lora_unet-double": KeyStyle("lora_unet__", "_"),
    "lora_unet-stages": KeyStyle(f"lora_unet_transformer_{STAGE_PLACEHOLDER}_", "_"),
    "lora_transformer": KeyStyle("lora_transformer_", "_"),
    "lora_transformer-stages": KeyStyle(f"lora_transformer_{STAGE_PLACEHOLDER}_", "_"),
    "lycoris": KeyStyle("lycoris_", "_"),
    "lycoris-stages": KeyStyle(f"lycoris_transformer_{STAGE_PLACEHOLDER}_", "_"),
    "lycoris-pair": KeyStyle(f"lycoris_{EXPERT_COMPONENT_PLACEHOLDER}_", "_"),
    "lycoris-dots": KeyStyle("lycoris.", "."),
    "lycoris-dots-stages": KeyStyle(f"lycoris.transformer_{STAGE_PLACEHOLDER}.", "."),
    "short-stages": KeyStyle(f"transformer{STAGE_PLACEHOLDER}_", "_"),
    "short-stages-dots": KeyStyle(f"transformer{STAGE_PLACEHOLDER}.", "."),
    "kinds": KeyStyle(f"lora_{KIND_PLACEHOLDER}_", "_"),
    "kinds-stages": KeyStyle(f"lora_{KIND_PLACEHOLDER}_transformer_{STAGE_PLACEHOLDER}_", "_"),
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

PROCESSOR_TENSORS: Final = {"down.weight": LORA_A, "up.weight": LORA_B}
"""Names of tensors after a layer's `processor_names`. They are read as the spelling "old diffusers"."""
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
        return KEY_STYLES[self.style].marks_experts

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
    "wan-fun": KeyScheme("lora_unet-double", "original", "kohya"),
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

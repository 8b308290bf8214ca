"""How programs write a key: what stands before the layer's name, what joins its parts, what each tensor is called.

    lycoris_transformer_1_  │  blocks_0_attn1_to_q   │  .lokr_w1
    diffusion_model.        │  blocks.0.self_attn.q  │  .lora_A.weight
    style: prefix, joint       naming of the layer      spelling of the tensor

The three are independent, so a scheme is one of each, and any combination that a file has is read and written back.
Who uses which, and where that is written down, is said in docs/adapters.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

HIGH: Final = "high_noise"
LOW: Final = "low_noise"
KIND: Final = "{kind}"
"""In a prefix: `conv` before a convolution, `linear` before another layer."""
PART: Final = "{part}"
"""In a prefix: the pipeline's name of the module, `transformer` or `unet`."""

Naming: TypeAlias = Literal["diffusers", "original"]
NAMINGS: Final[tuple[Naming, ...]] = ("diffusers", "original")


@dataclass(frozen=True, slots=True)
class Style:
    prefixes: Mapping[str | None, str]
    """Expert → what its keys begin with; None: the keys do not say which expert they are of."""
    separator: str
    """What joins the parts of a layer's name. A tensor's own name always follows a dot."""


def _stages(before: str, after: str) -> dict[str | None, str]:
    return {HIGH: f"{before}1{after}", LOW: f"{before}2{after}"}


STYLES: Final[Mapping[str, Style]] = {
    "diffusers": Style({None: f"{PART}."}, "."),
    "diffusers-pair": Style({HIGH: "transformer.", LOW: "transformer_2."}, "."),
    "diffusion_model": Style({None: "diffusion_model."}, "."),
    "model.diffusion_model": Style({None: "model.diffusion_model."}, "."),
    "peft": Style({None: "base_model.model."}, "."),
    "bare": Style({None: ""}, "."),
    "stages": Style(_stages("transformer_", "."), "."),
    "stages-in-transformer": Style(_stages("transformer.transformer_", "."), "."),
    "stages-in-diffusion_model": Style(_stages("diffusion_model.transformer_", "."), "."),
    "dollars": Style({None: "transformer$$"}, "$$"),
    "dollar-stages": Style(_stages("transformer_", "$$"), "$$"),
    "dollar-stages-in-transformer": Style(_stages("transformer$$transformer_", "$$"), "$$"),
    "lora_unet": Style({None: "lora_unet_"}, "_"),
    "lora_unet-stages": Style(_stages("lora_unet_transformer_", "_"), "_"),
    "lora_transformer": Style({None: "lora_transformer_"}, "_"),
    "lora_transformer-stages": Style(_stages("lora_transformer_", "_"), "_"),
    "lycoris": Style({None: "lycoris_"}, "_"),
    "lycoris-stages": Style(_stages("lycoris_transformer_", "_"), "_"),
    "lycoris-pair": Style({HIGH: "lycoris_transformer_", LOW: "lycoris_transformer_2_"}, "_"),
    "lycoris-dots": Style({None: "lycoris."}, "."),
    "lycoris-dots-stages": Style(_stages("lycoris.transformer_", "."), "."),
    "short-stages": Style(_stages("transformer", "_"), "_"),
    "short-stages-dots": Style(_stages("transformer", "."), "."),
    "kinds": Style({None: f"lora_{KIND}_"}, "_"),
    "kinds-stages": Style(_stages(f"lora_{KIND}_transformer_", "_"), "_"),
}
"""In the order of preference where a file fits several: the plainest first."""

_SAME_EVERYWHERE: Final = (
    *("alpha", "lora_mid.weight", "diff", "diff_b", "w_norm", "b_norm", "scalar", "magnitude"),
    *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t1", "lokr_t2"),
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    *("oft_blocks", "rescale", "on_input", "a1.weight", "a2.weight", "b1.weight", "b2.weight", "bm.weight"),
)
LORA_A: Final = "lora_A"
LORA_B: Final = "lora_B"
LORA_BIAS: Final = "lora_B.bias"
ALPHA: Final = "alpha"
DORA: Final = "dora_scale"

SPELLINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "peft": {
        LORA_A: "lora_A.weight",
        LORA_B: "lora_B.weight",
        LORA_BIAS: "lora_B.bias",
        DORA: "lora_magnitude_vector",
    },
    "peft, adapter named": {
        LORA_A: "lora_A.default.weight",
        LORA_B: "lora_B.default.weight",
        LORA_BIAS: "lora_B.default.bias",
        DORA: "lora_magnitude_vector.default.weight",
    },
    "kohya": {
        LORA_A: "lora_down.weight",
        LORA_B: "lora_up.weight",
        LORA_BIAS: "lora_up.bias",
        DORA: "dora_scale",
    },
    "old diffusers": {
        LORA_A: "lora.down.weight",
        LORA_B: "lora.up.weight",
        LORA_BIAS: "lora.up.bias",
        DORA: "lora_magnitude_vector.weight",
    },
}
"""Spelling → canonical tensor → what it is called. All other tensors have one name everywhere."""

TENSORS: Final = (LORA_A, LORA_B, LORA_BIAS, DORA, *_SAME_EVERYWHERE)
"""Every canonical tensor of a layer."""


def spelled(tensor: str, spelling: str) -> str:
    return SPELLINGS[spelling].get(tensor, tensor)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of writing keys."""

    style: str
    naming: Naming
    spelling: str

    @property
    def name(self) -> str:
        """Its name in the table, or what it is made of."""
        found = next((name for name, scheme in SCHEMES.items() if scheme == self), None)
        return found or f"{self.style} / {self.naming} names / {self.spelling}"

    @property
    def marks_experts(self) -> bool:
        return None not in STYLES[self.style].prefixes

    @property
    def keeps_alpha(self) -> bool:
        """Whether readers of it look for an `.alpha` beside a LoRA's two matrices."""
        return self.spelling == "kohya"


SCHEMES: Final[Mapping[str, Scheme]] = {
    "diffusers": Scheme("diffusers", "diffusers", "peft"),
    "diffusers-pair": Scheme("diffusers-pair", "diffusers", "peft"),
    "peft": Scheme("peft", "diffusers", "peft"),
    "bare": Scheme("bare", "diffusers", "peft"),
    "original": Scheme("diffusion_model", "original", "peft"),
    "original-down-up": Scheme("diffusion_model", "original", "kohya"),
    "kohya": Scheme("lora_unet", "original", "kohya"),
    "kohya-diffusers": Scheme("lora_unet", "diffusers", "kohya"),
    "onetrainer": Scheme("lora_transformer", "diffusers", "kohya"),
    "lycoris": Scheme("lycoris", "diffusers", "kohya"),
    "lycoris-stages": Scheme("lycoris-stages", "diffusers", "kohya"),
    "lycoris-pair": Scheme("lycoris-pair", "diffusers", "kohya"),
    "lycoris-dots": Scheme("lycoris-dots", "diffusers", "kohya"),
    "lycoris-dots-stages": Scheme("lycoris-dots-stages", "diffusers", "kohya"),
    "ai-toolkit": Scheme("stages", "diffusers", "peft"),
    "ai-toolkit-in-transformer": Scheme("stages-in-transformer", "diffusers", "peft"),
    "ai-toolkit-in-diffusion_model": Scheme("stages-in-diffusion_model", "original", "peft"),
    "ai-toolkit-dollars": Scheme("dollar-stages", "diffusers", "kohya"),
    "ai-toolkit-dollars-in-transformer": Scheme("dollar-stages-in-transformer", "diffusers", "kohya"),
    "ai-toolkit-short": Scheme("short-stages", "diffusers", "kohya"),
    "ai-toolkit-kinds": Scheme("kinds-stages", "diffusers", "kohya"),
}
"""Those that are offered by name."""

COMFYUI: Final[Mapping[str, str]] = {
    "wan2.2": "original",
    "flux": "diffusers",
    "qwen-image": "original",
    "sd3.5": "diffusers",
    "sdxl": "kohya",
}
"""Family → the scheme that ComfyUI loads and that no fused layer stands in the way of."""

COMFYUI_READS: Final[Mapping[str, frozenset[tuple[str, Naming]]]] = {
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
"""Family → (style, naming) whose keys ComfyUI maps to a layer: `model_lora_keys_unet` of its comfy/lora.py, restated.

For every model it takes `diffusion_model.NAME` and `lora_unet_NAME` of its own (the original's) names; for a UNet also
diffusers' names behind `lora_unet_` and `lycoris_`; for SD3, Flux and Qwen-Image diffusers' behind the rest. Of Wan it
knows no diffusers' names. SDXL behind `unet.` is left out: ComfyUI wants the older `.processor.` spelling there.
"""


def comfyui_reads(family: str, scheme: Scheme, dora: bool = False) -> bool:
    """Whether ComfyUI would find all of a file. It knows both spellings of a LoRA's matrices, of DoRA only kohya's."""
    known = (scheme.style, scheme.naming) in COMFYUI_READS.get(family, frozenset())
    return known and scheme.spelling in (("kohya",) if dora else ("peft", "kohya"))

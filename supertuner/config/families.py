"""The table of model families: what other packages know of a family without importing it. Literal data.

A new family is one folder in `models/families/` and one record here (and, so that it can be forecast by name, entries
in `models/published_models.py`). No code elsewhere depends on the name of a family or of an expert (one denoiser of a
model): settings per expert, keys of SimpleTuner's and ai-toolkit's files, and names of files follow from this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

TARGET_PRESETS: Final = ("attention", "attention_mlp", "all_linear")
"""Presets of adapter targets that every family has."""
ALL_EXPERTS: Final = "all"
"""The value of `model.experts` that trains every expert."""


@dataclass(frozen=True, slots=True)
class SimpleTunerNames:
    """How SimpleTuner names the models of a family."""

    family: str = ""
    """Its `model_family`; "" if SimpleTuner does not have this family."""
    default_model: str | None = None
    """The hub name of the model that it trains if neither flavour nor path is given."""
    flavours: Mapping[str, str] = field(default_factory=dict)
    """Its `model_flavour` → the hub name of the model."""
    expert_by_flavour: Mapping[str, str] = field(default_factory=dict)
    """Flavours that stand for one expert of a model → its name."""
    lora_targets: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Values of its `<family>_lora_target` → our targets. `all` is attention; so are values that are not listed."""


@dataclass(frozen=True, slots=True)
class FamilyRecord:
    package: str
    """Its package, with the modules `family` (`FAMILY`, its interface) and, unless `same_layers_as` is set,
    `layer_names` (`LAYERS`)."""
    pipelines: tuple[str, ...]
    """Class names of the diffusers pipelines that it reads."""
    experts: Mapping[str, str]
    """Name of each expert → its component of the pipeline, high noise first. A model of the family may have fewer."""
    simpletuner: SimpleTunerNames = SimpleTunerNames()
    ai_toolkit: tuple[str, ...] = ()
    """Its values of `model.arch` in ai-toolkit."""
    ai_toolkit_switch: str | None = None
    """Its older switch in ai-toolkit's `model` block, such as `is_flux`."""
    more_target_presets: tuple[str, ...] = ()
    """Presets of adapter targets beyond `TARGET_PRESETS`."""
    guidance_input: bool = False
    """Whether guidance can be an input of its denoisers, because they were distilled from guided ones."""
    same_layers_as: str | None = None
    """The family whose denoiser architecture it shares, and with it the table of layer names."""

    has_flow_matching: bool = True
    """Whether its models are trained by flow matching, and not to predict epsilon or v."""

    @property
    def has_several_experts(self) -> bool:
        return len(self.experts) > 1


_ONE_TRANSFORMER: Final = {"model": "transformer"}
_TEXT_ATTENTION: Final = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

FAMILIES: Final[Mapping[str, FamilyRecord]] = {
    "wan2.2": FamilyRecord(
        package="supertuner.models.families.wan22",
        pipelines=("WanPipeline", "WanImageToVideoPipeline"),
        experts={"high_noise": "transformer", "low_noise": "transformer_2"},
        simpletuner=SimpleTunerNames(
            "wan",
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            {
                "i2v-14b-2.2-high": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
                "i2v-14b-2.2-low": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
                "ti2v-5b-2.2": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
                "t2v-480p-1.3b-2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
                "t2v-480p-14b-2.1": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
            },
            {"i2v-14b-2.2-high": "high_noise", "i2v-14b-2.2-low": "low_noise"},
        ),
        # Wan2.1's text-to-video model has the architecture of one expert.
        ai_toolkit=("wan22_14b", "wan22_14b_i2v", "wan22_5b", "wan21"),
    ),
    "flux": FamilyRecord(
        package="supertuner.models.families.flux",
        pipelines=("FluxPipeline",),
        experts=_ONE_TRANSFORMER,
        simpletuner=SimpleTunerNames(
            "flux",
            "black-forest-labs/FLUX.1-Krea-dev",
            {
                "dev": "black-forest-labs/FLUX.1-dev",
                "schnell": "black-forest-labs/FLUX.1-schnell",
                "krea": "black-forest-labs/FLUX.1-Krea-dev",
            },
            lora_targets={
                **dict.fromkeys(("all+ffs", "ai-toolkit", "fal"), "attention_mlp"),
                "context": _TEXT_ATTENTION,
                "context+ffs": (*_TEXT_ATTENTION, "ff_context.net.0.proj", "ff_context.net.2"),
            },
        ),
        ai_toolkit=("flux",),
        ai_toolkit_switch="is_flux",
        guidance_input=True,
    ),
    "qwen-image": FamilyRecord(
        package="supertuner.models.families.qwen_image",
        pipelines=("QwenImagePipeline",),
        experts=_ONE_TRANSFORMER,
        simpletuner=SimpleTunerNames(
            "qwen_image", "Qwen/Qwen-Image-2512", {"v1.0": "Qwen/Qwen-Image", "v2.0": "Qwen/Qwen-Image-2512"}
        ),
        ai_toolkit=("qwen_image",),
    ),
    "qwen-image-edit": FamilyRecord(
        package="supertuner.models.families.qwen_image_edit",
        pipelines=("QwenImageEditPipeline",),
        experts=_ONE_TRANSFORMER,
        simpletuner=SimpleTunerNames("qwen_image", flavours={"edit-v1": "Qwen/Qwen-Image-Edit"}),
        ai_toolkit=("qwen_image_edit",),
        same_layers_as="qwen-image",
    ),
    "sd3.5": FamilyRecord(
        package="supertuner.models.families.sd35",
        pipelines=("StableDiffusion3Pipeline",),
        experts=_ONE_TRANSFORMER,
        simpletuner=SimpleTunerNames(
            "sd3",
            "stabilityai/stable-diffusion-3.5-medium",
            {size: f"stabilityai/stable-diffusion-3.5-{size}" for size in ("medium", "large")},
        ),
        ai_toolkit=("sd3",),
        ai_toolkit_switch="is_v3",
    ),
    "sdxl": FamilyRecord(
        package="supertuner.models.families.sdxl",
        pipelines=("StableDiffusionXLPipeline",),
        experts={"model": "unet"},
        simpletuner=SimpleTunerNames(
            "sdxl",
            "stabilityai/stable-diffusion-xl-base-1.0",
            {f"base-{number}": f"stabilityai/stable-diffusion-xl-base-{number}" for number in ("1.0", "0.9")},
        ),
        ai_toolkit=("sdxl",),
        more_target_presets=("all_layers",),
        has_flow_matching=False,
        ai_toolkit_switch="is_xl",
    ),
}
"""By our name of the family, in order of preference for adapter files that fit several."""


def family_by_pipeline() -> dict[str, str]:
    """Class name of a diffusers pipeline → family."""
    return {pipeline: name for name, record in FAMILIES.items() for pipeline in record.pipelines}


def expert_names() -> tuple[str, ...]:
    """The names of experts of models with several."""
    return tuple(dict.fromkeys(name for record in _several_experts() for name in record.experts))


def later_experts() -> dict[str, str]:
    """Experts after the first of their model, with their components of the pipeline."""
    return {name: part for record in _several_experts() for name, part in [*record.experts.items()][1:]}


def _several_experts() -> Iterable[FamilyRecord]:
    return (record for record in FAMILIES.values() if record.has_several_experts)


def experts_of(family: str | None) -> tuple[str, ...]:
    """The names of the experts for which a model of this family can have settings of their own.

    Empty if every model of the family has one denoiser; those of all families if the family is not set.
    """
    if family is None:
        return expert_names()
    return tuple(FAMILIES[family].experts) if FAMILIES[family].has_several_experts else ()


def describe_experts(family: str | None) -> str:
    """Which experts there are, for messages."""
    experts = experts_of(family)
    if not experts:
        return f'a model of family "{family}" has one denoiser'
    return f'the experts of family "{family}" are {" and ".join(experts)}'


def target_presets_of(family: str | None) -> tuple[str, ...]:
    """The presets of adapter targets of a family; those of all families if the family is not set."""
    records = FAMILIES.values() if family is None else (FAMILIES[family],)
    return tuple(dict.fromkeys((*TARGET_PRESETS, *(name for record in records for name in record.more_target_presets))))


def layers_of(family: str) -> str:
    """The family whose table of layer names this family uses."""
    return FAMILIES[family].same_layers_as or family

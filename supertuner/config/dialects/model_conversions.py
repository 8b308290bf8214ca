"""Conversions of dialect keys about the model, its adapter and its noise levels. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from supertuner.config.dialects.conversions import (
    ConversionNote,
    ConversionOutcome,
    InvalidValue,
    KeyConversion,
    SettingValue,
    sibling_value,
)
from supertuner.config.settings.values import format_value
from supertuner.core.types import JSON


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOT_TRAINED_YET = "is not supported, so no model is set; datasets can be staged and previewed"

UNSUPPORTED_SIMPLETUNER_FAMILIES = _words(
    "ace_step auraflow chroma cosmos2image deepfloyd flux2 hidream hunyuanvideo kandinsky5-image kandinsky5-video "
    "kolors legacy longcat_image longcat_video ltxvideo ltxvideo2 lumina2 omnigen pixart_sigma sana "
    "sanavideo sd1x sd2x wan_s2v z_image"
)
"""Families of SimpleTuner that we do not support."""
FAMILY_BY_SIMPLETUNER_NAME = {
    "flux": "flux",
    "qwen_image": "qwen-image",
    "sd3": "sd3.5",
    "sdxl": "sdxl",
    "wan": "wan2.2",
}
"""SimpleTuner's name of a family → ours."""
FAMILY_BY_ARCHITECTURE = {
    "wan22_14b": "wan2.2",
    "wan22_14b_i2v": "wan2.2",
    "wan22_5b": "wan2.2",
    "wan21": "wan2.2",  # its text-to-video model has the architecture of one expert
    "flux": "flux",
    "qwen_image": "qwen-image",
    "qwen_image_edit": "qwen-image-edit",
    "sd3": "sd3.5",
    "sdxl": "sdxl",
}
UNSUPPORTED_ARCHITECTURES = _words(
    "auraflow chroma flex1 flex2 flux2 flux_kontext hidream hidream_e1 lumina2 omnigen2 pixart pixart_sigma "
    "qwen_image_edit_plus sd1 sd2 ssd vega wan21_i2v zimage"
)
"""Architectures of ai-toolkit that we do not support."""
WAN_FLAVOURS = {
    "i2v-14b-2.2-high": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", "high_noise"),
    "i2v-14b-2.2-low": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", "low_noise"),
    "ti2v-5b-2.2": ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "all"),
    "t2v-480p-1.3b-2.1": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "all"),
    "t2v-480p-14b-2.1": ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "all"),
}
UNSUPPORTED_FLAVOUR_PREFIXES = ("i2v-14b-2.1", "i2v-480p", "i2v-720p", "flf2v", "vace", "kontext", "edit-v2", "refiner")
"""Prefixes of flavours that we do not support."""
SIMPLETUNER_DEFAULT_MODELS = {
    "wan": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "flux": "black-forest-labs/FLUX.1-dev",
    "qwen_image": "Qwen/Qwen-Image",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
}
"""The model of a family that SimpleTuner trains if neither flavour nor path is given."""
MODEL_BY_FLAVOUR = {
    "flux": {
        "dev": "black-forest-labs/FLUX.1-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell",
        "krea": "black-forest-labs/FLUX.1-Krea-dev",
    },
    "qwen-image": {"v1.0": "Qwen/Qwen-Image"},
    "qwen-image-edit": {"edit-v1": "Qwen/Qwen-Image-Edit"},
    "sd3.5": {size: f"stabilityai/stable-diffusion-3.5-{size}" for size in ("medium", "large")},
    "sdxl": {f"base-{number}": f"stabilityai/stable-diffusion-xl-base-{number}" for number in ("1.0", "0.9")},
}
"""The hub names of flavours of models with one denoiser, by our family."""
ATTENTION_BACKENDS = {
    "diffusers": "native",
    "xformers": "xformers",
    "flash-attn": "flash",
    "flash-attn-2": "flash",
    "flash-attn-3": "_flash_3",
    "flash-attn-3-varlen": "_flash_varlen_3",
    "flex": "flex",
    "cudnn": "_native_cudnn",
    **{f"native-{name}": f"_native_{name}" for name in ("efficient", "flash", "math", "npu", "xla")},
}
EIGHT_BIT_FORMATS = {"int8": "int8", "qint8": "int8", "fp8": "fp8", "fp8uz": "fp8", "qfloat8": "fp8", "float8": "fp8"}
"""8-bit number formats, by the first word of their names in the dialects."""
UNSUPPORTED_FORMAT_PREFIXES = ("int4", "int2", "uint", "qint4", "qint2", "nf4", "fp4", "int3")


def model_family(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `model_family`."""
    if value in UNSUPPORTED_SIMPLETUNER_FAMILIES:
        return [ConversionNote(f"{format_value(value)} {NOT_TRAINED_YET}")]
    if value not in tuple(FAMILY_BY_SIMPLETUNER_NAME):
        supported = ", ".join(map(format_value, FAMILY_BY_SIMPLETUNER_NAME))
        return [InvalidValue(f"{format_value(value)} is not a known family; supported families: {supported}")]
    name = simpletuner_family(block)
    if name is None:
        return [ConversionNote(f"this flavour of {format_value(value)} {NOT_TRAINED_YET}")]
    if sibling_value(block, "model_flavour") or sibling_value(block, "pretrained_model_name_or_path"):
        return [SettingValue("model.family", name)]
    note = ConversionNote(f"no model is given; uses SimpleTuner's default, {SIMPLETUNER_DEFAULT_MODELS[str(value)]}")
    return [
        SettingValue("model.family", name),
        SettingValue("model.path", SIMPLETUNER_DEFAULT_MODELS[str(value)], is_implied=True),
        note,
    ]


def simpletuner_family(block: Mapping[str, JSON]) -> str | None:
    """Our family for a SimpleTuner file; None if we do not support it."""
    flavour = str(sibling_value(block, "model_flavour") or "").lower()
    if flavour.startswith(UNSUPPORTED_FLAVOUR_PREFIXES):
        return None
    name = FAMILY_BY_SIMPLETUNER_NAME.get(str(sibling_value(block, "model_family")))
    return f"{name}-edit" if flavour in MODEL_BY_FLAVOUR.get(f"{name}-edit", {}) else name


def model_path(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `pretrained_model_name_or_path`; ignored if the family is not supported."""
    if not value:
        return []
    if sibling_value(block, "model_family") is not None and simpletuner_family(block) is None:
        return [ConversionNote("has no effect: its model_family is not supported")]
    return _put_path(value)


def model_flavour(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `model_flavour`, which stands for a name on the hub, and for Wan2.2 also for one of two experts."""
    if not value:
        return []
    name = simpletuner_family(block)
    if name is None:
        return [ConversionNote("has no effect: its model_family is not supported")]
    flavour_name = str(value).lower()
    if flavour_name in MODEL_BY_FLAVOUR.get(name, {}):
        return [SettingValue("model.path", MODEL_BY_FLAVOUR[name][flavour_name], is_implied=True)]
    if name == "wan2.2" and flavour_name in WAN_FLAVOURS:
        model, experts = WAN_FLAVOURS[flavour_name]
        return [
            SettingValue("model.path", model, is_implied=True),
            SettingValue("model.experts", experts, is_implied=True),
        ]
    if sibling_value(block, "pretrained_model_name_or_path"):
        return [ConversionNote(f"{format_value(value)} is not a known flavour; pretrained_model_name_or_path is used")]
    return [InvalidValue(f"{format_value(value)} is not a known flavour; set pretrained_model_name_or_path")]


def architecture(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `model.arch`; its web interface appends a variant after a colon."""
    name = str(value).partition(":")[0]
    if name in FAMILY_BY_ARCHITECTURE:
        return [SettingValue("model.family", FAMILY_BY_ARCHITECTURE[name])]
    if name in UNSUPPORTED_ARCHITECTURES:
        return [ConversionNote(f"{format_value(value)} {NOT_TRAINED_YET}")]
    supported = ", ".join(map(format_value, FAMILY_BY_ARCHITECTURE))
    return [InvalidValue(f"{format_value(value)} is not a known architecture; supported: {supported}")]


def is_architecture(name: str) -> KeyConversion:
    """ai-toolkit's older switches such as `model.is_flux`. `name` is our family; "" if we do not support it."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
        if not isinstance(value, bool):
            return [InvalidValue(f"{format_value(value)} is not true or false")]
        if not value:
            return []
        return [SettingValue("model.family", name)] if name else [ConversionNote(f"this model {NOT_TRAINED_YET}")]

    return convert


def name_or_path(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `model.name_or_path`."""
    is_unsupported = str(block.get("arch")).partition(":")[0] in UNSUPPORTED_ARCHITECTURES
    if is_unsupported or any(block.get(switch) is True for switch in ("is_v2",)):
        return [ConversionNote("has no effect: this model is not supported")]
    return _put_path(value) if value else []


def _put_path(value: JSON) -> Sequence[ConversionOutcome]:
    if isinstance(value, str) and value.endswith((".safetensors", ".ckpt", ".gguf")):
        remedy = "set model.path to the folder or name of the pipeline, and model.single_file to a .safetensors file"
        return [InvalidValue(f"{format_value(value)} is a single file; {remedy}")]
    return [SettingValue("model.path", value)]


def base_precision(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `base_model_precision`: a number format and the library that quantizes to it."""
    return [] if value in (None, "", "no_change") else _quantized_weights(value)


def quantize(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `model.quantize`, with the format in `qtype`."""
    if not isinstance(value, bool):
        return [InvalidValue(f"{format_value(value)} is not true or false")]
    return _quantized_weights(block.get("qtype", "qfloat8")) if value else []


def _quantized_weights(value: JSON) -> Sequence[ConversionOutcome]:
    text = str(value).lower()
    number_format, _, library = text.partition("-")
    if number_format in EIGHT_BIT_FORMATS:
        notes = [] if library in ("", "torchao") else [ConversionNote(f"torchao quantizes the weights, not {library}")]
        return [SettingValue("model.base_weights", EIGHT_BIT_FORMATS[number_format]), *notes]
    if text.startswith(UNSUPPORTED_FORMAT_PREFIXES):
        note = ConversionNote(
            f"{format_value(value)}: fewer than 8 bits are not available; int8 is used, which needs more memory"
        )
        return [SettingValue("model.base_weights", "int8"), note]
    return [
        InvalidValue(
            f'{format_value(value)} is not a known format; model.base_weights is "as_computed", "int8" or "fp8"'
        )
    ]


def attention(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `attention_mechanism`."""
    text = str(value).lower().replace("_", "-")
    if text in ATTENTION_BACKENDS:
        return [SettingValue("model.attention", ATTENTION_BACKENDS[text])]
    if text.startswith("sageattention"):
        return [
            ConversionNote(
                "has no effect: SageAttention has no backward pass, and samples use the same attention as training"
            )
        ]
    return [
        InvalidValue(
            f"{format_value(value)} is not available; allowed: {', '.join(map(format_value, ATTENTION_BACKENDS))}"
        )
    ]


def dynamo_backend(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `dynamo_backend`."""
    if value in (None, False, "", "no", "none"):
        return []
    notes = [] if value == "inductor" else [ConversionNote("inductor is used instead")]
    return [SettingValue("model.compile", True), *notes]


def model_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `model_type`; with LyCORIS, `lycoris_config` determines the kind of adapter."""
    return (
        []
        if value == "lora" and sibling_value(block, "lora_type") == "lycoris"
        else [SettingValue("adapter.type", value)]
    )


def lora_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `lora_type`."""
    if value == "standard":
        return []
    if value == "lycoris" and sibling_value(block, "lycoris_config"):
        return []
    if value == "lycoris":
        return [InvalidValue('"lycoris" needs lycoris_config, a file with the algorithm; or set adapter.type')]
    return [InvalidValue(f'{format_value(value)} is not available; allowed: "standard", "lycoris"')]


def lycoris_file(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `lycoris_config`: `translate` reads the file and converts it with `lycoris`."""
    return []


ADAPTER_BY_NETWORK = {"lora": "lora", "dora": "lora", "locon": "locon", "loha": "loha", "lokr": "lokr"}


def network_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `network.type`; its adapters cover all linear layers of the blocks."""
    if not isinstance(value, str) or value not in ADAPTER_BY_NETWORK:
        return [
            InvalidValue(
                f"{format_value(value)} is not available; allowed: {', '.join(map(format_value, ADAPTER_BY_NETWORK))}"
            )
        ]
    dora = [SettingValue("adapter.dora", True)] if value == "dora" else []
    return [
        SettingValue("adapter.type", ADAPTER_BY_NETWORK[value]),
        SettingValue("adapter.targets", "attention_mlp", is_implied=True),
        *dora,
    ]


def trained_experts(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `train_high_noise` and `train_low_noise`, which both default to true."""
    high, low = block.get("train_high_noise", True), block.get("train_low_noise", True)
    if not isinstance(value, bool):
        return [InvalidValue(f"{format_value(value)} is not true or false")]
    if high is False and low is False:
        return [InvalidValue("train_high_noise and train_low_noise are both false: there is nothing to train")]
    return [SettingValue("model.experts", "all" if high and low else "high_noise" if high else "low_noise")]


def flow_shift(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `flow_schedule_shift`; null and 0 mean no shift."""
    if sibling_value(block, "flow_schedule_auto_shift") is True:
        return [ConversionNote("has no effect: flow_schedule_auto_shift overrides it")]
    return [SettingValue("objective.shift", 1.0 if value in (None, 0, "") else value)]


def set_if_true(path: str, value: JSON) -> KeyConversion:
    """A switch: true sets `path` to `value`, false sets nothing."""

    def convert(switch: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
        if not isinstance(switch, bool):
            return [InvalidValue(f"{format_value(switch)} is not true or false")]
        return [SettingValue(path, value)] if switch else []

    return convert


def timestep_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `timestep_type`: the distribution of noise levels."""
    distributions: dict[JSON, tuple[str, JSON]] = {
        "sigmoid": ("logit_normal", 1.0),
        "linear": ("uniform", 1.0),
        "weighted": ("uniform", 1.0),
        "shift": ("uniform", None),
        "flux_shift": ("uniform", "auto"),
    }
    if isinstance(value, str) and value in distributions:
        distribution, shift_value = distributions[value]
        outcomes: list[ConversionOutcome] = [SettingValue("objective.timesteps", distribution)]
        if shift_value is not None:
            outcomes.append(SettingValue("objective.shift", shift_value, is_implied=True))
        if value == "weighted":
            outcomes.append(ConversionNote("its loss weights are not available; see objective.weighting"))
        return outcomes
    if value in ("lognorm_blend", "lumina2_shift", "next_sample", "one_step"):
        return [ConversionNote(f"{format_value(value)} is not available; objective.timesteps is used")]
    return [
        InvalidValue(f"{format_value(value)} is not available; allowed: {', '.join(map(format_value, distributions))}")
    ]

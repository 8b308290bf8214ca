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
from supertuner.config.families import ALL_EXPERTS, FAMILIES
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
FAMILY_BY_ARCHITECTURE = {arch: name for name, record in FAMILIES.items() for arch in record.ai_toolkit}
UNSUPPORTED_ARCHITECTURES = _words(
    "auraflow chroma flex1 flex2 flux2 flux_kontext hidream hidream_e1 lumina2 omnigen2 pixart pixart_sigma "
    "qwen_image_edit_plus sd1 sd2 ssd vega wan21_i2v zimage"
)
"""Architectures of ai-toolkit that we do not support."""
UNSUPPORTED_FLAVOUR_PREFIXES = ("i2v-14b-2.1", "i2v-480p", "i2v-720p", "flf2v", "vace", "kontext", "edit-v2", "refiner")
"""Prefixes of flavours that we do not support."""
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
    default_models = {
        record.simpletuner.family: record.simpletuner.default_model
        for record in FAMILIES.values()
        if record.simpletuner.default_model is not None
    }
    if value not in tuple(default_models):
        supported = ", ".join(map(format_value, sorted(default_models)))
        return [InvalidValue(f"{format_value(value)} is not a known family; supported families: {supported}")]
    name = simpletuner_family(block)
    if name is None:
        return [ConversionNote(f"this flavour of {format_value(value)} {NOT_TRAINED_YET}")]
    if sibling_value(block, "model_flavour") or sibling_value(block, "pretrained_model_name_or_path"):
        return [SettingValue("model.family", name)]
    default = default_models[str(value)]
    return [
        SettingValue("model.family", name),
        SettingValue("model.path", default, is_implied=True),
        ConversionNote(f"no model is given; uses SimpleTuner's default, {default}"),
    ]


def simpletuner_family(block: Mapping[str, JSON]) -> str | None:
    """Our family for the model of a SimpleTuner file; None if its family or its flavour is not supported."""
    flavour = str(sibling_value(block, "model_flavour") or "").lower()
    if flavour.startswith(UNSUPPORTED_FLAVOUR_PREFIXES):
        return None
    simpletuner_name = sibling_value(block, "model_family")
    families = [name for name, record in FAMILIES.items() if record.simpletuner.family == simpletuner_name]
    by_flavour = (name for name in families if flavour in FAMILIES[name].simpletuner.flavours)
    return next(by_flavour, families[0] if families else None)


def model_path(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `pretrained_model_name_or_path`; ignored if the family is not supported."""
    if not value:
        return []
    if sibling_value(block, "model_family") is not None and simpletuner_family(block) is None:
        return [ConversionNote("has no effect: its model_family or model_flavour is not supported")]
    return _put_path(value)


def model_flavour(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `model_flavour`, which stands for a name on the hub, and sometimes for one expert."""
    if not value:
        return []
    name = simpletuner_family(block)
    if name is None:
        return [ConversionNote("has no effect: its model_family or model_flavour is not supported")]
    flavour_name = str(value).lower()
    record = FAMILIES[name]
    if flavour_name in record.simpletuner.flavours:
        path = SettingValue("model.path", record.simpletuner.flavours[flavour_name], is_implied=True)
        experts = record.simpletuner.expert_by_flavour.get(flavour_name, ALL_EXPERTS)
        return [path, SettingValue("model.experts", experts, is_implied=True)] if record.has_several_experts else [path]
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


def trained_experts(experts: Sequence[str]) -> KeyConversion:
    """ai-toolkit's switch for each expert of a model, such as `train_high_noise`; all default to true."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
        if not isinstance(value, bool):
            return [InvalidValue(f"{format_value(value)} is not true or false")]
        trained = [expert for expert in experts if block.get(f"train_{expert}", True)]
        if not trained:
            switches = " and ".join(f"train_{expert}" for expert in experts)
            return [InvalidValue(f"{switches} are all false: there is nothing to train")]
        if len(trained) not in (1, len(experts)):
            return [InvalidValue(f"{' and '.join(trained)} cannot be chosen together; train all experts, or one")]
        return [SettingValue("model.experts", trained[0] if len(trained) == 1 else ALL_EXPERTS)]

    return convert


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

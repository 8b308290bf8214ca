"""Conversions of dialect keys about the model, its adapter and its noise levels. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from supertuner.config.dialects.conversions import (
    ConversionNote,
    ConversionOutcome,
    InvalidValue,
    KeyConversion,
    SettingValue,
    not_a_switch,
    not_available,
    sibling_value,
)
from supertuner.config.families import ALL_EXPERTS, FAMILIES, SimpleTunerNames
from supertuner.config.settings.values import format_value
from supertuner.core.types import JSON


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OTHER_SIMPLETUNER_FAMILIES = _words(
    "ace_step anima auraflow boogu_image chroma cosmos2image cosmos3 deepfloyd ernie flux2 heartmula hidream "
    "hunyuanvideo ideogram infinitetalk kandinsky5-image kandinsky5-video kolors krea2 legacy longcat_image "
    "longcat_video ltxvideo ltxvideo2 lumina2 mageflow minimaxh3 minimaxmusic omnigen pixart_sigma sana sanavideo "
    "sd1x sd2x stable_cascade wan_s2v z_image z_image_omni zlab_i1"
)
"""Families of SimpleTuner that we do not have."""
FAMILY_BY_ARCHITECTURE = {arch: name for name, record in FAMILIES.items() for arch in record.ai_toolkit}
OTHER_ARCHITECTURES = _words(
    "ace_step_15 ace_step_15_xl anima auraflow boogu_image boogu_image_edit chroma chroma_radiance cogview4 "
    "ernie_image f-lite flex1 flex2 flux2 flux2_klein_4b flux2_klein_9b flux_kontext hidream hidream_e1 hidream_o1 "
    "ideogram4 krea2 ltx2 ltx2.3 ltx2.5 lumina2 mageflow mageflow_edit minimax_h3 minimax_h3_ref2va nucleus_image "
    "omnigen2 pixart pixart_sigma prx_pixel qwen_image_edit_plus sd1 sd15 sd2 ssd vega wan21_i2v zeta_chroma zimage "
    "zimage_l2p"
)
"""Architectures of ai-toolkit that we do not have."""
OTHER_SWITCHES = tuple(f"is_{name}" for name in _words("v2 pixart pixart_sigma auraflow lumina2 ssd vega"))
"""Older switches for such architectures in ai-toolkit's `model` block."""
OTHER_FLAVOURS = (
    "i2v-14b-2.1",
    "i2v-480p",
    "i2v-720p",
    "flf2v",
    "vace",
    "kontext",
    "libreflux",
    "fluxbooru",
    "edit-v2",
    "edit-v3",
    "refiner",
)
"""Beginnings of flavours that we do not have."""
PROCESS_TYPES = ("sd_trainer", "diffusion_trainer", "ui_trainer")
"""Processes of ai-toolkit that train a denoiser or an adapter of it."""
ATTENTION_BACKENDS = {
    "diffusers": "native",
    "xformers": "xformers",
    "flash-attn": "flash",
    "flash-attn-2": "flash",
    "flash-attn-3": "_flash_3",
    "flash-attn-3-varlen": "_flash_varlen_3",
    "flex": "flex",
    "cudnn": "_native_cudnn",
    "native": "native",
    "flash-attn-hub": "flash_hub",
    "flash-attn-varlen-hub": "flash_varlen_hub",
    "flash-attn-3-hub": "_flash_3_hub",
    "flash-attn-3-varlen-hub": "_flash_3_varlen_hub",
    "flash-attn-4-hub": "flash_4_hub",
    **{f"native-{name}": f"_native_{name}" for name in ("efficient", "flash", "math", "npu", "xla")},
}
EIGHT_BIT_FORMATS = {"int8": "int8", "qint8": "int8", "fp8": "fp8", "fp8uz": "fp8", "qfloat8": "fp8", "float8": "fp8"}
"""8-bit number formats, by the first word of their names in the dialects."""
RANDOM_GUIDANCE = "random-range"
ONE_GUIDANCE = "has no effect: objective.guidance is the same for all samples"
UNSUPPORTED_FORMAT_PREFIXES = ("int4", "int2", "uint", "qint4", "qint2", "nf4", "fp4", "int3")


def not_here_yet(what: str, available: Iterable[str]) -> InvalidValue:
    """`what` another program has and we do not."""
    names = ", ".join(map(format_value, sorted(available)))
    return InvalidValue(f"{what} is not available here yet; available: {names}")


def model_family(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `model_family`."""
    default_models = {
        record.simpletuner.family: record.simpletuner.default_model
        for record in FAMILIES.values()
        if record.simpletuner.default_model is not None
    }
    if value in OTHER_SIMPLETUNER_FAMILIES:
        return [not_here_yet(f"family {format_value(value)} of SimpleTuner", default_models)]
    if value not in tuple(default_models):
        known = ", ".join(map(format_value, sorted(default_models)))
        return [InvalidValue(f"{format_value(value)} is not a family of SimpleTuner; available here: {known}")]
    name = simpletuner_family(block)
    if name is None:
        return []  # `model_flavour` is refused
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
    if flavour.startswith(OTHER_FLAVOURS):
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
        return []  # the family or the flavour is refused
    return _put_path(value)


def model_flavour(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `model_flavour`, which stands for a name on the hub, and sometimes for one expert."""
    if not value:
        return []
    name = simpletuner_family(block)
    family = sibling_value(block, "model_family")
    if name is None and any(record.simpletuner.family == family for record in FAMILIES.values()):
        flavours = (record.simpletuner.flavours for record in FAMILIES.values() if record.simpletuner.family == family)
        what = f"flavour {format_value(value)} of SimpleTuner's family {format_value(family)}"
        return [not_here_yet(what, chain(*flavours))]
    if name is None:
        return []  # the family is refused
    flavour_name = str(value).lower()
    record = FAMILIES[name]
    if flavour_name in record.simpletuner.flavours:
        path = SettingValue("model.path", record.simpletuner.flavours[flavour_name], is_implied=True)
        experts = record.simpletuner.expert_by_flavour.get(flavour_name, ALL_EXPERTS)
        return [path, SettingValue("model.experts", experts, is_implied=True)] if record.has_several_experts else [path]
    if sibling_value(block, "pretrained_model_name_or_path"):
        return [ConversionNote(f"{format_value(value)} is not a known flavour; pretrained_model_name_or_path is used")]
    return [InvalidValue(f"{format_value(value)} is not a known flavour; set pretrained_model_name_or_path")]


def process_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `type` of a process."""
    if value in PROCESS_TYPES:
        return []
    return [not_here_yet(f"process {format_value(value)} of ai-toolkit", PROCESS_TYPES)]


def architecture(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `model.arch`; its web interface appends a variant after a colon."""
    name = str(value).partition(":")[0]
    if name in FAMILY_BY_ARCHITECTURE:
        return [SettingValue("model.family", FAMILY_BY_ARCHITECTURE[name])]
    if name in OTHER_ARCHITECTURES:
        return [not_here_yet(f"architecture {format_value(value)} of ai-toolkit", FAMILY_BY_ARCHITECTURE)]
    known = ", ".join(map(format_value, FAMILY_BY_ARCHITECTURE))
    return [InvalidValue(f"{format_value(value)} is not an architecture of ai-toolkit; available here: {known}")]


def is_architecture(family: str, other: str = "") -> KeyConversion:
    """ai-toolkit's older switches such as `model.is_flux`. `family` is ours; "" if we do not have it, and `other` is
    its name in ai-toolkit."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
        if not isinstance(value, bool):
            return [not_a_switch(value)]
        if not value:
            return []
        if family:
            return [SettingValue("model.family", family)]
        return [not_here_yet(f"architecture {format_value(other)} of ai-toolkit", FAMILY_BY_ARCHITECTURE)]

    return convert


def name_or_path(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `model.name_or_path`; not read if the architecture is refused."""
    is_other = str(block.get("arch")).partition(":")[0] in OTHER_ARCHITECTURES
    if not value or is_other or any(block.get(switch) is True for switch in OTHER_SWITCHES):
        return []
    return _put_path(value)


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
        return [not_a_switch(value)]
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
        reason = "SageAttention has no backward pass, and samples use the same attention as training"
        return [ConversionNote(f"has no effect: {reason}")]
    if text.startswith("metal"):
        return [ConversionNote("has no effect: it needs a Mac; model.attention is used")]
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


def lora_size(path: str) -> KeyConversion:
    """A key of a LoRA; with LyCORIS, only `lycoris_config` counts, in SimpleTuner as well."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
        if value is None:
            return []
        if sibling_value(block, "lora_type") == "lycoris":
            return [ConversionNote('has no effect with lora_type: "lycoris", in SimpleTuner as well')]
        return [SettingValue(path, value)]

    return convert


def lycoris_file(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `lycoris_config`: `translate` reads the file and converts it with `lycoris`."""
    return []


def peft_targets(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `peft_lora_target_modules`: a list of the last parts of module names, or a file with it."""
    if not value:
        return []
    if isinstance(value, list):
        return [SettingValue("adapter.targets", value)]
    return [ConversionNote("has no effect: it names a file; write its list of module names into adapter.targets")]


def lora_targets(names: SimpleTunerNames) -> KeyConversion:
    """SimpleTuner's key for the targets of one family, such as `flux_lora_target`."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
        if value in (None, "all") or sibling_value(block, "model_family") != names.family:
            return []
        targets = names.lora_targets.get(str(value), "attention")
        return [
            SettingValue("adapter.targets", targets if isinstance(targets, str) else list(targets), is_implied=True)
        ]

    return convert


ADAPTER_BY_NETWORK = {"lora": "lora", "dora": "lora", "locon": "locon", "loha": "loha", "lokr": "lokr"}


def network_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `network.type`; its adapters cover all linear layers of the blocks."""
    if not isinstance(value, str) or value not in ADAPTER_BY_NETWORK:
        return [
            InvalidValue(
                f"{format_value(value)} is not available; allowed: {', '.join(map(format_value, ADAPTER_BY_NETWORK))}"
            )
        ]
    more = [SettingValue("adapter.dora", True)] if value == "dora" else []
    if value == "lokr":  # ai-toolkit's default
        more = [SettingValue("adapter.lokr_full_matrix", True, is_implied=True)]
    return [
        SettingValue("adapter.type", ADAPTER_BY_NETWORK[value]),
        SettingValue("adapter.targets", "attention_mlp", is_implied=True),
        *more,
    ]


def network_rank(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `linear` and `rank`. Without `linear_alpha` and `alpha`, its alpha is 1."""
    if value is None:
        return []
    rank = SettingValue("adapter.rank", value)
    if block.get("linear_alpha") is not None or block.get("alpha") is not None:
        return [rank]
    note = ConversionNote("no linear_alpha is given; sets adapter.alpha: 1, the default of ai-toolkit")
    return [rank, SettingValue("adapter.alpha", 1.0, is_implied=True), note]


def network_alpha(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """ai-toolkit's `alpha`, which `linear_alpha` overrides."""
    return [] if value is None or block.get("linear_alpha") is not None else [SettingValue("adapter.alpha", value)]


def lokr_only(path: str) -> KeyConversion:
    """A key of a LoKr; other networks do not read it, in ai-toolkit as well."""
    return lambda value, block: [SettingValue(path, value)] if block.get("type") == "lokr" and value is not None else []


def trained_experts(experts: Sequence[str]) -> KeyConversion:
    """ai-toolkit's switch for each expert of a model, such as `train_high_noise`; all default to true."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
        if not isinstance(value, bool):
            return [not_a_switch(value)]
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
    if value in (None, 0, ""):
        automatic = sibling_value(block, "flow_schedule_auto_shift") is True
        return [] if automatic else [SettingValue("objective.shift", 1.0)]
    return [SettingValue("objective.shift", value)]


def guidance_mode(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `flux_guidance_mode`: one value for all samples, or (not available) a random one for each."""
    if value == "constant":
        return []
    if value == RANDOM_GUIDANCE:
        return [ConversionNote(f"{format_value(value)} {ONE_GUIDANCE}")]
    return [not_available(value, ("constant", RANDOM_GUIDANCE))]


def guidance_value(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `flux_guidance_value`, which counts only in its mode "constant"."""
    if sibling_value(block, "flux_guidance_mode") == RANDOM_GUIDANCE:
        return [ConversionNote(f"has no effect with flux_guidance_mode {format_value(RANDOM_GUIDANCE)}")]
    return [] if value is None else [SettingValue("objective.guidance", value)]


def auto_shift(value: JSON, block: Mapping[str, JSON]) -> Sequence[ConversionOutcome]:
    """SimpleTuner's `flow_schedule_auto_shift`, which a `flow_schedule_shift` above 0 overrides."""
    if not isinstance(value, bool):
        return [not_a_switch(value)]
    if value and sibling_value(block, "flow_schedule_shift"):
        return [ConversionNote("has no effect: flow_schedule_shift is above 0 and overrides it, as in SimpleTuner")]
    return [SettingValue("objective.shift", "auto")] if value else []


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

"""How foreign words about the model, its adapter and its noise levels become settings of ours. Pure, as conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from supertuner.config.dialects.conversions import Convert, No, Outcome, Put, Said, beside
from supertuner.config.sources.values import shown
from supertuner.core.types import JSON


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LATER = "is not trained here yet, so no model is set; datasets can be staged and previewed"

SIMPLETUNER_FAMILIES = _words(
    "ace_step auraflow chroma cosmos2image deepfloyd flux2 hidream hunyuanvideo kandinsky5-image kandinsky5-video "
    "kolors legacy longcat_image longcat_video ltxvideo ltxvideo2 lumina2 omnigen pixart_sigma sana "
    "sanavideo sd1x sd2x wan_s2v z_image"
)
"""Families of SimpleTuner that are not trained here."""
SIMPLETUNER_TRAINED = {"flux": "flux", "qwen_image": "qwen-image", "sd3": "sd3.5", "sdxl": "sdxl", "wan": "wan2.2"}
"""Families of SimpleTuner, and ours."""
ARCHITECTURES = {
    "wan22_14b": "wan2.2",
    "wan22_14b_i2v": "wan2.2",
    "wan22_5b": "wan2.2",
    "wan21": "wan2.2",  # its text-to-video is one expert of the same kind
    "flux": "flux",
    "qwen_image": "qwen-image",
    "qwen_image_edit": "qwen-image-edit",
    "sd3": "sd3.5",
    "sdxl": "sdxl",
}
OTHER_ARCHITECTURES = _words(
    "auraflow chroma flex1 flex2 flux2 flux_kontext hidream hidream_e1 lumina2 omnigen2 pixart pixart_sigma "
    "qwen_image_edit_plus sd1 sd2 ssd vega wan21_i2v zimage"
)
"""Architectures of ai-toolkit that are not trained here."""
WAN_FLAVOURS = {
    "i2v-14b-2.2-high": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", "high_noise"),
    "i2v-14b-2.2-low": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", "low_noise"),
    "ti2v-5b-2.2": ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "all"),
    "t2v-480p-1.3b-2.1": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "all"),
    "t2v-480p-14b-2.1": ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "all"),
}
OTHER_FLAVOURS = ("i2v-14b-2.1", "i2v-480p", "i2v-720p", "flf2v", "vace", "kontext", "edit-v2", "refiner")
"""How flavours begin that are not trained here."""
UNSAID = {
    "wan": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "flux": "black-forest-labs/FLUX.1-dev",
    "qwen_image": "Qwen/Qwen-Image",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
}
"""What SimpleTuner trains of a family when neither flavour nor path is given."""
FLAVOURS = {
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
"""Of models with one expert, by our family."""
ATTENTION = {
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
EIGHT_BITS = {"int8": "int8", "qint8": "int8", "fp8": "fp8", "fp8uz": "fp8", "qfloat8": "fp8", "float8": "fp8"}
"""Number formats of 8 bits, by the first word of their foreign names."""
FEWER_BITS = ("int4", "int2", "uint", "qint4", "qint2", "nf4", "fp4", "int3")


def family(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `model_family`."""
    if value in SIMPLETUNER_FAMILIES:
        return [Said(f"{shown(value)} {LATER}")]
    if value not in tuple(SIMPLETUNER_TRAINED):
        trained = ", ".join(map(shown, SIMPLETUNER_TRAINED))
        return [No(f"{shown(value)} is not a family that is known here; trained are {trained}")]
    name = simpletuner_family(block)
    if name is None:
        return [Said(f"this flavour of {shown(value)} {LATER}")]
    if beside(block, "model_flavour") or beside(block, "pretrained_model_name_or_path"):
        return [Put("model.family", name)]
    said = Said(f"no model is named; {UNSAID[str(value)]} is what SimpleTuner trains then")
    return [Put("model.family", name), Put("model.path", UNSAID[str(value)], weak=True), said]


def simpletuner_family(block: Mapping[str, JSON]) -> str | None:
    """Our family of a SimpleTuner file; None if it is not trained here."""
    flavour = str(beside(block, "model_flavour") or "").lower()
    if flavour.startswith(OTHER_FLAVOURS):
        return None
    name = SIMPLETUNER_TRAINED.get(str(beside(block, "model_family")))
    return f"{name}-edit" if flavour in FLAVOURS.get(f"{name}-edit", {}) else name


def path(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `pretrained_model_name_or_path`; what is not trained must not be loaded either."""
    if not value:
        return []
    if beside(block, "model_family") is not None and simpletuner_family(block) is None:
        return [Said("has no effect: its model_family is not trained here yet")]
    return _path(value)


def flavour(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `model_flavour` stands for a name on the hub, and for one of two experts."""
    if not value:
        return []
    name = simpletuner_family(block)
    if name is None:
        return [Said("has no effect: its model_family is not trained here yet")]
    word = str(value).lower()
    if word in FLAVOURS.get(name, {}):
        return [Put("model.path", FLAVOURS[name][word], weak=True)]
    if name == "wan2.2" and word in WAN_FLAVOURS:
        model, experts = WAN_FLAVOURS[word]
        return [Put("model.path", model, weak=True), Put("model.experts", experts, weak=True)]
    if beside(block, "pretrained_model_name_or_path"):
        return [Said(f"{shown(value)} is not known here; the model is the one of pretrained_model_name_or_path")]
    return [No(f"{shown(value)} is not known here; name the model by pretrained_model_name_or_path")]


def architecture(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `model.arch`; its web page writes a variant behind a colon."""
    name = str(value).partition(":")[0]
    if name in ARCHITECTURES:
        return [Put("model.family", ARCHITECTURES[name])]
    if name in OTHER_ARCHITECTURES:
        return [Said(f"{shown(value)} {LATER}")]
    return [No(f"{shown(value)} is not known here; trained are {', '.join(map(shown, ARCHITECTURES))}")]


def is_architecture(name: str) -> Convert:
    """ai-toolkit's older switches, `model.is_flux` and others."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
        if not isinstance(value, bool):
            return [No(f"{shown(value)} is not true or false")]
        if not value:
            return []
        return [Put("model.family", name)] if name else [Said(f"such a model {LATER}")]

    return convert


def name_or_path(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `model.name_or_path`."""
    other = str(block.get("arch")).partition(":")[0] in OTHER_ARCHITECTURES
    if other or any(block.get(switch) is True for switch in ("is_v2",)):
        return [Said("has no effect: such a model is not trained here yet")]
    return _path(value) if value else []


def _path(value: JSON) -> Sequence[Outcome]:
    if isinstance(value, str) and value.endswith((".safetensors", ".ckpt", ".gguf")):
        form = "give the pipeline's folder or name as model.path"
        return [No(f"{shown(value)} is one file; {form}, and a .safetensors file of its denoiser as model.single_file")]
    return [Put("model.path", value)]


def base_precision(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `base_model_precision`: a format and the library that makes it."""
    return [] if value in (None, "", "no_change") else _eight_bits(value)


def quantize(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `model.quantize`; `qtype` beside it says how."""
    if not isinstance(value, bool):
        return [No(f"{shown(value)} is not true or false")]
    return _eight_bits(block.get("qtype", "qfloat8")) if value else []


def _eight_bits(value: JSON) -> Sequence[Outcome]:
    text = str(value).lower()
    word, _, library = text.partition("-")
    if word in EIGHT_BITS:
        other = [] if library in ("", "torchao") else [Said(f"is done by torchao, not by {library}")]
        return [Put("model.base_weights", EIGHT_BITS[word]), *other]
    if text.startswith(FEWER_BITS):
        less = Said(f"{shown(value)}: fewer than 8 bits are not available; 8 bits are used, which need more memory")
        return [Put("model.base_weights", "int8"), less]
    return [No(f"{shown(value)} is not known here; weights are kept as they are computed with, as int8 or as fp8")]


def attention(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `attention_mechanism`."""
    text = str(value).lower().replace("_", "-")
    if text in ATTENTION:
        return [Put("model.attention", ATTENTION[text])]
    if text.startswith("sageattention"):
        return [
            Said("has no effect: it has no backward pass, and samples are made with the same attention as training")
        ]
    return [No(f"{shown(value)} is not available; allowed: {', '.join(map(shown, ATTENTION))}")]


def compiler(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `dynamo_backend`."""
    if value in (None, False, "", "no", "none"):
        return []
    other = [] if value == "inductor" else [Said("the compiler is inductor")]
    return [Put("model.compile", True), *other]


def model_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `model_type`: with LyCORIS, its own file says what kind of adapter."""
    return [] if value == "lora" and beside(block, "lora_type") == "lycoris" else [Put("adapter.type", value)]


def adapter_kind(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `lora_type`."""
    if value == "standard":
        return []
    if value == "lycoris" and beside(block, "lycoris_config"):
        return []
    if value == "lycoris":
        return [No('"lycoris" needs lycoris_config, a file that says which algorithm; or set adapter.type')]
    return [No(f'{shown(value)} is not available; allowed: "standard", "lycoris"')]


def lycoris_file(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `lycoris_config`: the file that it names is read by lycoris_dialect."""
    return []


NETWORKS = {"lora": "lora", "dora": "lora", "locon": "locon", "loha": "loha", "lokr": "lokr"}


def network_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `network.type`. Its adapters are on all linear layers of the blocks."""
    if not isinstance(value, str) or value not in NETWORKS:
        return [No(f"{shown(value)} is not available; allowed: {', '.join(map(shown, NETWORKS))}")]
    dora = [Put("adapter.dora", True)] if value == "dora" else []
    return [Put("adapter.type", NETWORKS[value]), Put("adapter.targets", "attention_mlp", weak=True), *dora]


def experts(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `train_high_noise` and `train_low_noise`, which are both true unless they are not."""
    high, low = block.get("train_high_noise", True), block.get("train_low_noise", True)
    if not isinstance(value, bool):
        return [No(f"{shown(value)} is not true or false")]
    if high is False and low is False:
        return [No("is false, and so is the other: there is nothing to train")]
    return [Put("model.experts", "all" if high and low else "high_noise" if high else "low_noise")]


def shift(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's `flow_schedule_shift`: nothing and 0 mean that noise levels stay where they are."""
    if beside(block, "flow_schedule_auto_shift") is True:
        return [Said("gives way to flow_schedule_auto_shift")]
    return [Put("objective.shift", 1.0 if value in (None, 0, "") else value)]


def if_true(path: str, value: JSON) -> Convert:
    """A switch that asks for one value of a setting."""

    def convert(given: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
        if not isinstance(given, bool):
            return [No(f"{shown(given)} is not true or false")]
        return [Put(path, value)] if given else []

    return convert


def timestep_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's laws of noise levels."""
    laws: dict[JSON, tuple[str, JSON]] = {
        "sigmoid": ("logit_normal", 1.0),
        "linear": ("uniform", 1.0),
        "weighted": ("uniform", 1.0),
        "shift": ("uniform", None),
        "flux_shift": ("uniform", "auto"),
    }
    if isinstance(value, str) and value in laws:
        law, moved = laws[value]
        puts: list[Outcome] = [Put("objective.timesteps", law)]
        if moved is not None:
            puts.append(Put("objective.shift", moved, weak=True))
        if value == "weighted":
            puts.append(Said("its weights are not available; see objective.weighting"))
        return puts
    if value in ("lognorm_blend", "lumina2_shift", "next_sample", "one_step"):
        return [Said(f"{shown(value)} is not available; noise levels are drawn as objective.timesteps says")]
    return [No(f"{shown(value)} is not available; allowed: {', '.join(map(shown, laws))}")]

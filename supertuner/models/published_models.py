"""Configs of published models, so that their training step can be forecast without downloading anything.

A table entry holds what the model's config files contain beyond the defaults of its classes, and the size of its
weights. Entries that determine no shape (latent statistics, schedules, vocabularies) are left out, so these models can
be forecast but not trained. Files in a local folder or in the hub's cache take precedence over the table. Reading the
table imports no torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from supertuner.config.families import family_by_pipeline
from supertuner.core.errors import ModelError

if TYPE_CHECKING:
    from supertuner.config.settings.model import ModelSettings
    from supertuner.models.spec import Family, ModelDescription

ModelTask: TypeAlias = Literal["text to image", "text to video", "image to video", "image editing"]


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights, as training loads them. Computed from the configs, not read from files."""

    denoiser: int
    """One denoiser in 16 bits; a few layers stay in 32 bits."""
    denoiser_8bit: int
    """One denoiser with `model.base_weights: int8`."""
    encoders: int
    """Text encoders and VAE in 16 bits; training releases them after encoding."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model on the hub: its configs and the size of its weights."""

    index: Mapping[str, Any]
    """Its model_index.json, without the components."""
    components: Mapping[str, tuple[str, str, Mapping[str, Any]]]
    """Name of the component → library, class and config."""
    weights: WeightSizes
    fps: int = 16
    """Frames per second of the videos that it makes."""

    @property
    def family(self) -> str:
        return family_by_pipeline()[self.index["_class_name"]]

    @property
    def task(self) -> ModelTask:
        return _TASKS.get(self.index["_class_name"], "text to image")

    @property
    def experts(self) -> int:
        """Its number of denoisers."""
        return sum(name.startswith(("transformer", "unet")) for name in self.components)


def find_published(path: str) -> PublishedModel | None:
    """The model with this name on the hub, which ignores upper and lower case; None: the table does not have it."""
    return next((model for name, model in PUBLISHED.items() if name.lower() == path.lower()), None)


def models_of_family(family: str) -> dict[str, PublishedModel]:
    """The models of a family by their names on the hub; the first is the one to start with."""
    return {name: model for name, model in PUBLISHED.items() if model.family == family}


def describe_model(settings: ModelSettings) -> tuple[Family, ModelDescription, str]:
    """The family, the model with components without weights, and the source of its configs as text for the report.

    Raises ModelError if there are no files and the table does not have the model.
    """
    from supertuner.models.family_loader import load_family
    from supertuner.models.spec import ModelSource

    family = load_family(settings.family)
    path = settings.path
    if path is None:
        raise ModelError('model.path is not set; name a folder, a model on the hub, or "tiny"')
    if path == "tiny":
        with tempfile.TemporaryDirectory() as temp_dir:
            folder = Path(temp_dir) / "tiny"
            family.write_tiny_pipeline(folder, 0)
            model, origin = family.read_model(ModelSource(str(folder))), "created now, as a run would"
    elif Path(path).expanduser().is_dir() or Path(path).is_absolute():
        model, origin = family.read_model(ModelSource(path)), f"the config files in {path}"
    else:
        try:
            model = family.read_model(ModelSource(path, settings.revision, offline=True))
            origin = f"the config files of {path} in the hub's cache"
        except ModelError as error:
            if (published := find_published(path)) is None:
                raise ModelError(_unknown_model_message(path, family.name)) from error
            model = _read_published(family, published)
            origin = "the built-in table of published models; nothing was downloaded"
    return family, replace(model, source=ModelSource(path, without_weights=True)), origin


def _read_published(family: Family, published: PublishedModel) -> ModelDescription:
    """The family's own reader, on a temporary folder with the configs of the table."""
    from supertuner.models.pipeline_files import CONFIG_NAMES, INDEX_NAME
    from supertuner.models.spec import ModelSource

    with tempfile.TemporaryDirectory() as temp_dir:
        folder = Path(temp_dir)
        components = published.components
        index = {**published.index, **{name: [library, kind] for name, (library, kind, _) in components.items()}}
        (folder / INDEX_NAME).write_text(json.dumps(index))
        for name, (_, _, config) in components.items():
            (folder / name).mkdir()
            (folder / name / CONFIG_NAMES[0]).write_text(json.dumps(config))
        return family.read_model(ModelSource(str(folder)))


def _unknown_model_message(path: str, family: str) -> str:
    names = {name.lower(): name for name in models_of_family(family)}
    guess = get_close_matches(path.lower(), names, n=1, cutoff=0.85)
    known = f"the built-in table has these models of {family}: {', '.join(names.values())}"
    hint = f"did you mean {names[guess[0]]}?" if guess else known
    return (
        f"model.path is {path!r}: there is no such folder, it is not in the hub's cache, and {hint}; a folder with the "
        "config files of its components is enough for a forecast"
    )


_Pipeline: TypeAlias = tuple[Mapping[str, Any], Mapping[str, tuple[str, str, Mapping[str, Any]]]]
"""The index and the components of a `PublishedModel`."""
_WAN: Final = {"num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824}
_WAN_5B: Final = {
    "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 14336,
    "in_channels": 48, "out_channels": 48,
}  # fmt: skip
_WAN_1B: Final = {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 8960}
_WAN_VAE_5B: Final = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2, "in_channels": 12,
    "out_channels": 12, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
}  # fmt: skip
_T5: Final = {
    "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False, "is_encoder_decoder": False,
}  # fmt: skip
_CLIP_L: Final = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "hidden_act": "quick_gelu", "vocab_size": 49408,
}  # fmt: skip
_CLIP_G: Final = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "hidden_act": "gelu", "vocab_size": 49408,
}  # fmt: skip
_QWEN_TEXT: Final = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
    "rope_parameters": {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}  # fmt: skip
_QWEN_VISION: Final = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_QWEN_VL: Final = {"text_config": _QWEN_TEXT, "vision_config": _QWEN_VISION, "tie_word_embeddings": False}
_KL: Final = {
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "sample_size": 1024,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
}  # fmt: skip
_KL_16: Final = {**_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
_SD35: Final = {
    "sample_size": 128, "attention_head_dim": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
    "in_channels": 16, "out_channels": 16, "qk_norm": "rms_norm",
}  # fmt: skip
_SD35_MEDIUM: Final = {
    **_SD35, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)),
}  # fmt: skip
_SD35_LARGE: Final = {
    **_SD35, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
}  # fmt: skip
_SDXL: Final = {
    "sample_size": 128, "block_out_channels": [320, 640, 1280], "layers_per_block": 2,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "cross_attention_dim": 2048,
    "transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20], "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip


_T5_XXL: Final = ("T5EncoderModel", {**_T5, "vocab_size": 32128}, "T5TokenizerFast")
_CLIP_G_PROJECTION: Final = ("CLIPTextModelWithProjection", _CLIP_G, "CLIPTokenizer")


def _pipeline(
    index: Mapping[str, Any],
    denoisers: Mapping[str, tuple[str, Mapping[str, Any]]],
    vae: tuple[str, Mapping[str, Any]],
    text_encoders: Sequence[tuple[str, Mapping[str, Any], str]],
    scheduler: tuple[str, Mapping[str, Any]] = ("FlowMatchEulerDiscreteScheduler", {}),
) -> _Pipeline:
    """`text_encoders`: class, config, and class of the tokenizer."""
    parts = {name: ("diffusers", *part) for name, part in {**denoisers, "vae": vae, "scheduler": scheduler}.items()}
    for suffix, (encoder, config, tokenizer) in zip(("", "_2", "_3"), text_encoders, strict=False):
        parts[f"text_encoder{suffix}"] = ("transformers", encoder, config)
        parts[f"tokenizer{suffix}"] = ("transformers", tokenizer, {})
    return index, parts


def _wan(kind: str, denoiser: Mapping[str, Any], vae: Mapping[str, Any], **index: Any) -> _Pipeline:
    experts = ("transformer", "transformer_2") if index.get("boundary_ratio") else ("transformer",)
    return _pipeline(
        {"_class_name": kind, **index},
        dict.fromkeys(experts, ("WanTransformer3DModel", denoiser)),
        ("AutoencoderKLWan", vae),
        [("UMT5EncoderModel", {**_T5, "vocab_size": 256384}, "T5TokenizerFast")],
        ("UniPCMultistepScheduler", {}),
    )


def _flux(guidance_embeds: bool) -> _Pipeline:
    return _pipeline(
        {"_class_name": "FluxPipeline"},
        {"transformer": ("FluxTransformer2DModel", {"guidance_embeds": guidance_embeds})},
        ("AutoencoderKL", {**_KL_16, "scaling_factor": 0.3611, "shift_factor": 0.1159}),
        [("CLIPTextModel", _CLIP_L, "CLIPTokenizer"), _T5_XXL],
    )


def _sd35(denoiser: Mapping[str, Any]) -> _Pipeline:
    return _pipeline(
        {"_class_name": "StableDiffusion3Pipeline"},
        {"transformer": ("SD3Transformer2DModel", denoiser)},
        ("AutoencoderKL", {**_KL_16, "scaling_factor": 1.5305, "shift_factor": 0.0609}),
        [("CLIPTextModelWithProjection", _CLIP_L, "CLIPTokenizer"), _CLIP_G_PROJECTION, _T5_XXL],
    )


_QWEN: Final = _pipeline(
    {"_class_name": "QwenImagePipeline"},
    {"transformer": ("QwenImageTransformer2DModel", {})},
    ("AutoencoderKLQwenImage", {}),
    [("Qwen2_5_VLForConditionalGeneration", _QWEN_VL, "Qwen2Tokenizer")],
)
_QWEN_EDIT: Final = (
    {"_class_name": "QwenImageEditPipeline"},
    {**_QWEN[1], "processor": ("transformers", "Qwen2VLProcessor", {})},
)
_T2V, _I2V = "WanPipeline", "WanImageToVideoPipeline"
_PIPELINES: Final[Mapping[str, _Pipeline]] = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _wan(_T2V, _WAN, {}, boundary_ratio=0.875),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": _wan(_I2V, {**_WAN, "in_channels": 36}, {}, boundary_ratio=0.9),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": _wan(_T2V, _WAN_5B, _WAN_VAE_5B, expand_timesteps=True),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _wan(_T2V, _WAN, {}),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _wan(_T2V, _WAN_1B, {}),
    "Qwen/Qwen-Image": _QWEN,
    "Qwen/Qwen-Image-Edit": _QWEN_EDIT,
    "black-forest-labs/FLUX.1-dev": _flux(guidance_embeds=True),
    "black-forest-labs/FLUX.1-schnell": _flux(guidance_embeds=False),
    "stabilityai/stable-diffusion-3.5-medium": _sd35(_SD35_MEDIUM),
    "stabilityai/stable-diffusion-3.5-large": _sd35(_SD35_LARGE),
    "stabilityai/stable-diffusion-xl-base-1.0": _pipeline(
        {"_class_name": "StableDiffusionXLPipeline"},
        {"unet": ("UNet2DConditionModel", _SDXL)},
        ("AutoencoderKL", {**_KL, "latent_channels": 4, "scaling_factor": 0.13025}),
        [("CLIPTextModel", _CLIP_L, "CLIPTokenizer"), _CLIP_G_PROJECTION],
        ("EulerDiscreteScheduler", {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}),
    ),
}
"""Name on the hub → its index and the configs of its components. The first of a family is the one to start with."""
_WAN_14B_BYTES: Final = (28_636_399_744, 14_597_462_144, 11_615_605_734)
_QWEN_BYTES: Final = (40_860_802_176, 20_504_132_736, 16_838_119_046)
_WEIGHTS: Final = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _WAN_14B_BYTES,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (28_637_218_944, 14_598_281_344, 11_615_605_734),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (10_022_570_368, 5_121_532_288, 12_771_198_008),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _WAN_14B_BYTES,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (2_845_296_768, 1_456_729_728, 11_615_605_734),
    "Qwen/Qwen-Image": _QWEN_BYTES,
    "Qwen/Qwen-Image-Edit": _QWEN_BYTES,
    "black-forest-labs/FLUX.1-dev": (23_802_816_640, 11_983_763_584, 9_938_382_254),
    "black-forest-labs/FLUX.1-schnell": (23_782_357_120, 11_963_304_064, 9_938_382_254),
    "stabilityai/stable-diffusion-3.5-medium": (4_939_327_872, 2_723_022_720, 11_328_882_198),
    "stabilityai/stable-diffusion-3.5-large": (16_292_561_536, 8_291_986_816, 11_328_882_198),
    "stabilityai/stable-diffusion-xl-base-1.0": (5_134_927_368, 2_916_820_168, 1_802_749_598),
}
"""The values of `WeightSizes`; a test builds the models on the meta device and compares."""
_TASKS: Final[Mapping[str, ModelTask]] = {
    _T2V: "text to video",
    _I2V: "image to video",
    "QwenImageEditPipeline": "image editing",
}
_FPS: Final = {"Wan-AI/Wan2.2-TI2V-5B-Diffusers": 24}
PUBLISHED: Final[Mapping[str, PublishedModel]] = {
    name: PublishedModel(index, components, WeightSizes(*_WEIGHTS[name]), _FPS.get(name, 16))
    for name, (index, components) in _PIPELINES.items()
}
"""By name on the hub."""

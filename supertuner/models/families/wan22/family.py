"""Wan2.2: text-to-video and image-to-video with two experts, and the 5B with one expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import diffusers
import torch
from PIL import Image
from torch import Tensor, nn

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models import loading, pipeline_files
from supertuner.models.adapters.targets import SELF_ATTENTION, target_presets
from supertuner.models.families.sampling_common import PipelineOptions, build_sampler
from supertuner.models.families.tiny_pipelines import umt5_encoder, unigram_tokenizer, write_pipeline
from supertuner.models.families.wan22.encoders import MAX_TEXT_TOKENS, build_media_encoder, build_text_encoder
from supertuner.models.pipeline_files import INDEX_NAME, ConfigDict
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource, SampleRequest, Tensors

NAME: Final = "wan2.2"
TRAIN_TIMESTEPS: Final = 1000


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_model(source: ModelSource) -> ModelDescription:
    source, index = pipeline_files.read_index(source, NAME)
    experts = _experts(source, index)
    components = (*(expert.component for expert in experts), "vae", "text_encoder", "tokenizer", "scheduler")
    configs = pipeline_files.read_component_configs(source, index, components)
    if reason := _unsupported_variant(index, configs):
        raise ModelError(f"{source.path} {reason}")
    return ModelDescription(
        source=source,
        title=_title(index, len(experts)),
        experts=experts,
        media_kinds=frozenset({MediaKind.VIDEO} if _is_image_to_video(index) else {MediaKind.IMAGE, MediaKind.VIDEO}),
        shift=pipeline_files.positive_number(source, configs, "scheduler", ("flow_shift", "shift"), 1.0),
        configs=configs,
        needs_first_frame=_is_image_to_video(index),
    )


def _experts(source: ModelSource, index: ConfigDict) -> tuple[Expert, ...]:
    """The pipeline runs `transformer` at timesteps from the boundary upwards and `transformer_2` below it."""
    boundary = index.get("boundary_ratio")
    if boundary is None:
        return (Expert("model", "transformer"),)
    if not isinstance(boundary, float) or not 0 < boundary < 1:
        raise ModelError(f"{source.path}: {INDEX_NAME}: boundary_ratio is {boundary!r}, not between 0 and 1")
    return (
        Expert("high_noise", "transformer", sigma_min=float(boundary)),
        Expert("low_noise", "transformer_2", sigma_max=float(boundary)),
    )


def _title(index: ConfigDict, experts: int) -> str:
    version = "Wan2.2" if experts == 2 or index.get("expand_timesteps") else "Wan2.1"
    task = "image-to-video" if _is_image_to_video(index) else "text-to-video"
    return f"{version} {task}, {'two experts' if experts == 2 else 'one expert'}"


def _is_image_to_video(index: Mapping[str, object]) -> bool:
    return index["_class_name"] == "WanImageToVideoPipeline"


def _unsupported_variant(index: ConfigDict, configs: Mapping[str, ConfigDict]) -> str | None:
    if configs["transformer"].get("image_dim") is not None:
        return "reads its first frame through an image encoder, as Wan2.1 did; Wan2.2 image-to-video is supported"
    if _is_image_to_video(index) and index.get("expand_timesteps"):
        return "is the 5B as image-to-video; its repository's WanPipeline (text-to-video) is supported"
    return None


# ── shapes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    if len(shape) not in (3, 4) or shape[0] != 3:
        return f"its shape is {shape}, and this model takes RGB images and videos (3 × frames × height × width)"
    frames = shape[1] if len(shape) == 4 else 1
    if MediaKind.IMAGE not in model.media_kinds and frames == 1:
        return "it has one frame, and an image-to-video model learns from the frames after the first"
    stride = _integer(model, "vae", "scale_factor_temporal", 4)
    if frames % stride != 1:
        return f"it has {frames} frames, and this model takes 1, {stride + 1}, {2 * stride + 1} … ({stride}·n + 1)"
    multiple = _integer(model, "vae", "scale_factor_spatial", 8) * _patch_size(model)[1]
    if shape[-2] % multiple or shape[-1] % multiple:
        return f"it is {shape[-1]}×{shape[-2]}, and both sides must be multiples of {multiple}"
    return None


def token_count(model: ModelDescription, shape: tuple[int, ...]) -> int:
    """Tokens of latents of shape CFHW; a token is one patch."""
    _, frames, height, width = shape
    patch_frames, patch_height, patch_width = _patch_size(model)
    return (frames // patch_frames) * (height // patch_height) * (width // patch_width)


def _patch_size(model: ModelDescription) -> tuple[int, int, int]:
    patch = model.configs["transformer"].get("patch_size", (1, 2, 2))
    if not isinstance(patch, list | tuple) or len(patch) != 3:
        raise ModelError(f"{model.source.path}: transformer/config.json: patch_size is {patch!r}, not three numbers")
    return int(patch[0]), int(patch[1]), int(patch[2])


def _integer(model: ModelDescription, component: str, key: str, default: int) -> int:
    value = model.configs[component].get(key)
    if value is None:
        return default
    if not isinstance(value, int):
        raise ModelError(f"{model.source.path}: {component}/config.json: {key} is {value!r}, not a whole number")
    return value


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def denoise(
    model: ModelDescription, module: nn.Module, noisy: Tensor, sigmas: Tensor, text: Tensors, conditions: Tensors
) -> Tensor:
    """Calls the transformer as the pipelines do: a condition is concatenated to the latents as channels; the 5B takes
    one timestep per token."""
    timestep = sigmas * TRAIN_TIMESTEPS
    if model.configs[""].get("expand_timesteps"):
        timestep = timestep[:, None].expand(-1, token_count(model, tuple(noisy.shape[1:])))
    if "condition" in conditions:
        noisy = torch.cat([noisy, conditions["condition"].to(noisy.dtype)], dim=1)
    predicted: Tensor = module(
        hidden_states=noisy, timestep=timestep, encoder_hidden_states=text["embeds"], return_dict=False
    )[0]
    return predicted


def pad_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """Pads with zeros to the pipeline's fixed length. There is no mask: the model attends to the zeros."""
    first = captions[0]["embeds"]
    padded = first.new_zeros(len(captions), MAX_TEXT_TOKENS, first.shape[-1])
    for row, caption in zip(padded, captions, strict=True):
        row[: len(caption["embeds"])] = caption["embeds"]
    return {"embeds": padded}


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _call_arguments(model: ModelDescription, request: SampleRequest) -> dict[str, Any]:
    arguments = {
        "negative_prompt": request.negative_prompt,
        "num_frames": request.frames,
        "guidance_scale": request.guidance_scale,
        "output_type": "np",
    }
    if not model.needs_first_frame:
        return arguments
    if request.image is None:
        raise ModelError(f"the sample {request.prompt!r} has no first frame, and this model starts from one")
    return {**arguments, "image": Image.fromarray(request.image)}


def _constructor_arguments(model: ModelDescription) -> dict[str, Any]:
    index = model.configs[""]
    missing = ["transformer_2"] if len(model.experts) == 1 else []
    missing += ["image_encoder", "image_processor"] if _is_image_to_video(index) else []
    options = {"boundary_ratio": index.get("boundary_ratio"), "expand_timesteps": bool(index.get("expand_timesteps"))}
    return {**options, **dict.fromkeys(missing)}


def _output_pixels(pipeline: Any, output: Any, request: SampleRequest) -> Any:
    return output.frames[0]


PIPELINE: Final = PipelineOptions(unsupported_reason, _call_arguments, _output_pixels, _constructor_arguments)

# ── tiny version ──────────────────────────────────────────────────────────────────────────────────────────────────────


def tiny_wan_pipeline(
    kind: Literal["t2v", "i2v", "ti2v"] = "t2v", experts: Literal[1, 2] = 2
) -> diffusers.WanPipeline | diffusers.WanImageToVideoPipeline:
    """Text-to-video, image-to-video (the first frame beside the latents), or like the 5B: one expert, a VAE with stride
    16. `experts` is ignored for `ti2v`."""
    boundary = {"t2v": 0.875, "i2v": 0.9}.get(kind) if experts == 2 else None
    tokenizer = unigram_tokenizer()
    components: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": umt5_encoder(len(tokenizer), 16),
        "vae": _tiny_vae(residual=kind == "ti2v"),
        "transformer": _tiny_transformer(kind),
        "transformer_2": None if boundary is None else _tiny_transformer(kind),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        "boundary_ratio": boundary,
        "expand_timesteps": kind == "ti2v",
    }
    if kind == "i2v":
        return diffusers.WanImageToVideoPipeline(**components, image_encoder=None, image_processor=None)
    return diffusers.WanPipeline(**components)


def _tiny_vae(residual: bool) -> diffusers.AutoencoderKLWan:
    """`residual`: with the stride and the channels of the 5B's VAE."""
    config: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    if residual:
        config |= {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 8}
        config |= {"scale_factor_spatial": 16, "z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    return diffusers.AutoencoderKLWan(**config).eval()


def _tiny_transformer(kind: str) -> diffusers.WanTransformer3DModel:
    channels = 48 if kind == "ti2v" else 16
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,  # a multiple of 6: a third each for time, height and width
        in_channels=2 * channels + 4 if kind == "i2v" else channels,
        out_channels=channels,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
    ).eval()


_MLP: Final = ("ffn.net.0.proj", "ffn.net.2")
_OTHER_LINEAR: Final = ("linear_1", "linear_2", "time_proj", "proj_out")
"""Embedders of time and text, and the last layer."""

FAMILY: Final = Family(
    name=NAME,
    prediction="flow",
    read_model=read_model,
    media_files=pipeline_files.vae_files,
    text_files=pipeline_files.text_files,
    build_media_encoder=build_media_encoder,
    build_text_encoder=build_text_encoder,
    unsupported_reason=unsupported_reason,
    load_denoiser=loading.load_denoiser,
    denoise=denoise,
    pad_text=pad_text,
    token_count=token_count,
    build_sampler=partial(build_sampler, options=PIPELINE),
    target_presets=target_presets(SELF_ATTENTION, _MLP, _OTHER_LINEAR),
    # Each expert's adapter is a separate file, and diffusers expects one prefix in both (load_into_transformer_2).
    export_prefix={"transformer": "transformer", "transformer_2": "transformer"},
    write_tiny_pipeline=partial(write_pipeline, tiny_wan_pipeline),
)

"""Qwen-Image: text-to-image with one expert and a language model as text encoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from supertuner.core.errors import ModelError
from supertuner.models.adapters.targets import JOINT_ATTENTION, target_presets
from supertuner.models.families import image_common
from supertuner.models.families.qwen_image import encoders
from supertuner.models.families.qwen_image.tiny import tiny_qwen_pipeline
from supertuner.models.families.sampling_common import PipelineOptions, build_sampler
from supertuner.models.families.tiny_pipelines import write_pipeline
from supertuner.models.pipeline_files import ConfigDict, positive_number, read_pipeline
from supertuner.models.spec import ModelDescription, ModelSource, SampleRequest, Tensors

NAME: Final = "qwen-image"
COMPONENTS: Final = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
REFERENCE_TOKENS: Final = 4096
"""Tokens of an image of 1024×1024 pixels."""


def read_model(source: ModelSource) -> ModelDescription:
    source, configs = read_pipeline(source, NAME, COMPONENTS)
    require_supported(source, configs)
    return image_common.image_model(source, configs, title="Qwen-Image", shift=scheduler_shift(source, configs))


def require_supported(source: ModelSource, configs: Mapping[str, ConfigDict]) -> None:
    for key in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
        if configs["transformer"].get(key):
            raise ModelError(f"{source.path}: transformer/config.json: {key} is true, which is not supported")


def scheduler_shift(source: ModelSource, configs: Mapping[str, ConfigDict]) -> float:
    """The scheduler's shift. With dynamic shifting it grows with the image; this is the shift at 1024×1024."""

    def entry(key: str, default: float) -> float:
        return positive_number(source, configs, "scheduler", (key,), default)

    if not configs["scheduler"].get("use_dynamic_shifting"):
        return entry("shift", 1.0)
    low, high = entry("base_shift", 0.5), entry("max_shift", 1.15)
    few, many = entry("base_image_seq_len", 256), entry("max_image_seq_len", 4096)
    return math.exp(low + (high - low) * (REFERENCE_TOKENS - few) / (many - few))


def denoise(
    model: ModelDescription, module: nn.Module, noisy: Tensor, sigmas: Tensor, text: Tensors, conditions: Tensors
) -> Tensor:
    """Calls the transformer as the pipeline does: packed tokens, their grid, and sigmas without a factor."""
    packed = image_common.pack_latents(noisy)
    predicted = predict_tokens(module, packed, [token_grid(noisy.shape)], sigmas, text)
    return image_common.unpack_latents(predicted, noisy.shape)


def predict_tokens(
    module: nn.Module, packed: Tensor, grids: Sequence[tuple[int, int, int]], sigmas: Tensor, text: Tensors
) -> Any:
    """The prediction for the tokens of one or more images per sample, concatenated, with these grids."""
    return module(
        hidden_states=packed,
        timestep=sigmas,
        guidance=None,
        encoder_hidden_states_mask=text.get("mask"),
        encoder_hidden_states=text["embeds"],
        img_shapes=[list(grids)] * len(packed),
        attention_kwargs={},
        return_dict=False,
    )[0]


def token_grid(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Frames, rows and columns of tokens of latents of this shape (… H W)."""
    return 1, shape[-2] // image_common.PATCH_SIZE, shape[-1] // image_common.PATCH_SIZE


def _call_arguments(model: ModelDescription, request: SampleRequest) -> dict[str, Any]:
    """Guidance is a second prediction for the negative prompt; the pipeline rescales the result to the norm of the
    first prediction."""
    return {
        "negative_prompt": request.negative_prompt if request.guidance_scale > 1 else None,
        "true_cfg_scale": request.guidance_scale,
        "max_sequence_length": encoders.TEXT_TO_IMAGE.max_caption_tokens,
        "output_type": "np",
    }


PIPELINE: Final = PipelineOptions(
    image_common.unsupported_reason, _call_arguments, lambda _pipeline, output, _request: output.images
)
"""The VAE decodes in fp32."""

_MLP: Final = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
_OTHER_LINEAR: Final = (
    "img_mod.1", "txt_mod.1", "img_in", "txt_in", "linear_1", "linear_2", "norm_out.linear", "proj_out",
)  # fmt: skip
"""Layers that modulate norms, embedders, and the last layers."""

FAMILY: Final = image_common.ImageFamily(
    name=NAME,
    read_model=read_model,
    build_media_encoder=encoders.build_media_encoder,
    build_text_encoder=encoders.build_text_encoder,
    denoise=denoise,
    pad_text=encoders.pad_text,
    build_sampler=partial(build_sampler, options=PIPELINE),
    target_presets=target_presets(JOINT_ATTENTION, _MLP, _OTHER_LINEAR),
    write_tiny_pipeline=partial(write_pipeline, tiny_qwen_pipeline),
)

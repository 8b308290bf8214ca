"""Stable Diffusion XL: text-to-image by a UNet that predicts epsilon or v at one of its scheduler's timesteps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import diffusers
import torch
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection

from supertuner.core.errors import ModelError
from supertuner.models.adapters.targets import SELF_ATTENTION, target_presets
from supertuner.models.families import image_common, tiny_pipelines
from supertuner.models.families.sampling_common import build_sampler
from supertuner.models.families.text_common import CaptionEncoder, load_text_towers, stack_text
from supertuner.models.library_guards import quiet_libraries
from supertuner.models.objective.diffusion import timestep_index
from supertuner.models.objective.snr import scheduler_alphas_cumprod
from supertuner.models.pipeline_files import ConfigDict, read_pipeline
from supertuner.models.spec import Expert, ModelDescription, ModelSource, PredictionType, Tensors

NAME: Final = "sdxl"
COMPONENTS: Final = ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
PREDICTION_TYPES: Final[dict[str, PredictionType]] = {"epsilon": "epsilon", "v_prediction": "v"}
"""`prediction_type` of a scheduler's config → our name."""


def read_model(source: ModelSource) -> ModelDescription:
    source, configs = read_pipeline(source, NAME, COMPONENTS)
    prediction_type = str(configs["scheduler"].get("prediction_type", "epsilon"))
    if prediction_type not in PREDICTION_TYPES:
        supported = ", ".join(PREDICTION_TYPES)
        problem = f"its scheduler has prediction_type {prediction_type!r}; supported are {supported}"
        raise ModelError(f"{source.path}: {problem}")
    return image_common.image_model(
        source,
        configs,
        title=f"Stable Diffusion XL, predicts {'noise' if prediction_type == 'epsilon' else 'velocity'}",
        experts=(Expert("model", "unet"),),
        shift=1.0,
        micro_conditioning=True,
        prediction=PREDICTION_TYPES[prediction_type],
        alphas_cumprod=_alphas_cumprod(source, str(configs[""]["scheduler"][1]), configs["scheduler"]),
    )


def _alphas_cumprod(source: ModelSource, class_name: str, config: ConfigDict) -> tuple[float, ...]:
    """ᾱ of each timestep, computed by the pipeline's own scheduler class from its config."""
    scheduler_class: Any = getattr(diffusers, class_name, None)
    if scheduler_class is None:
        raise ModelError(f"{source.path}: the installed diffusers has no {class_name}, which is its scheduler")
    try:
        with quiet_libraries():
            table = scheduler_alphas_cumprod(scheduler_class.from_config(dict(config)))
    except ImportError as error:  # diffusers has placeholders for classes whose packages are missing; they name them
        raise ModelError(f"{source.path}: its scheduler cannot be created: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(f"{source.path}: the config of its scheduler is not one of {class_name}: {error}") from error
    if table is None:
        raise ModelError(f"{source.path}: its {class_name} has no table of alphas_cumprod, which training needs")
    return tuple(table.tolist())


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> CaptionEncoder:
    """`embeds`: both CLIPs' second-to-last hidden states side by side; `pooled`: the second CLIP's; `said`: 0 for an
    empty caption, otherwise 1. Equal to the bit to what the pipeline computes.

    CLIP gets no mask: all 77 rows depend on the caption and are stored.
    """
    clips = load_text_towers(model, ("", "_2"), device, dtype)

    def encode(caption: str) -> Tensors:
        outputs = [clip.run(caption, clip.max_length, output_hidden_states=True) for clip in clips]
        embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)[0].cpu()
        pooled = outputs[-1][0]
        return {"embeds": embeds, "pooled": pooled[0].cpu().clone(), "said": embeds.new_full((1,), bool(caption))}

    return CaptionEncoder(clips, encode, lambda caption: clips[0].exceeds(caption, clips[0].max_length))


def pad_text(model: ModelDescription, captions: Sequence[Tensors]) -> Tensors:
    """Stacks the captions, which all have the same length.

    Where the pipeline's index sets `force_zeros_for_empty_prompt`, an empty caption becomes zeros: the pipeline uses
    zeros as the unconditional input of guidance.
    """
    batch = stack_text(model, captions)
    non_empty = batch.pop("said")
    if _zeros_for_empty_prompt(model):
        empty_rows = [row for row, flag in enumerate(non_empty) if not flag.item()]
        for field in batch.values():
            field[empty_rows] = 0
    return batch


def _zeros_for_empty_prompt(model: ModelDescription) -> bool:
    return bool(model.configs[""].get("force_zeros_for_empty_prompt", True))


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    """Sides must be multiples of what the VAE needs; the UNet handles odd sides on its way down and up."""
    return image_common.image_unsupported_reason(shape, image_common.pixels_per_latent(model))


def token_count(model: ModelDescription, shape: tuple[int, ...]) -> int:
    """Tokens of the first level that has attention, which comes after the first halving."""
    _, height, width = shape
    return -(-height // 2) * -(-width // 2)


def denoise(
    model: ModelDescription, module: nn.Module, noisy: Tensor, sigmas: Tensor, text: Tensors, conditions: Tensors
) -> Tensor:
    """Calls the UNet as the pipeline does. Without the condition `framing`, images count as uncropped and unresized, as
    the pipeline assumes for samples."""
    assert model.alphas_cumprod is not None
    framing = conditions.get("framing")
    predicted: Tensor = module(
        noisy,
        timestep_index(sigmas, len(model.alphas_cumprod)),
        encoder_hidden_states=text["embeds"],
        added_cond_kwargs={
            "text_embeds": text["pooled"],
            "time_ids": _full_image_time_ids(model, noisy) if framing is None else framing,
        },
        return_dict=False,
    )[0]
    return predicted


def _full_image_time_ids(model: ModelDescription, noisy: Tensor) -> Tensor:
    height, width = (side * image_common.pixels_per_latent(model) for side in noisy.shape[-2:])
    return torch.tensor([[height, width, 0, 0, height, width]] * len(noisy), dtype=torch.float32, device=noisy.device)


PIPELINE: Final = replace(
    image_common.IMAGE_PIPELINE,
    unsupported_reason=unsupported_reason,
    # The pipeline uses zeros only if the negative prompt is None; an empty string is encoded.
    call_arguments=lambda model, request: {
        **image_common.image_call_arguments(model, request),
        "negative_prompt": request.negative_prompt or None,
    },
    constructor_arguments=lambda model: {
        "force_zeros_for_empty_prompt": _zeros_for_empty_prompt(model),
        "add_watermarker": False,
    },
)


def tiny_sdxl_pipeline(prediction: Literal["epsilon", "v"] = "epsilon") -> diffusers.StableDiffusionXLPipeline:
    """`v` is configured as in finetunes of SDXL with zero terminal SNR: the last timestep is pure noise."""
    first, second = tiny_pipelines.byte_tokenizer(), tiny_pipelines.byte_tokenizer()
    velocity = prediction == "v"
    return diffusers.StableDiffusionXLPipeline(
        tokenizer=first,
        tokenizer_2=second,
        text_encoder=tiny_pipelines.clip_encoder(first, 8, 2),
        text_encoder_2=tiny_pipelines.clip_encoder(second, 16, 2, CLIPTextModelWithProjection),
        vae=tiny_pipelines.tiny_image_vae(channels=4, scaling_factor=0.13025, shift_factor=None),
        unet=diffusers.UNet2DConditionModel(
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(8, 16, 16),
            layers_per_block=1,
            transformer_layers_per_block=(1, 1, 2),
            attention_head_dim=(1, 2, 2),  # despite its name, this class reads it as the number of heads
            cross_attention_dim=8 + 16,
            norm_num_groups=4,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 16,
        ).eval(),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction" if velocity else "epsilon",
            rescale_betas_zero_snr=velocity,
            timestep_spacing="trailing" if velocity else "leading",
            steps_offset=1,
        ),
        add_watermarker=False,
    )


_MLP: Final = ("ff.net.0.proj", "ff.net.2")
_OTHER_LINEAR: Final = ("proj_in", "proj_out", "linear_1", "linear_2", "time_emb_proj")
_CONVOLUTIONS: Final = ("conv_in", "conv1", "conv2", "conv_shortcut", "conv", "conv_out")

FAMILY: Final = image_common.ImageFamily(
    name=NAME,
    modelspec_architecture="stable-diffusion-xl-v1-base",
    prediction="epsilon",
    read_model=read_model,
    build_text_encoder=build_text_encoder,
    unsupported_reason=unsupported_reason,
    denoise=denoise,
    pad_text=pad_text,
    token_count=token_count,
    build_sampler=partial(build_sampler, options=PIPELINE),
    target_presets={
        **target_presets(SELF_ATTENTION, _MLP, _OTHER_LINEAR),
        "all_layers": (*SELF_ATTENTION, *_MLP, *_OTHER_LINEAR, *_CONVOLUTIONS),
    },
    export_prefix={"unet": "unet"},
    write_tiny_pipeline=partial(tiny_pipelines.write_pipeline, tiny_sdxl_pipeline),
    batched_guidance=True,
)

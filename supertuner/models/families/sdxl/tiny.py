"""A tiny SDXL pipeline: the real classes with random weights, a few hundred kilobytes, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

from supertuner.models.families.tiny_text import byte_tokenizer, clip_encoder, clip_encoder_with_projection
from supertuner.models.families.tiny_vae import tiny_image_vae
from supertuner.models.library_logging import quiet_libraries
from supertuner.models.spec import PredictionType


@dataclass(frozen=True, slots=True)
class TinySdxl:
    """Sizes of a tiny pipeline. What the mathematics depends on (latents, levels, framing, table) is as in the real
    one."""

    prediction: PredictionType = "epsilon"
    """`v` is as finetunes of SDXL have it: with a last timestep that is all noise."""
    width: int = 8
    text_width: int = 8
    pooled_width: int = 16
    time_ids_width: int = 8
    vae_width: int = 8


def build_pipeline(sizes: TinySdxl, seed: int) -> StableDiffusionXLPipeline:
    """The pipeline in memory. The same seed gives the same weights, and nobody else's random numbers are used up."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second = byte_tokenizer(), byte_tokenizer()
        return StableDiffusionXLPipeline(
            tokenizer=first,
            tokenizer_2=second,
            text_encoder=clip_encoder(first, sizes.text_width, layers=2),
            text_encoder_2=clip_encoder_with_projection(second, sizes.pooled_width, layers=2),
            vae=tiny_image_vae(sizes.vae_width, channels=4, scaling_factor=0.13025, shift_factor=None),
            unet=_unet(sizes),
            scheduler=_scheduler(sizes.prediction),
            add_watermarker=False,
        )


def write_pipeline(folder: Path, sizes: TinySdxl, seed: int) -> None:
    """`build`, as a folder like those on the hub."""
    with quiet_libraries():
        build_pipeline(sizes, seed).save_pretrained(folder)


def write_tiny_pipeline(folder: Path, seed: int) -> None:
    write_pipeline(folder, TinySdxl(), seed)


def _unet(sizes: TinySdxl) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(sizes.width, 2 * sizes.width, 2 * sizes.width),
        layers_per_block=1,
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(1, 2, 2),  # by an old mistake of the class, the number of heads
        cross_attention_dim=sizes.text_width + sizes.pooled_width,
        norm_num_groups=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=sizes.time_ids_width,
        projection_class_embeddings_input_dim=6 * sizes.time_ids_width + sizes.pooled_width,
    ).eval()


def _scheduler(prediction: PredictionType) -> EulerDiscreteScheduler:
    velocity = prediction == "v"
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction" if velocity else "epsilon",
        rescale_betas_zero_snr=velocity,
        timestep_spacing="trailing" if velocity else "leading",
        steps_offset=1,
    )

"""Sizes of a tiny SDXL pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

from supertuner.models.families.tiny_pipelines import (
    byte_tokenizer,
    clip_encoder,
    clip_encoder_with_projection,
    tiny_image_vae,
)


@dataclass(frozen=True, slots=True)
class TinySdxl:
    prediction: Literal["epsilon", "v"] = "epsilon"
    """`v` is configured as in finetunes of SDXL with zero terminal SNR: the last timestep is pure noise."""
    width: int = 8
    text_width: int = 8
    pooled_width: int = 16
    time_ids_width: int = 8
    vae_width: int = 8

    def assemble(self) -> StableDiffusionXLPipeline:
        first, second = byte_tokenizer(), byte_tokenizer()
        return StableDiffusionXLPipeline(
            tokenizer=first,
            tokenizer_2=second,
            text_encoder=clip_encoder(first, self.text_width, layers=2),
            text_encoder_2=clip_encoder_with_projection(second, self.pooled_width, layers=2),
            vae=tiny_image_vae(self.vae_width, channels=4, scaling_factor=0.13025, shift_factor=None),
            unet=self._unet(),
            scheduler=self._scheduler(),
            add_watermarker=False,
        )

    def _unet(self) -> UNet2DConditionModel:
        return UNet2DConditionModel(
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(self.width, 2 * self.width, 2 * self.width),
            layers_per_block=1,
            transformer_layers_per_block=(1, 1, 2),
            attention_head_dim=(1, 2, 2),  # despite its name, this class reads it as the number of heads
            cross_attention_dim=self.text_width + self.pooled_width,
            norm_num_groups=4,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=self.time_ids_width,
            projection_class_embeddings_input_dim=6 * self.time_ids_width + self.pooled_width,
        ).eval()

    def _scheduler(self) -> EulerDiscreteScheduler:
        velocity = self.prediction == "v"
        return EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction" if velocity else "epsilon",
            rescale_betas_zero_snr=velocity,
            timestep_spacing="trailing" if velocity else "leading",
            steps_offset=1,
        )

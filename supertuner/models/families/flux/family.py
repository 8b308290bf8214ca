"""Flux: text-to-image with one expert; guidance is an input of the model (dev), or there is none (schnell)."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from supertuner.config.settings.model import DEFAULT_GUIDANCE
from supertuner.models.adapters.targets import JOINT_ATTENTION, target_presets
from supertuner.models.families import image_common, tiny_pipelines
from supertuner.models.families.sampling_common import PipelineOptions, build_sampler
from supertuner.models.families.text_common import CaptionEncoder, load_text_towers
from supertuner.models.pipeline_files import largest_shift, read_pipeline
from supertuner.models.spec import ModelDescription, ModelSource, SampleRequest, Tensors

NAME: Final = "flux"
COMPONENTS: Final = (
    "transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler",
)  # fmt: skip
MAX_TEXT_TOKENS: Final = 512


def read_model(source: ModelSource) -> ModelDescription:
    source, configs = read_pipeline(source, NAME, COMPONENTS)
    distilled = configs["transformer"].get("guidance_embeds")
    return image_common.image_model(
        source,
        configs,
        title=f"Flux, {'guidance is an input' if distilled else 'without guidance'}",
        shift=largest_shift(source, configs, 1.15),
        training_guidance=DEFAULT_GUIDANCE if distilled else None,
    )


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> CaptionEncoder:
    """`embeds` by T5 and `pooled` by CLIP, equal to the bit to what the pipeline computes.

    The pipeline gives T5 no mask, so the rows after the end of a caption depend on the caption and the denoiser reads
    them: all 512 rows are stored. CLIP contributes only a summary and reads 77 tokens of any caption, so a caption
    counts as truncated only if T5 truncates it.
    """
    clip, t5 = load_text_towers(model, ("", "_2"), device, dtype)

    def encode(caption: str) -> Tensors:
        pooled = clip.run(caption, clip.max_length)
        embeds = t5.run(caption, MAX_TEXT_TOKENS).last_hidden_state
        return {"embeds": embeds[0].cpu().clone(), "pooled": pooled.pooler_output[0].cpu().clone()}

    return CaptionEncoder([clip, t5], encode, lambda caption: t5.exceeds(caption, MAX_TEXT_TOKENS))


def denoise(
    model: ModelDescription, module: nn.Module, noisy: Tensor, sigmas: Tensor, text: Tensors, conditions: Tensors
) -> Tensor:
    """Calls the transformer as the pipeline does: packed tokens, their coordinates, and sigmas without a factor."""
    embeds, guidance = text["embeds"], model.training_guidance
    predicted = module(
        hidden_states=image_common.pack_latents(noisy),
        timestep=sigmas,
        guidance=None if guidance is None else torch.full_like(sigmas, guidance),
        pooled_projections=text["pooled"],
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(embeds.shape[1], 3, device=noisy.device),
        img_ids=token_coordinates(noisy.shape, noisy.device),
        return_dict=False,
    )[0]
    return image_common.unpack_latents(predicted, noisy.shape)


def token_coordinates(shape: torch.Size, device: torch.device) -> Tensor:
    """(0, row, column) of each token."""
    rows, columns = shape[-2] // image_common.PATCH_SIZE, shape[-1] // image_common.PATCH_SIZE
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    coordinates = torch.stack([torch.zeros_like(row), row, column], dim=-1)
    return coordinates.reshape(-1, 3).to(device, torch.float32)


def _call_arguments(model: ModelDescription, request: SampleRequest) -> dict[str, Any]:
    """Flux is distilled: its pipeline takes no negative prompt."""
    return {"guidance_scale": request.guidance_scale, "output_type": "latent"}


def _decode_sample(pipeline: Any, output: Any, request: SampleRequest) -> Any:
    sizes = (request.height, request.width, pipeline.vae_scale_factor)
    return image_common.decode_image(pipeline, pipeline._unpack_latents(output.images, *sizes))


PIPELINE: Final = PipelineOptions(image_common.unsupported_reason, _call_arguments, _decode_sample)


def tiny_flux_pipeline(guidance: bool = True) -> FluxPipeline:
    """`guidance`: whether guidance is an input of the transformer, as in Flux dev; schnell has none."""
    clip, t5 = tiny_pipelines.byte_tokenizer(), tiny_pipelines.unigram_tokenizer()
    return FluxPipeline(
        tokenizer=clip,
        tokenizer_2=t5,
        text_encoder=tiny_pipelines.clip_encoder(clip, 16, layers=1),
        text_encoder_2=tiny_pipelines.t5_encoder(len(t5), 16),
        vae=tiny_pipelines.tiny_image_vae(channels=16, scaling_factor=0.3611, shift_factor=0.1159),
        transformer=FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            guidance_embeds=guidance,
            axes_dims_rope=(4, 6, 6),
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance),
    )


_MLP: Final = ("net.0.proj", "net.2", "proj_mlp", "proj_out")
_OTHER_LINEAR: Final = ("x_embedder", "context_embedder", "linear_1", "linear_2", "linear")
"""Embedders, and the layers that modulate norms. schnell has one embedder less, so they are named by their endings."""

FAMILY: Final = image_common.ImageFamily(
    name=NAME,
    modelspec_architecture="flux-1",
    read_model=read_model,
    build_text_encoder=build_text_encoder,
    denoise=denoise,
    build_sampler=partial(build_sampler, options=PIPELINE),
    target_presets=target_presets(JOINT_ATTENTION, _MLP, _OTHER_LINEAR),
    write_tiny_pipeline=partial(tiny_pipelines.write_pipeline, tiny_flux_pipeline),
)

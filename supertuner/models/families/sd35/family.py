"""Stable Diffusion 3 and 3.5: text-to-image by flow matching, with three text encoders and one expert."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import CLIPTextModelWithProjection

from supertuner.models.adapters.targets import JOINT_ATTENTION, target_presets
from supertuner.models.families import image_common, tiny_pipelines
from supertuner.models.families.sampling_common import build_sampler
from supertuner.models.families.text_common import CaptionEncoder, load_text_towers
from supertuner.models.pipeline_files import largest_shift, read_pipeline
from supertuner.models.spec import ModelDescription, ModelSource, Tensors

NAME: Final = "sd3.5"
COMPONENTS: Final = (
    "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2",
    "tokenizer_3", "scheduler",
)  # fmt: skip
MAX_TEXT_TOKENS: Final = 256
"""Tokens that T5 reads: the pipeline's default."""


def read_model(source: ModelSource) -> ModelDescription:
    source, configs = read_pipeline(source, NAME, COMPONENTS)
    title = f"Stable Diffusion {'3.5' if configs['transformer'].get('qk_norm') else '3'}"
    return image_common.image_model(source, configs, title=title, shift=largest_shift(source, configs, 1.16))


def build_text_encoder(model: ModelDescription, device: torch.device, dtype: torch.dtype) -> CaptionEncoder:
    """`embeds`: 77 rows of both CLIPs side by side, padded with zeros to T5's width, and 256 rows of T5; `pooled`: both
    CLIPs' summaries. Equal to the bit to what the pipeline computes.

    No encoder gets a mask, so every row depends on the caption and all are stored. CLIP reads 77 tokens of any caption,
    so a caption counts as truncated only if T5 truncates it.
    """
    *clips, t5 = load_text_towers(model, ("", "_2", "_3"), device, dtype)

    def encode(caption: str) -> Tensors:
        outputs = [clip.run(caption, clips[0].max_length, output_hidden_states=True) for clip in clips]
        clip_embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        t5_embeds = t5.run(caption, MAX_TEXT_TOKENS)[0]
        embeds = torch.cat([pad(clip_embeds, (0, t5_embeds.shape[-1] - clip_embeds.shape[-1])), t5_embeds], dim=-2)
        return {"embeds": embeds[0].cpu(), "pooled": torch.cat([output[0] for output in outputs], dim=-1)[0].cpu()}

    return CaptionEncoder([*clips, t5], encode, lambda caption: t5.exceeds(caption, MAX_TEXT_TOKENS))


def unsupported_reason(model: ModelDescription, shape: tuple[int, ...]) -> str | None:
    """Sides must be whole patches, and within the positions that the model has embeddings for."""
    multiple = image_common.pixels_per_latent(model) * _patch_size(model)
    if (reason := image_common.image_unsupported_reason(shape, multiple)) is not None:
        return reason
    max_side = _transformer_integer(model, "pos_embed_max_size", 96) * multiple
    if max(shape[1:]) > max_side:
        return f"it is {shape[2]}×{shape[1]}, and this model has positions for at most {max_side} pixels per side"
    return None


def token_count(model: ModelDescription, shape: tuple[int, ...]) -> int:
    """Latents have the shape CHW."""
    _, height, width = shape
    return (height // _patch_size(model)) * (width // _patch_size(model))


def _patch_size(model: ModelDescription) -> int:
    """Latents per token along each side."""
    return _transformer_integer(model, "patch_size", 2)


def _transformer_integer(model: ModelDescription, key: str, default: int) -> int:
    value = model.configs["transformer"].get(key, default)
    assert isinstance(value, int)
    return value


def denoise(
    model: ModelDescription, module: nn.Module, noisy: Tensor, sigmas: Tensor, text: Tensors, conditions: Tensors
) -> Tensor:
    """Calls the transformer as the pipeline does: unpacked latents, and sigmas times 1000."""
    predicted: Tensor = module(
        hidden_states=noisy,
        timestep=sigmas * 1000,
        encoder_hidden_states=text["embeds"],
        pooled_projections=text["pooled"],
        return_dict=False,
    )[0]
    return predicted


def tiny_sd35_pipeline(kind: Literal["medium", "large", "3"] = "medium") -> StableDiffusion3Pipeline:
    """`medium` has a second attention in its first block, `large` has none; `3` also lacks query and key norms."""
    tokenizers = tiny_pipelines.byte_tokenizer(), tiny_pipelines.byte_tokenizer(), tiny_pipelines.unigram_tokenizer()
    return StableDiffusion3Pipeline(
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        tokenizer_3=tokenizers[2],
        text_encoder=tiny_pipelines.clip_encoder(tokenizers[0], 8, 2, CLIPTextModelWithProjection),
        text_encoder_2=tiny_pipelines.clip_encoder(tokenizers[1], 16, 2, CLIPTextModelWithProjection),
        text_encoder_3=tiny_pipelines.t5_encoder(len(tokenizers[2]), 32),  # at least as wide as both CLIPs together
        vae=tiny_pipelines.tiny_image_vae(channels=16, scaling_factor=1.5305, shift_factor=0.0609),
        transformer=SD3Transformer2DModel(
            sample_size=8,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=8 + 16,
            pos_embed_max_size=16,
            dual_attention_layers=(0,) if kind == "medium" else (),
            qk_norm=None if kind == "3" else "rms_norm",
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


PIPELINE: Final = replace(image_common.IMAGE_PIPELINE, unsupported_reason=unsupported_reason)
_MLP: Final = ("net.0.proj", "net.2")
_OTHER_LINEAR: Final = ("context_embedder", "linear_1", "linear_2", "linear", "proj_out")
"""Embedders, the layers that modulate norms, and the last layer."""

FAMILY: Final = image_common.ImageFamily(
    name=NAME,
    modelspec_architecture="stable-diffusion-3.5",
    read_model=read_model,
    build_text_encoder=build_text_encoder,
    unsupported_reason=unsupported_reason,
    denoise=denoise,
    token_count=token_count,
    build_sampler=partial(build_sampler, options=PIPELINE),
    target_presets=target_presets(JOINT_ATTENTION, _MLP, _OTHER_LINEAR),
    write_tiny_pipeline=partial(tiny_pipelines.write_pipeline, tiny_sd35_pipeline),
    batched_guidance=True,
)

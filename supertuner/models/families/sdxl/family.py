"""Stable Diffusion XL: pictures from captions by a UNet that predicts noise, or velocity, at one of 1000 timesteps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.core.types import MediaKind
from supertuner.models import loading
from supertuner.models import pipeline_files as reading
from supertuner.models.adapters.targets import SELF_ATTENTION, target_presets
from supertuner.models.families import image_common as pictures
from supertuner.models.families.sdxl.encoders import build_text_encoder, pad_text
from supertuner.models.families.sdxl.sampler import COMPONENTS, build_sampler, unsupported_reason
from supertuner.models.families.sdxl.tiny import write_tiny_pipeline
from supertuner.models.library_logging import quiet_libraries
from supertuner.models.objective.diffusion import timestep_index
from supertuner.models.objective.snr import scheduler_alphas_cumprod
from supertuner.models.pipeline_files import ConfigDict
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource, PredictionType, Tensors

NAME: Final = "sdxl"
PREDICTION_TYPES: Final[dict[str, PredictionType]] = {"epsilon": "epsilon", "v_prediction": "v"}
"""A scheduler's `prediction_type` → our word for it."""


def read_model(source: ModelSource) -> ModelDescription:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_component_configs(source, index, COMPONENTS)
    prediction_type = str(configs["scheduler"].get("prediction_type", "epsilon"))
    if prediction_type not in PREDICTION_TYPES:
        raise ModelError(
            f"{source.path}: its scheduler says prediction_type {prediction_type!r}; trained are {', '.join(PREDICTION_TYPES)}"
        )
    return ModelDescription(
        source=source,
        title=f"Stable Diffusion XL, {'noise' if prediction_type == 'epsilon' else 'velocity'} is predicted",
        experts=(Expert("model", "unet"),),
        media_kinds=frozenset({MediaKind.IMAGE}),
        shift=1.0,
        configs=configs,
        micro_conditioning=True,
        prediction=PREDICTION_TYPES[prediction_type],
        alphas_cumprod=_alphas_cumprod(source, index, configs["scheduler"]),
    )


def _alphas_cumprod(source: ModelSource, index: ConfigDict, config: ConfigDict) -> tuple[float, ...]:
    """ᾱ of each timestep, as the pipeline's own scheduler computes it from its config."""
    name = str(index["scheduler"][1])
    scheduler_class: Any = getattr(diffusers, name, None)
    if scheduler_class is None:
        raise ModelError(f"{source.path}: its scheduler is a {name}, which the installed diffusers does not have")
    try:
        with quiet_libraries():
            table = scheduler_alphas_cumprod(scheduler_class.from_config(dict(config)))
    except ImportError as error:  # diffusers stands in for classes whose packages are not installed, and says which
        raise ModelError(f"{source.path}: its scheduler cannot be made: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(f"{source.path}: the config of its scheduler describes no {name}: {error}") from error
    if table is None:
        raise ModelError(f"{source.path}: its scheduler is a {name}: it adds noise in a way that is not trained here")
    return tuple(table.tolist())


def text_files(model: ModelDescription) -> Sequence[Path]:
    return reading.component_files(model.source, ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))


def denoise(
    model: ModelDescription,
    module: nn.Module,
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    text: Tensors,
    conditions: Tensors,
) -> torch.Tensor:
    """As the pipeline calls it. Without a framing, pictures are whole and as large as they were: so it samples."""
    assert model.alphas_cumprod is not None
    framing = conditions.get("framing")
    predicted: torch.Tensor = module(
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


def _full_image_time_ids(model: ModelDescription, noisy: torch.Tensor) -> torch.Tensor:
    height, width = (side * pictures.vae_scale_factor(model) for side in noisy.shape[-2:])
    return torch.tensor([[height, width, 0, 0, height, width]] * len(noisy), dtype=torch.float32, device=noisy.device)


def token_count(model: ModelDescription, shape: tuple[int, ...]) -> int:
    """Where attention begins: after the first halving. (The level above it has none.)"""
    _, height, width = shape
    return -(-height // 2) * -(-width // 2)


_MLP: Final = ("ff.net.0.proj", "ff.net.2")
_OTHER_LINEAR: Final = ("proj_in", "proj_out", "linear_1", "linear_2", "time_emb_proj")
_CONVOLUTIONS: Final = ("conv_in", "conv1", "conv2", "conv_shortcut", "conv", "conv_out")

FAMILY: Final = Family(
    name=NAME,
    prediction="epsilon",
    read_model=read_model,
    media_files=reading.vae_files,
    text_files=text_files,
    build_media_encoder=pictures.build_media_encoder,
    build_text_encoder=build_text_encoder,
    unsupported_reason=unsupported_reason,
    load_denoiser=loading.load_denoiser,
    denoise=denoise,
    pad_text=pad_text,
    token_count=token_count,
    build_sampler=build_sampler,
    target_presets={
        **target_presets(SELF_ATTENTION, _MLP, _OTHER_LINEAR),
        "all_layers": (*SELF_ATTENTION, *_MLP, *_OTHER_LINEAR, *_CONVOLUTIONS),
    },
    export_prefix={"unet": "unet"},
    write_tiny_pipeline=write_tiny_pipeline,
    batched_guidance=True,
)

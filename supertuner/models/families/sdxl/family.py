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
from supertuner.models import loading, reading
from supertuner.models.adapters.targets import SELF_ATTENTION, presets
from supertuner.models.families import image_common as pictures
from supertuner.models.families.sdxl.encoders import pad_text, text_encoder
from supertuner.models.families.sdxl.sampler import PARTS, sampler, why_not
from supertuner.models.families.sdxl.tiny import tiny
from supertuner.models.objective.diffusion import timestep_index
from supertuner.models.objective.snr import alphas_cumprod_of
from supertuner.models.quiet import quietly
from supertuner.models.reading import Config
from supertuner.models.spec import Expert, Family, Model, Prediction, Source, Tensors

NAME: Final = "sdxl"
PREDICTIONS: Final[dict[str, Prediction]] = {"epsilon": "epsilon", "v_prediction": "v"}
"""A scheduler's `prediction_type` → our word for it."""


def read(source: Source) -> Model:
    source, index = reading.read_index(source, NAME)
    configs = reading.read_parts(source, index, PARTS)
    kind = str(configs["scheduler"].get("prediction_type", "epsilon"))
    if kind not in PREDICTIONS:
        raise ModelError(
            f"{source.path}: its scheduler says prediction_type {kind!r}; trained are {', '.join(PREDICTIONS)}"
        )
    return Model(
        source=source,
        title=f"Stable Diffusion XL, {'noise' if kind == 'epsilon' else 'velocity'} is predicted",
        experts=(Expert("model", "unet"),),
        kinds=frozenset({MediaKind.IMAGE}),
        shift=1.0,
        configs=configs,
        told_framing=True,
        prediction=PREDICTIONS[kind],
        alphas_cumprod=_table(source, index, configs["scheduler"]),
    )


def _table(source: Source, index: Config, config: Config) -> tuple[float, ...]:
    """ᾱ of each timestep, as the pipeline's own scheduler computes it from its config."""
    name = str(index["scheduler"][1])
    found: Any = getattr(diffusers, name, None)
    if found is None:
        raise ModelError(f"{source.path}: its scheduler is a {name}, which the installed diffusers does not have")
    try:
        with quietly():
            table = alphas_cumprod_of(found.from_config(dict(config)))
    except ImportError as error:  # diffusers stands in for classes whose packages are not installed, and says which
        raise ModelError(f"{source.path}: its scheduler cannot be made: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(f"{source.path}: the config of its scheduler describes no {name}: {error}") from error
    if table is None:
        raise ModelError(f"{source.path}: its scheduler is a {name}: it adds noise in a way that is not trained here")
    return tuple(table.tolist())


def text_files(model: Model) -> Sequence[Path]:
    return reading.files_of(model.source, ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))


def denoise(
    model: Model, module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    """As the pipeline calls it. Without a framing, pictures are whole and as large as they were: so it samples."""
    assert model.alphas_cumprod is not None
    framing = conditions.get("framing")
    predicted: torch.Tensor = module(
        noisy,
        timestep_index(levels, len(model.alphas_cumprod)),
        encoder_hidden_states=text["embeds"],
        added_cond_kwargs={
            "text_embeds": text["pooled"],
            "time_ids": _whole(model, noisy) if framing is None else framing,
        },
        return_dict=False,
    )[0]
    return predicted


def _whole(model: Model, noisy: torch.Tensor) -> torch.Tensor:
    height, width = (side * pictures.scale(model) for side in noisy.shape[-2:])
    return torch.tensor([[height, width, 0, 0, height, width]] * len(noisy), dtype=torch.float32, device=noisy.device)


def tokens(model: Model, shape: tuple[int, ...]) -> int:
    """Where attention begins: after the first halving. (The level above it has none.)"""
    _, height, width = shape
    return -(-height // 2) * -(-width // 2)


_MLP: Final = ("ff.net.0.proj", "ff.net.2")
_REST: Final = ("proj_in", "proj_out", "linear_1", "linear_2", "time_emb_proj")
_CONVOLUTIONS: Final = ("conv_in", "conv1", "conv2", "conv_shortcut", "conv", "conv_out")

FAMILY: Final = Family(
    name=NAME,
    prediction="epsilon",
    read=read,
    media_files=reading.vae_files,
    text_files=text_files,
    media_encoder=pictures.media_encoder,
    text_encoder=text_encoder,
    why_not=why_not,
    denoiser=loading.denoiser,
    denoise=denoise,
    pad_text=pad_text,
    tokens=tokens,
    sampler=sampler,
    targets={
        **presets(SELF_ATTENTION, _MLP, _REST),
        "all_layers": (*SELF_ATTENTION, *_MLP, *_REST, *_CONVOLUTIONS),
    },
    export_prefix={"unet": "unet"},
    tiny=tiny,
    guides_together=True,
)

"""Modules to train, and batches that depend only on positions as in a run, for the tests of `step`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.micro_batches import micro_batches
from supertuner.data.ordering.sample_order import BucketGroup, SampleOrder
from supertuner.models.adapters.attach import attach
from supertuner.models.families.wan22 import family as wan22
from supertuner.models.objective.diffusion import TrainingObjective, sample_noise, sample_uniform
from supertuner.models.spec import Expert, ModelDescription, ModelSource
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision, PrecisionName
from supertuner.step.train_step import ExpertState, StepOptions, prepare_for_training

CPU = torch.device("cpu")
EXPERT = Expert("model", "transformer")
CHANNELS = 4


class TinyDenoiser(nn.Module):
    """A small denoiser for images of any size; each sample's output depends only on that sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(CHANNELS, 16)
        self.text_projection = nn.Linear(3, 16)
        self.outer = nn.Linear(16, CHANNELS)

    def forward(self, noisy: torch.Tensor, sigmas: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(noisy.movedim(1, -1))
        text_bias = self.text_projection(text) * sigmas[:, None]
        hidden = torch.tanh(hidden + text_bias[:, None, None])
        return self.outer(hidden).movedim(-1, 1)


def tiny_denoise(module: nn.Module, noisy: torch.Tensor, sigmas: torch.Tensor, text: Any, _: Any) -> torch.Tensor:
    prediction = module(noisy, sigmas, text["embeds"])
    assert isinstance(prediction, torch.Tensor)
    return prediction


def tiny_expert_state(
    precision: PrecisionName = "fp32", *, optimizer: str = "adamw", ema: float | None = None
) -> ExpertState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = TinyDenoiser()
    return build_expert_state(module, dict(module.named_parameters()), precision, optimizer=optimizer, ema=ema)


def build_expert_state(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    precision: PrecisionName = "fp32",
    *,
    optimizer: str = "adamw",
    ema: float | None = None,
) -> ExpertState:
    built = build_optimizer(OptimizerSettings.model_validate({"name": optimizer}), parameters, "model")
    average = None if ema is None else EmaWeights(parameters, ema)
    return ExpertState(EXPERT, module, parameters, built, average, ComputePrecision(precision, CPU).scaler())


def tiny_step_options(precision: PrecisionName = "fp32", max_grad_norm: float | None = None) -> StepOptions:
    return StepOptions(
        tiny_denoise, TrainingObjective(weighting="cosmap"), ComputePrecision(precision, CPU), max_grad_norm
    )


def wan_lora_state(
    source: ModelSource, precision: PrecisionName, *, checkpointing: bool = False, dropout: float = 0.0
) -> ExpertState:
    """The low-noise expert of a tiny Wan2.2 with a LoRA; lora_B is not zero, so that all parameters get gradients."""
    model = wan22.read_model(source)
    module = wan22.FAMILY.load_denoiser(model, model.experts[-1], ComputePrecision(precision, CPU).dtype)
    settings = AdapterSettings(rank=4, dropout=dropout)
    trainable = attach(module, settings, ("to_q", "to_k", "to_v", "to_out.0"), seed=1, name="low_noise")
    for place, parameter in enumerate(trainable.parameters.values()):
        parameter.data += 0.05 * sample_noise(7, place, parameter.shape)
    prepare_for_training(module, checkpointing)
    return build_expert_state(module, dict(trainable.parameters), precision)


def wan_step_options(source: ModelSource, precision: PrecisionName, max_grad_norm: float | None = None) -> StepOptions:
    model: ModelDescription = wan22.read_model(source)
    return StepOptions(
        partial(wan22.denoise, model), TrainingObjective(), ComputePrecision(precision, CPU), max_grad_norm
    )


def build_order(sizes: Sequence[int], batch_size: int, seed: int = 3) -> SampleOrder:
    """A sample order with one bucket per entry of `sizes`; bucket n has images of n + 2 rows."""
    groups = [
        BucketGroup(0, "set", Bucket(MediaKind.IMAGE, 2, rows + 2, 1, channels=3), np.arange(count, dtype=np.uint32))
        for rows, count in enumerate(sizes)
    ]
    return SampleOrder(groups, seed=seed, batch_size=batch_size)


def cut_window(order: SampleOrder, window: range, size: int) -> list[StepBatch]:
    """A window split into micro-batches of one bucket each, as the training loop splits it."""
    return [
        build_batch([int(position) for position in piece.draws.position], piece.bucket.shape[1])
        for piece in micro_batches(order, window, size)
    ]


def build_batch(positions: Sequence[int], rows: int) -> StepBatch:
    """A batch whose latents, noise, sigmas and text depend only on the positions."""
    shape = (CHANNELS, rows, 3)
    return StepBatch(
        latents=torch.stack([sample_noise(1, position, shape) for position in positions]),
        noise=torch.stack([sample_noise(2, position, shape) for position in positions]),
        sigmas=torch.tensor([sample_uniform(3, position) for position in positions]),
        text=MappingProxyType({"embeds": torch.stack([sample_noise(4, position, (3,)) for position in positions])}),
        conditions=MappingProxyType({}),
        positions=tuple(positions),
    )


def build_wan_batch(
    positions: Sequence[int], side: int, frames: int = 1, dtype: torch.dtype = torch.float32
) -> StepBatch:
    shape = (16, frames, side, side)
    return StepBatch(
        latents=torch.stack([sample_noise(1, position, shape) for position in positions]).to(dtype),
        noise=torch.stack([sample_noise(2, position, shape) for position in positions]),
        sigmas=torch.tensor([0.1 + 0.8 * sample_uniform(3, position) for position in positions]),
        text={"embeds": torch.stack([sample_noise(4, position, (8, 16)) for position in positions]).to(dtype)},
        conditions={},
        positions=tuple(positions),
    )


def grouped_by_shape(batches: Iterable[StepBatch]) -> list[StepBatch]:
    """The same samples in one batch per shape."""
    batches_by_shape: dict[tuple[int, ...], list[StepBatch]] = {}
    for batch in batches:
        batches_by_shape.setdefault(tuple(batch.latents.shape[1:]), []).append(batch)
    return [concatenate_batches(same_shape) for same_shape in batches_by_shape.values()]


def concatenate_batches(batches: Sequence[StepBatch]) -> StepBatch:
    return StepBatch(
        latents=torch.cat([batch.latents for batch in batches]),
        noise=torch.cat([batch.noise for batch in batches]),
        sigmas=torch.cat([batch.sigmas for batch in batches]),
        text={key: torch.cat([batch.text[key] for batch in batches]) for key in batches[0].text},
        conditions={},
        positions=tuple(position for batch in batches for position in batch.positions),
    )


def replace_with_fake_tensors(module: nn.Module, mode: FakeTensorMode) -> dict[str, nn.Parameter]:
    """Replace all tensors of a module by fake tensors; return the trained parameters by name."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                fake = mode.from_tensor(parameter.data)
                part._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = mode.from_tensor(buffer)
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class GradientEditingReduction:
    """The reduction of a single process; `edit` may change the parameters' gradients."""

    def __init__(self, edit: Callable[[Iterable[nn.Parameter]], None]) -> None:
        self.edit = edit
        self.last_flags: list[bool] = []

    def begin_backward(self, is_last: bool) -> None:
        self.last_flags.append(is_last)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        self.edit(parameters)
        return loss

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        return local_norm


class GradientRecordingReduction(GradientEditingReduction):
    """A reduction that keeps copies of the last window's gradients."""

    def __init__(self) -> None:
        super().__init__(self.record)
        self.gradients: list[torch.Tensor] = []
        self.calls = 0

    def record(self, parameters: Iterable[nn.Parameter]) -> None:
        self.gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        self.calls += 1

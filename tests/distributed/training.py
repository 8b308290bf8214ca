"""Windows as ranks train them: real modules, batches that are functions of positions, each rank its samples.

Everything here runs on a rank or in a single process; results are plain arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.data.ordering.micro_batches import micro_batches, shard_window
from supertuner.distributed.process_group import ProcessGroup
from supertuner.models.adapters.attach import attach
from supertuner.models.families.wan22 import family as wan22
from supertuner.models.objective.diffusion import TrainingObjective, sample_noise
from supertuner.models.spec import ModelSource
from supertuner.optim.optimizer_registry import ExpertOptimizer, build_optimizer
from supertuner.optim.schedule import BatchRamp, windows
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision, PrecisionName
from supertuner.step.train_step import (
    ExpertState,
    GradientReduction,
    StepOptions,
    WindowResult,
    prepare_for_training,
    train_window,
)
from tests.step.step_builders import (
    CPU,
    EXPERT,
    TinyDenoiser,
    build_batch,
    build_order,
    build_wan_batch,
    tiny_denoise,
    wan_step_options,
)

Array = NDArray[Any]


@dataclass(frozen=True)
class WindowRecord:
    """The results of a rank: figures of each window, its gradients as the optimizer got them, and final weights."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Array]]
    weights: dict[str, Array]
    positions: list[tuple[int, ...]]
    """Those of this rank, window by window."""
    scales: list[float]
    """fp16's, after each window; 1 where there is none."""


class RecordingReduction:
    """A reduction that copies the gradients after they are summed over all ranks."""

    def __init__(self, inner: GradientReduction | None) -> None:
        self.inner = inner
        self.gradients: list[list[torch.Tensor | None]] = []

    def begin_backward(self, is_last: bool) -> None:
        if self.inner is not None:
            self.inner.begin_backward(is_last)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        trained = list(parameters)
        total = loss if self.inner is None else self.inner.reduce_gradients(trained, loss)
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in trained])
        return total

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        return local_norm if self.inner is None else self.inner.global_norm(local_norm)


def wan(source: ModelSource, kind: str, seed: int) -> ExpertState:
    """The low-noise expert of a tiny Wan2.2, with an adapter without zeros, or with all weights trained."""
    model = wan22.read_model(source)
    module = wan22.FAMILY.load_denoiser(model, model.experts[-1], torch.float32)
    targets = ("to_q", "to_k", "to_v", "to_out.0")
    trained = attach(module, AdapterSettings(type=kind, rank=4), targets, seed=seed, name="low_noise")  # type: ignore[arg-type]
    for place, parameter in enumerate(trained.parameters.values()):
        parameter.data += 0.02 * sample_noise(seed, place, parameter.shape)
    prepare_for_training(module, False)
    parameters = dict(trained.parameters)
    return ExpertState(EXPERT, module, parameters, build_optimizer(OptimizerSettings(), parameters, "model"))


def wan_windows(
    parallel: ProcessGroup,
    source: ModelSource,
    kind: str,
    *,
    seed: int = 0,
    samples: Sequence[int] = (8,),
    batch_size: int = 1,
    rate: float = 0.0,
    clip: float | None = None,
) -> WindowRecord:
    """Windows of these sizes on a tiny Wan2.2. With learning rate 0 no weight changes: gradients are independent."""
    expert_state = wan(source, kind, seed)
    edges = np.cumsum([0, *samples]).tolist()
    spans = [range(1000 * seed + a, 1000 * seed + b) for a, b in pairwise(edges)]

    def cut(mine: range) -> list[StepBatch]:
        positions = list(mine)
        return [build_wan_batch(positions[n : n + batch_size], 4) for n in range(0, len(positions), batch_size)]

    options = wan_step_options(source, "fp32", clip)
    return trained(
        parallel,
        expert_state,
        [(span, cut(shard_window(span, parallel.rank, parallel.world_size))) for span in spans],
        options,
        rate,
    )


def little_windows(
    parallel: ProcessGroup,
    *,
    ramp: tuple[int, int, int] = (8, 8, 0),
    total: int = 64,
    sizes: Sequence[int] = (20,),
    batch_size: int = 2,
    seed: int = 0,
    optimizer: str = "adamw",
    double: bool = False,
    precision: PrecisionName = "fp32",
    rate: float = 0.0,
    loud: int | None = None,
) -> WindowRecord:
    """A run through a ramp over buckets of several sizes, on a small module; the gradient of sample `loud` overflows
    fp16."""
    order = build_order(sizes, batch_size, seed)
    expert_state = little64(seed, optimizer) if double else little32(seed, optimizer, precision)
    denoise = _doubled if double else tiny_denoise
    options = StepOptions(denoise, TrainingObjective(weighting="cosmap"), ComputePrecision(precision, CPU), None)

    def cut(mine: range) -> list[StepBatch]:
        pieces = micro_batches(order, mine, batch_size)
        return [build_batch(piece.draws.position.tolist(), piece.bucket.shape[1]) for piece in pieces]

    spans = [
        (span, cut(shard_window(span, parallel.rank, parallel.world_size))) for span in windows(total, BatchRamp(*ramp))
    ]
    for _, batches in spans:
        for batch in batches:
            if loud is not None and loud in batch.positions:
                batch.latents[batch.positions.index(loud)] *= 1000.0
    return trained(parallel, expert_state, spans, options, rate)


def trained(
    parallel: ProcessGroup,
    expert_state: ExpertState,
    spans: Iterable[tuple[range, list[StepBatch]]],
    options: StepOptions,
    rate: float,
) -> WindowRecord:
    watched = RecordingReduction(parallel.reduction)
    results: list[WindowResult] = []
    scales: list[float] = []
    for span, batches in spans:
        results.append(
            train_window(
                expert_state,
                batches,
                samples=len(span),
                learning_rate=rate,
                options=replace(options, reduction=watched),
                micro_batches=len(batches),
            )
        )
        scales.append(1.0 if expert_state.loss_scaler is None else expert_state.loss_scaler.scale)
    names = list(expert_state.parameters)
    return WindowRecord(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        [
            {name: one.numpy() for name, one in zip(names, window, strict=True) if one is not None}
            for window in watched.gradients
        ],
        {name: parameter.detach().numpy().copy() for name, parameter in expert_state.parameters.items()},
        [result.positions for result in results],
        scales,
    )


def _little(seed: int) -> TinyDenoiser:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyDenoiser()


def little32(seed: int, optimizer: str, precision: PrecisionName = "fp32") -> ExpertState:
    module = _little(seed)
    parameters = dict(module.named_parameters())
    made = build_optimizer(OptimizerSettings.model_validate({"name": optimizer}), parameters, "model", seed=seed)
    return ExpertState(EXPERT, module, parameters, made, None, ComputePrecision(precision, CPU).scaler())


def little64(seed: int, optimizer: str) -> ExpertState:
    """`little32` in fp64: differences from the order of sums are 10⁹ times smaller than fp32 resolves."""
    module = _little(seed)
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
    module.double()
    parameters = dict(module.named_parameters())
    inner = build_optimizer(OptimizerSettings.model_validate({"name": optimizer}), masters, "model", seed=seed)
    return ExpertState(EXPERT, module, parameters, RoundingOptimizer(inner, parameters))


class RoundingOptimizer(ExpertOptimizer):
    """Updates fp32 weights with gradients that were computed and summed in fp64, and are rounded here."""

    def __init__(self, inner: ExpertOptimizer, exact: Mapping[str, nn.Parameter]) -> None:
        super().__init__(inner.name, inner.torch_optimizer, exact, inner.base_learning_rate)
        self._rounded = inner.parameters

    @torch.no_grad()
    def step(self) -> None:
        for name, exact in self.parameters.items():
            self._rounded[name].grad = None if exact.grad is None else exact.grad.float()
        super().step()
        for name, exact in self.parameters.items():
            exact.copy_(self._rounded[name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for exact in self.parameters.values():
            exact.grad = None


def _doubled(module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Any, conditions: Any) -> torch.Tensor:
    text = {name: tensor.double() for name, tensor in text.items()}
    return tiny_denoise(module, noisy.double(), levels.double(), text, conditions)

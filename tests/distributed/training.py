"""Windows as ranks train them: real modules, batches that are functions of positions, each rank its share.

Everything here runs in a rank, or in one process that is alone; what is returned are plain arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.data.ordering.windows import micro_batches, share
from supertuner.distributed.process_group import Parallel
from supertuner.models.adapters.attach import attach
from supertuner.models.families.wan22 import family as wan22
from supertuner.models.objective.diffusion import Objective, sample_noise
from supertuner.models.spec import Source
from supertuner.optim.schedule import Ramp, windows
from supertuner.optim.table import Optimizer, build
from supertuner.step.batch import StepBatch
from supertuner.step.precision import Name, Precision
from supertuner.step.window import Reduction, Rules, Trainee, WindowResult, prepare, train_window
from tests.step.making import CPU, EXPERT, Little, an_order, batch_of, little_denoise, wan_batch, wan_rules

Array = NDArray[Any]


@dataclass(frozen=True)
class Made:
    """What a rank found: each window's figures and gradients as the optimizer saw them, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Array]]
    weights: dict[str, Array]
    positions: list[tuple[int, ...]]
    """Those of this rank, window by window."""
    scales: list[float]
    """fp16's, after each window; 1 where there is none."""


class Watched:
    """A reduction that keeps copies of the gradients as they are when all processes have added theirs."""

    def __init__(self, inner: Reduction | None) -> None:
        self.inner = inner
        self.gradients: list[list[torch.Tensor | None]] = []

    def begin(self, last: bool) -> None:
        if self.inner is not None:
            self.inner.begin(last)

    def add(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        trained = list(parameters)
        total = loss if self.inner is None else self.inner.add(trained, loss)
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in trained])
        return total

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        return norm if self.inner is None else self.inner.norm(norm)


def wan(source: Source, kind: str, seed: int) -> Trainee:
    """The low-noise expert of a tiny Wan2.2, with an adapter that is not zero anywhere, or all of its weights."""
    model = wan22.read(source)
    module = wan22.FAMILY.denoiser(model, model.experts[-1], torch.float32)
    targets = ("to_q", "to_k", "to_v", "to_out.0")
    trained = attach(module, AdapterSettings(type=kind, rank=4), targets, seed=seed, name="low_noise")  # type: ignore[arg-type]
    for place, parameter in enumerate(trained.parameters.values()):
        parameter.data += 0.02 * sample_noise(seed, place, parameter.shape)
    prepare(module, False)
    parameters = dict(trained.parameters)
    return Trainee(EXPERT, module, parameters, build(OptimizerSettings(), parameters, "model"))


def wan_windows(
    parallel: Parallel,
    source: Source,
    kind: str,
    *,
    seed: int = 0,
    samples: Sequence[int] = (8,),
    batch_size: int = 1,
    rate: float = 0.0,
    clip: float | None = None,
) -> Made:
    """Windows of so many samples on a tiny Wan2.2. With a rate of 0 no weight changes: each gradient is for itself."""
    trainee = wan(source, kind, seed)
    edges = np.cumsum([0, *samples]).tolist()
    spans = [range(1000 * seed + a, 1000 * seed + b) for a, b in pairwise(edges)]

    def cut(mine: range) -> list[StepBatch]:
        positions = list(mine)
        return [wan_batch(positions[n : n + batch_size], 4) for n in range(0, len(positions), batch_size)]

    rules = wan_rules(source, "fp32", clip)
    return trained(
        parallel, trainee, [(span, cut(share(span, parallel.rank, parallel.ranks))) for span in spans], rules, rate
    )


def little_windows(
    parallel: Parallel,
    *,
    ramp: tuple[int, int, int] = (8, 8, 0),
    total: int = 64,
    sizes: Sequence[int] = (20,),
    batch_size: int = 2,
    seed: int = 0,
    optimizer: str = "adamw",
    double: bool = False,
    precision: Name = "fp32",
    rate: float = 0.0,
    loud: int | None = None,
) -> Made:
    """A run through a ramp over buckets of several sizes, on a small module; `loud` is a sample whose gradient is too
    large for fp16."""
    order = an_order(sizes, batch_size, seed)
    trainee = little64(seed, optimizer) if double else little32(seed, optimizer, precision)
    denoise = _doubled if double else little_denoise
    rules = Rules(denoise, Objective(weighting="cosmap"), Precision(precision, CPU), None)

    def cut(mine: range) -> list[StepBatch]:
        pieces = micro_batches(order, mine, batch_size)
        return [batch_of(piece.draws.position.tolist(), piece.bucket.shape[1]) for piece in pieces]

    spans = [(span, cut(share(span, parallel.rank, parallel.ranks))) for span in windows(total, Ramp(*ramp))]
    for _, batches in spans:
        for batch in batches:
            if loud is not None and loud in batch.positions:
                batch.latents[batch.positions.index(loud)] *= 1000.0
    return trained(parallel, trainee, spans, rules, rate)


def trained(
    parallel: Parallel, trainee: Trainee, spans: Iterable[tuple[range, list[StepBatch]]], rules: Rules, rate: float
) -> Made:
    watched = Watched(parallel.reduction)
    results: list[WindowResult] = []
    scales: list[float] = []
    for span, batches in spans:
        results.append(
            train_window(
                trainee,
                batches,
                samples=len(span),
                rate=rate,
                rules=rules,
                reduction=watched,
                micro_batches=len(batches),
            )
        )
        scales.append(1.0 if trainee.scaler is None else trainee.scaler.scale)
    names = list(trainee.parameters)
    return Made(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        [
            {name: one.numpy() for name, one in zip(names, window, strict=True) if one is not None}
            for window in watched.gradients
        ],
        {name: parameter.detach().numpy().copy() for name, parameter in trainee.parameters.items()},
        [result.positions for result in results],
        scales,
    )


def _little(seed: int) -> Little:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Little()


def little32(seed: int, optimizer: str, precision: Name = "fp32") -> Trainee:
    module = _little(seed)
    parameters = dict(module.named_parameters())
    made = build(OptimizerSettings.model_validate({"name": optimizer}), parameters, "model", seed=seed)
    return Trainee(EXPERT, module, parameters, made, None, Precision(precision, CPU).scaler())


def little64(seed: int, optimizer: str) -> Trainee:
    """The same, computed in fp64: what depends on the order of sums is 10⁹ times smaller than fp32 can tell."""
    module = _little(seed)
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
    module.double()
    parameters = dict(module.named_parameters())
    inner = build(OptimizerSettings.model_validate({"name": optimizer}), masters, "model", seed=seed)
    return Trainee(EXPERT, module, parameters, Rounded(inner, parameters))


class Rounded(Optimizer):
    """Steps fp32 weights by gradients that were computed and added up in fp64, and are rounded here."""

    def __init__(self, inner: Optimizer, exact: Mapping[str, nn.Parameter]) -> None:
        super().__init__(inner.name, inner.inner, exact, inner.base_rate)
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


def _doubled(module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Any, told: Any) -> torch.Tensor:
    text = {name: tensor.double() for name, tensor in text.items()}
    return little_denoise(module, noisy.double(), levels.double(), text, told)

"""One optimizer step: a window of samples forward and backward, one clipping, one update of weights and averages.

The loss of a window is the sum of its samples' losses over the number of its samples, so its gradient is the exact
mean whatever micro-batches the samples came in. The host waits for the device once per window, in `fetch`, to learn
loss and gradient norm; a window that is not finite changes no weight, no average and no state of the optimizer. Given
a `fetch` of its own, the same function runs on fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import nn

from supertuner.core.errors import TrainError
from supertuner.models.objective.diffusion import Objective, add_noise, target
from supertuner.models.objective.loss_weighting import per_sample_loss, weight
from supertuner.models.spec import Expert, Tensors
from supertuner.optim.ema import Ema
from supertuner.optim.table import Optimizer
from supertuner.step.batch import StepBatch
from supertuner.step.precision import LossScaler, Precision

Denoise: TypeAlias = Callable[[nn.Module, torch.Tensor, torch.Tensor, Tensors, Tensors], torch.Tensor]
"""(module, noisy, levels, text, conditions) → prediction."""
Fetch: TypeAlias = Callable[[torch.Tensor], Sequence[float]]
"""Brings figures to the host: loss, gradient norm, then one loss per sample."""


@dataclass(frozen=True, eq=False, slots=True)
class Rules:
    """What is the same in every window of a run."""

    denoise: Denoise
    objective: Objective
    precision: Precision
    max_grad_norm: float | None = None
    placing_state: Callable[[], AbstractContextManager[None]] = nullcontext
    """What an optimizer keeps is made inside: it may live elsewhere than activations do."""


class Keeper(Protocol):
    """Who moves what is trained between memories, where a plan has it moved. It changes no value."""

    def settle(self) -> None:
        """All gradients of a window are made: from here on weights and gradients are where they are looked at."""

    def pieces(self) -> Iterator[Collection[str]]:
        """The parameters piece by piece; while one is stepped, it and the state of it are in place."""

    def finish(self) -> None:
        """The window is over, whether or not it changed a weight."""


class Reduction(Protocol):
    """How processes that train a window together add up what each of them has. All of them make the same calls."""

    def begin(self, last: bool) -> None:
        """A backward pass comes; `last`: no other one of this window follows it."""

    def add(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        """All gradients of a window are made: sum those of the parameters over all processes, in place, and the loss.
        A parameter that no process has a gradient for stays without."""

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, given that of those which are here: where processes share them out, these are
        only a part."""


@dataclass(eq=False, slots=True)
class Trainee:
    """An expert in training, with everything that a window changes."""

    expert: Expert
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """What is trained of the module, by name."""
    optimizer: Optimizer
    ema: Ema | None = None
    scaler: LossScaler | None = None
    untrained: Callable[[], AbstractContextManager[None]] | None = None
    """Inside, the module computes as it did before anything was trained; for samples that keep the prior."""
    keeper: Keeper | None = None
    """None: everything that is trained stays where it is."""


@dataclass(frozen=True, slots=True)
class WindowResult:
    """What became of a window."""

    loss: float
    """Mean over the window's samples, those of other processes included."""
    grad_norm: float
    """Of all gradients of the expert together, before clipping."""
    overflowed: bool = False
    """fp16: the loss was scaled up too far, and the scale is halved now. Nothing is wrong with data or weights."""
    positions: tuple[int, ...] = ()
    """The samples of the window that this process had, as far as the batches say which they are."""
    losses: tuple[float, ...] = ()
    """The loss of each sample."""

    @property
    def finite(self) -> bool:
        """Whether the window trained anything."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def guilty(self) -> bool:
        """Whether the loss of a sample of this process is no number."""
        return not all(map(math.isfinite, self.losses))

    @property
    def suspects(self) -> tuple[int, ...]:
        """Of a window that is not finite, the samples whose loss is not; if every loss is, all samples."""
        bad = [which for which, loss in zip(self.positions, self.losses, strict=False) if not math.isfinite(loss)]
        return tuple(bad) or self.positions


def train_window(
    trainee: Trainee,
    batches: Iterable[StepBatch],
    *,
    samples: int,
    rate: float,
    rules: Rules,
    reduction: Reduction | None = None,
    micro_batches: int | None = None,
    seed: int | None = None,
    fetch: Fetch | None = None,
) -> WindowResult:
    """Train one window of `samples` samples, of which `batches` are this process's share, at learning rate `rate`.

    `micro_batches` is how many batches there will be: a `reduction` is told which is the last.
    `seed` is for dropout: with it, the window draws what it draws whatever was drawn before.
    """
    scale = 1.0 if trainee.scaler is None else trainee.scaler.scale
    keeper = trainee.keeper
    with _seeded(seed, rules.precision.device):
        losses, positions = _backward(trainee, batches, samples, scale, rules, reduction, micro_batches)
    if keeper is not None:
        keeper.settle()
    loss = losses.sum() / samples
    if reduction is not None:
        loss = reduction.add(trainee.parameters.values(), loss)
    gradients = [p.grad for p in trainee.parameters.values() if p.grad is not None]
    norm = _unscaled_norm(gradients, scale, losses.device)
    if reduction is not None:
        norm = reduction.norm(norm)
    figures = (fetch or _to_host)(torch.cat([loss.reshape(1), norm.reshape(1), losses]))
    result = _judged(figures, positions, trainee.scaler)
    if result.finite:
        _clip(gradients, norm, rules.max_grad_norm)
        trainee.optimizer.set_rate(rate)
        with rules.placing_state():
            _update(trainee)
    if trainee.scaler is not None and (result.finite or result.overflowed):
        trainee.scaler.update(result.overflowed)
    trainee.optimizer.zero_grad(set_to_none=True)
    if keeper is not None:
        keeper.finish()
    return result


def held_out_loss(trainee: Trainee, batches: Iterable[StepBatch], rules: Rules) -> torch.Tensor:
    """The loss of each sample, nothing trained and nothing dropped out; the module is left as it was."""
    with torch.no_grad(), _evaluating(trainee.module):
        found = [sample_losses(trainee, batch, rules) for batch in batches]
    return torch.cat(found) if found else torch.zeros(0, device=rules.precision.device)


def sample_losses(trainee: Trainee, batch: StepBatch, rules: Rules) -> torch.Tensor:
    """One forward pass: the weighted mean error of each sample, in fp32."""
    noisy = add_noise(batch.latents, batch.noise, batch.levels, rules.objective)
    wanted = target(batch.latents, batch.noise, batch.levels, rules.objective)
    if "prior" in batch.counts:
        wanted = _kept(trainee, batch, noisy, wanted, rules)
    prediction = _predicted(trainee.module, batch, noisy, rules)
    weights = weight(batch.levels, rules.objective)
    if "weight" in batch.counts:
        weights = weights * batch.counts["weight"]
    return per_sample_loss(prediction, wanted, weights, rules.objective, batch.counts.get("mask"))


def _predicted(module: nn.Module, batch: StepBatch, noisy: torch.Tensor, rules: Rules) -> torch.Tensor:
    with rules.precision.autocast():
        return rules.denoise(module, noisy, batch.levels, dict(batch.text), dict(batch.conditions))


def _kept(trainee: Trainee, batch: StepBatch, noisy: torch.Tensor, wanted: torch.Tensor, rules: Rules) -> torch.Tensor:
    """What is wanted, and of samples that keep the prior what the untrained model says. A second forward pass, before
    the one that is differentiated: that one's weights must not change under it."""
    assert trainee.untrained is not None, "a batch keeps the prior, and nobody kept the untrained weights"
    with torch.no_grad(), trainee.untrained(), _evaluating(trainee.module):
        before = _predicted(trainee.module, batch, noisy, rules).float()
    keep = batch.counts["prior"].reshape(-1, *(1 for _ in wanted.shape[1:]))
    return torch.where(keep, before, wanted)


def prepare(module: nn.Module, checkpointing: bool) -> None:
    """Make a module ready to be trained: dropout at work, activations kept or recomputed in the backward pass."""
    module.train()
    if not checkpointing:
        return
    switch = getattr(module, "enable_gradient_checkpointing", None)
    if switch is None:
        raise TrainError(
            f"train.gradient_checkpointing is true, and {type(module).__name__} cannot recompute its activations; "
            "set it to false"
        )
    switch()


def evaluation_weights(trainee: Trainee) -> Tensors | None:
    """The weights to validate and export if they are not those in training: the moving average, where one is kept, or
    what a schedule-free optimizer means."""
    return trainee.optimizer.averaged() if trainee.ema is None else trainee.ema.averages


def _backward(
    trainee: Trainee,
    batches: Iterable[StepBatch],
    samples: int,
    scale: float,
    rules: Rules,
    reduction: Reduction | None,
    micro_batches: int | None,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Gradients of all micro-batches, added up in the parameters; the loss of every sample, and which they are."""
    found: list[torch.Tensor] = []
    positions: list[int] = []
    for number, batch in enumerate(batches, 1):
        if reduction is not None:
            reduction.begin(number == micro_batches)
        losses = sample_losses(trainee, batch, rules)
        torch.autograd.backward(losses.sum() * (0.0 if batch.idle else scale / samples))
        if not batch.idle:
            found.append(losses.detach())
            positions += batch.positions
    assert sum(map(len, found)) <= samples, f"a window of {samples} samples was given {sum(map(len, found))}"
    return torch.cat(found) if found else torch.zeros(0, device=rules.precision.device), tuple(positions)


def _update(trainee: Trainee) -> None:
    """One step of the optimizer, and the average after it."""
    for names in (trainee.parameters,) if trainee.keeper is None else trainee.keeper.pieces():
        trainee.optimizer.step()
        if trainee.ema is not None:
            trainee.ema.take_in(names)
    if trainee.ema is not None:
        trainee.ema.updates += 1


def _unscaled_norm(gradients: list[torch.Tensor], scale: float, device: torch.device) -> torch.Tensor:
    """Divide the gradients by the loss scale, in place; their norm. Scales are powers of two: dividing is exact."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = []
    for own in _by_device(gradients):
        if scale != 1.0:
            torch._foreach_mul_(own, 1.0 / scale)
        norms.append(torch.stack(torch._foreach_norm(own)).to(device))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms) if len(norms) > 1 else norms[0])
    return norm


def _clip(gradients: list[torch.Tensor], norm: torch.Tensor, largest: float | None) -> None:
    """Shorten the gradient to `largest` where it is longer: decided on the device, as a factor of at most one."""
    if largest is not None:
        for own in _by_device(gradients):
            torch._foreach_mul_(own, (largest / (norm + 1e-6)).clamp(max=1.0).to(own[0].device))


def _by_device(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """In lists that one operator takes: under a plan, gradients may be in two memories."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found.values()


def _to_host(figures: torch.Tensor) -> Sequence[float]:
    numbers: list[float] = figures.tolist()
    return numbers


def _judged(figures: Sequence[float], positions: tuple[int, ...], scaler: LossScaler | None) -> WindowResult:
    loss, norm, *losses = figures
    to_blame = scaler is not None and scaler.can_fall and math.isfinite(loss) and not math.isfinite(norm)
    return WindowResult(loss, norm, to_blame, positions, tuple(losses))


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers that depend on the seed alone; afterwards the generators are as they were."""
    if seed is None:
        yield
        return
    if device.type != "cpu":
        with torch.random.fork_rng([device], device_type=device.type):
            torch.manual_seed(seed)
            yield
        return
    own = torch.default_generator  # by hand: torch.manual_seed asks every kind of device first, at ten times the cost
    before = own.get_state()
    own.manual_seed(seed)
    try:
        yield
    finally:
        own.set_state(before)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True

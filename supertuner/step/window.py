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
from supertuner.models.objective.diffusion import TrainingObjective, add_noise, prediction_target
from supertuner.models.objective.loss_weighting import loss_weight, per_sample_loss
from supertuner.models.spec import Expert, Tensors
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import ExpertOptimizer
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision, LossScaler

DenoiseFunction: TypeAlias = Callable[[nn.Module, torch.Tensor, torch.Tensor, Tensors, Tensors], torch.Tensor]
"""(module, noisy, levels, text, conditions) → prediction."""
CopyToHost: TypeAlias = Callable[[torch.Tensor], Sequence[float]]
"""Brings figures to the host: loss, gradient norm, then one loss per sample."""


@dataclass(frozen=True, eq=False, slots=True)
class StepOptions:
    """What is the same in every window of a run."""

    denoise: DenoiseFunction
    objective: TrainingObjective
    precision: ComputePrecision
    max_grad_norm: float | None = None
    place_optimizer_state: Callable[[], AbstractContextManager[None]] = nullcontext
    """What an optimizer keeps is made inside: it may live elsewhere than activations do."""


class OptimizerOffload(Protocol):
    """Who moves what is trained between memories, where a plan has it moved. It changes no value."""

    def gradients_ready(self) -> None:
        """All gradients of a window are made: from here on weights and gradients are where they are looked at."""

    def resident_chunks(self) -> Iterator[Collection[str]]:
        """The parameters piece by piece; while one is stepped, it and the state of it are in place."""

    def end_window(self) -> None:
        """The window is over, whether or not it changed a weight."""


class GradientReduction(Protocol):
    """How processes that train a window together add up what each of them has. All of them make the same calls."""

    def begin_backward(self, is_last: bool) -> None:
        """A backward pass comes; `last`: no other one of this window follows it."""

    def all_reduce(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        """All gradients of a window are made: sum those of the parameters over all processes, in place, and the loss.
        A parameter that no process has a gradient for stays without."""

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, given that of those which are here: where processes share them out, these are
        only a part."""


@dataclass(eq=False, slots=True)
class ExpertState:
    """An expert in training, with everything that a window changes."""

    expert: Expert
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """What is trained of the module, by name."""
    optimizer: ExpertOptimizer
    ema: EmaWeights | None = None
    loss_scaler: LossScaler | None = None
    base_weights: Callable[[], AbstractContextManager[None]] | None = None
    """Inside, the module computes as it did before anything was trained; for samples that keep the prior."""
    optimizer_offload: OptimizerOffload | None = None
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
    def has_nonfinite_loss(self) -> bool:
        """Whether the loss of a sample of this process is no number."""
        return not all(map(math.isfinite, self.losses))

    @property
    def suspect_positions(self) -> tuple[int, ...]:
        """Of a window that is not finite, the samples whose loss is not; if every loss is, all samples."""
        bad = [which for which, loss in zip(self.positions, self.losses, strict=False) if not math.isfinite(loss)]
        return tuple(bad) or self.positions


def train_window(
    expert_state: ExpertState,
    batches: Iterable[StepBatch],
    *,
    samples: int,
    learning_rate: float,
    options: StepOptions,
    reduction: GradientReduction | None = None,
    micro_batches: int | None = None,
    seed: int | None = None,
    copy_to_host: CopyToHost | None = None,
) -> WindowResult:
    """Train one window of `samples` samples, of which `batches` are this process's share, at learning rate `rate`.

    `micro_batches` is how many batches there will be: a `reduction` is told which is the last.
    `seed` is for dropout: with it, the window draws what it draws whatever was drawn before.
    """
    scale = 1.0 if expert_state.loss_scaler is None else expert_state.loss_scaler.scale
    offload = expert_state.optimizer_offload
    with _seeded(seed, options.precision.device):
        losses, positions = _backward(expert_state, batches, samples, scale, options, reduction, micro_batches)
    if offload is not None:
        offload.gradients_ready()
    loss = losses.sum() / samples
    if reduction is not None:
        loss = reduction.all_reduce(expert_state.parameters.values(), loss)
    gradients = [p.grad for p in expert_state.parameters.values() if p.grad is not None]
    norm = _unscaled_norm(gradients, scale, losses.device)
    if reduction is not None:
        norm = reduction.global_norm(norm)
    figures = (copy_to_host or _to_host)(torch.cat([loss.reshape(1), norm.reshape(1), losses]))
    result = _window_result(figures, positions, expert_state.loss_scaler)
    if result.finite:
        _clip(gradients, norm, options.max_grad_norm)
        expert_state.optimizer.set_learning_rate(learning_rate)
        with options.place_optimizer_state():
            _update_weights(expert_state)
    if expert_state.loss_scaler is not None and (result.finite or result.overflowed):
        expert_state.loss_scaler.update(result.overflowed)
    expert_state.optimizer.zero_grad(set_to_none=True)
    if offload is not None:
        offload.end_window()
    return result


def held_out_losses(expert_state: ExpertState, batches: Iterable[StepBatch], options: StepOptions) -> torch.Tensor:
    """The loss of each sample, nothing trained and nothing dropped out; the module is left as it was."""
    with torch.no_grad(), _eval_mode(expert_state.module):
        losses = [sample_losses(expert_state, batch, options) for batch in batches]
    return torch.cat(losses) if losses else torch.zeros(0, device=options.precision.device)


def sample_losses(expert_state: ExpertState, batch: StepBatch, options: StepOptions) -> torch.Tensor:
    """One forward pass: the weighted mean error of each sample, in fp32."""
    noisy = add_noise(batch.latents, batch.noise, batch.sigmas, options.objective)
    targets = prediction_target(batch.latents, batch.noise, batch.sigmas, options.objective)
    if "prior" in batch.loss_inputs:
        targets = _with_prior_targets(expert_state, batch, noisy, targets, options)
    prediction = _predict(expert_state.module, batch, noisy, options)
    weights = loss_weight(batch.sigmas, options.objective)
    if "weight" in batch.loss_inputs:
        weights = weights * batch.loss_inputs["weight"]
    return per_sample_loss(prediction, targets, weights, options.objective, batch.loss_inputs.get("mask"))


def _predict(module: nn.Module, batch: StepBatch, noisy: torch.Tensor, options: StepOptions) -> torch.Tensor:
    with options.precision.autocast():
        return options.denoise(module, noisy, batch.sigmas, dict(batch.text), dict(batch.conditions))


def _with_prior_targets(
    expert_state: ExpertState, batch: StepBatch, noisy: torch.Tensor, targets: torch.Tensor, options: StepOptions
) -> torch.Tensor:
    """What is wanted, and of samples that keep the prior what the untrained model says. A second forward pass, before
    the one that is differentiated: that one's weights must not change under it."""
    assert expert_state.base_weights is not None, "a batch keeps the prior, and nobody kept the untrained weights"
    with torch.no_grad(), expert_state.base_weights(), _eval_mode(expert_state.module):
        base_prediction = _predict(expert_state.module, batch, noisy, options).float()
    keeps_prior = batch.loss_inputs["prior"].reshape(-1, *(1 for _ in targets.shape[1:]))
    return torch.where(keeps_prior, base_prediction, targets)


def prepare_for_training(module: nn.Module, checkpointing: bool) -> None:
    """Make a module ready to be trained: dropout at work, activations kept or recomputed in the backward pass."""
    module.train()
    if not checkpointing:
        return
    enable_checkpointing = getattr(module, "enable_gradient_checkpointing", None)
    if enable_checkpointing is None:
        raise TrainError(
            f"train.gradient_checkpointing is true, and {type(module).__name__} cannot recompute its activations; "
            "set it to false"
        )
    enable_checkpointing()


def evaluation_weights(expert_state: ExpertState) -> Tensors | None:
    """The weights to validate and export if they are not those in training: the moving average, where one is kept, or
    what a schedule-free optimizer means."""
    return expert_state.optimizer.averaged_weights() if expert_state.ema is None else expert_state.ema.averages


def _backward(
    expert_state: ExpertState,
    batches: Iterable[StepBatch],
    samples: int,
    scale: float,
    options: StepOptions,
    reduction: GradientReduction | None,
    micro_batches: int | None,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Gradients of all micro-batches, added up in the parameters; the loss of every sample, and which they are."""
    batch_losses: list[torch.Tensor] = []
    positions: list[int] = []
    for number, batch in enumerate(batches, 1):
        if reduction is not None:
            reduction.begin_backward(number == micro_batches)
        losses = sample_losses(expert_state, batch, options)
        torch.autograd.backward(losses.sum() * (0.0 if batch.idle else scale / samples))
        if not batch.idle:
            batch_losses.append(losses.detach())
            positions += batch.positions
    assert sum(map(len, batch_losses)) <= samples, (
        f"a window of {samples} samples was given {sum(map(len, batch_losses))}"
    )
    return torch.cat(batch_losses) if batch_losses else torch.zeros(0, device=options.precision.device), tuple(
        positions
    )


def _update_weights(expert_state: ExpertState) -> None:
    """One step of the optimizer, and the average after it."""
    for names in (
        (expert_state.parameters,)
        if expert_state.optimizer_offload is None
        else expert_state.optimizer_offload.resident_chunks()
    ):
        expert_state.optimizer.step()
        if expert_state.ema is not None:
            expert_state.ema.update_subset(names)
    if expert_state.ema is not None:
        expert_state.ema.updates += 1


def _unscaled_norm(gradients: list[torch.Tensor], scale: float, device: torch.device) -> torch.Tensor:
    """Divide the gradients by the loss scale, in place; their norm. Scales are powers of two: dividing is exact."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = []
    for same_device in _by_device(gradients):
        if scale != 1.0:
            torch._foreach_mul_(same_device, 1.0 / scale)
        norms.append(torch.stack(torch._foreach_norm(same_device)).to(device))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms) if len(norms) > 1 else norms[0])
    return norm


def _clip(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float | None) -> None:
    """Shorten the gradient to `largest` where it is longer: decided on the device, as a factor of at most one."""
    if max_norm is not None:
        for same_device in _by_device(gradients):
            torch._foreach_mul_(same_device, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(same_device[0].device))


def _by_device(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """In lists that one operator takes: under a plan, gradients may be in two memories."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups.values()


def _to_host(figures: torch.Tensor) -> Sequence[float]:
    numbers: list[float] = figures.tolist()
    return numbers


def _window_result(figures: Sequence[float], positions: tuple[int, ...], scaler: LossScaler | None) -> WindowResult:
    loss, norm, *losses = figures
    overflowed = scaler is not None and scaler.can_decrease and math.isfinite(loss) and not math.isfinite(norm)
    return WindowResult(loss, norm, overflowed, positions, tuple(losses))


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
    generator = (
        torch.default_generator
    )  # by hand: torch.manual_seed asks every kind of device first, at ten times the cost
    saved_state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(saved_state)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training_modules = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training_modules:
            part.training = True

"""One optimizer step: forward and backward over a window of samples, one gradient clipping, one update.

The loss of a window is the sum of its samples' losses divided by the number of its samples, so its gradient is the
exact mean however the samples are split into micro-batches. The host waits for the device once per window, in
`StepOptions.copy_to_host`, for loss and gradient norm. A window whose loss or norm is not finite changes no weight, no
average and no optimizer state. With another `copy_to_host` the same function runs on fake tensors.
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
from supertuner.core.waiting import waiting_for_other_ranks
from supertuner.models.objective.diffusion import TrainingObjective, add_noise, prediction_target
from supertuner.models.objective.loss_weighting import loss_weight, per_sample_loss
from supertuner.models.spec import Expert, Tensors
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import ExpertOptimizer
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision, LossScaler

DenoiseFunction: TypeAlias = Callable[[nn.Module, torch.Tensor, torch.Tensor, Tensors, Tensors], torch.Tensor]
"""(module, noisy latents, sigmas, text, conditions) → prediction."""
CopyToHost: TypeAlias = Callable[[torch.Tensor], Sequence[float]]
"""Copies the figures of a window to the host: loss, gradient norm, then one loss per sample."""


class OptimizerOffload(Protocol):
    """Moves trained parameters and their optimizer state between memories, as a plan says. Changes no value."""

    def gradients_ready(self) -> None:
        """Called after the last backward pass of a window. On return, weights and gradients can be read in place."""

    def resident_chunks(self) -> Iterator[Collection[str]]:
        """Yield the names of the parameters in chunks. Until the next one is requested, `optimizer.step()` updates only
        the yielded chunk, whose weights, gradients and state are on the device that updates them."""

    def end_window(self) -> None:
        """Called at the end of every window, also of one that changed no weight."""


class GradientReduction(Protocol):
    """Sums gradients and losses over the processes that train a window together. All processes make the same calls."""

    def begin_backward(self, is_last: bool) -> None:
        """Called before each backward pass; `is_last`: it is the last one of this window."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        """Called after the last backward pass: sum the parameters' gradients over all processes, in place, and return
        the sum of the losses. A parameter that has a gradient on no process stays without one."""

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients from the norm of this process's. They differ if gradients are sharded."""


def copy_to_host(figures: torch.Tensor) -> Sequence[float]:
    """The numbers on the host. Waits for the device."""
    # The device may still be in a collective, so this waits for the other ranks as well.
    with waiting_for_other_ranks("loss and gradient norm of the window"):
        numbers: list[float] = figures.tolist()
    return numbers


@dataclass(frozen=True, eq=False, slots=True)
class StepOptions:
    """What is the same in every window of a run."""

    denoise: DenoiseFunction
    objective: TrainingObjective
    precision: ComputePrecision
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    place_optimizer_state: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which the optimizer allocates its state, which may live in another memory than activations."""
    reduction: GradientReduction | None = None
    """How the processes of the run sum their gradients; None: there is one process."""
    copy_to_host: CopyToHost = copy_to_host
    """Brings the figures of a window to the host. A trace on fake tensors replaces it."""


@dataclass(eq=False, slots=True)
class ExpertState:
    """An expert in training: its module and everything that a window changes."""

    expert: Expert
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    """The trained parameters by name."""
    optimizer: ExpertOptimizer
    ema: EmaWeights | None = None
    loss_scaler: LossScaler | None = None
    base_weights: Callable[[], AbstractContextManager[None]] | None = None
    """A context in which the module computes like the untrained model; needed for prior preservation."""
    optimizer_offload: OptimizerOffload | None = None
    """None: trained parameters and optimizer state never move."""


@dataclass(frozen=True, slots=True)
class WindowResult:
    """The outcome of one window."""

    loss: float
    """Mean over the window's samples, including those of other processes."""
    grad_norm: float
    """Norm of all gradients of the expert together, before clipping."""
    overflowed: bool = False
    """fp16 only: the loss scale was too large and has been halved. Data and weights are not at fault."""
    positions: tuple[int, ...] = ()
    """Positions of the window's samples on this process, if the batches have them."""
    losses: tuple[float, ...] = ()
    """The loss of each of these samples."""

    @property
    def finite(self) -> bool:
        """Whether loss and norm are finite, and so the weights were updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def has_nonfinite_loss(self) -> bool:
        """Whether a sample of this process has a loss that is not finite."""
        return not all(map(math.isfinite, self.losses))

    @property
    def suspect_positions(self) -> tuple[int, ...]:
        """Samples that may be the cause of a window that is not finite: those with such a loss, or else all."""
        bad = [at for at, loss in zip(self.positions, self.losses, strict=False) if not math.isfinite(loss)]
        return tuple(bad) or self.positions


def train_window(
    expert_state: ExpertState,
    batches: Iterable[StepBatch],
    *,
    samples: int,
    learning_rate: float,
    options: StepOptions,
    micro_batches: int | None = None,
    seed: int | None = None,
) -> WindowResult:
    """Train one window of `samples` samples over all processes, of which `batches` are this process's share.

    `micro_batches` is the number of batches, so that the gradient reduction learns which backward pass is the last.
    `seed` seeds dropout: with it, what the window draws does not depend on what was drawn before.
    """
    scale = 1.0 if expert_state.loss_scaler is None else expert_state.loss_scaler.scale
    offload, reduction = expert_state.optimizer_offload, options.reduction
    with _seeded(seed, options.precision.device):
        losses, positions = _backward(expert_state, batches, samples, scale, options, micro_batches)
    if offload is not None:
        offload.gradients_ready()
    loss = losses.sum() / samples
    if reduction is not None:
        loss = reduction.reduce_gradients(expert_state.parameters.values(), loss)
    gradients = [p.grad for p in expert_state.parameters.values() if p.grad is not None]
    norm = _unscaled_norm(gradients, scale, losses.device)
    if reduction is not None:
        norm = reduction.global_norm(norm)
    figures = options.copy_to_host(torch.cat([loss.reshape(1), norm.reshape(1), losses]))
    result = _window_result(figures, positions, expert_state.loss_scaler)
    if result.finite:
        _clip(gradients, norm, options)
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
    """The loss of each sample without gradients and without dropout. The module's training mode is restored."""
    with torch.no_grad(), _eval_mode(expert_state.module):
        losses = [sample_losses(expert_state, batch, options) for batch in batches]
    return _concatenate(losses, options.precision.device)


def sample_losses(expert_state: ExpertState, batch: StepBatch, options: StepOptions) -> torch.Tensor:
    """The weighted mean loss of each sample from one forward pass, in fp32."""
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
    """`targets`, with the untrained model's prediction for samples whose `prior` flag is set.

    This second forward pass runs before the differentiated one, because it swaps the weights.
    """
    assert expert_state.base_weights is not None, "a batch has `prior`, but ExpertState.base_weights is not set"
    with torch.no_grad(), expert_state.base_weights(), _eval_mode(expert_state.module):
        base_prediction = _predict(expert_state.module, batch, noisy, options).float()
    keeps_prior = batch.loss_inputs["prior"].reshape(-1, *(1 for _ in targets.shape[1:]))
    return torch.where(keeps_prior, base_prediction, targets)


def prepare_for_training(module: nn.Module, checkpointing: bool) -> None:
    """Put the module into training mode and enable gradient checkpointing if asked for."""
    module.train()
    if not checkpointing:
        return
    enable_checkpointing = getattr(module, "enable_gradient_checkpointing", None)
    if enable_checkpointing is None:
        name = type(module).__name__
        raise TrainError(f"train.gradient_checkpointing is true, but {name} does not support it; set it to false")
    enable_checkpointing()


def evaluation_weights(expert_state: ExpertState) -> Tensors | None:
    """The weights to validate and export, if they differ from the trained parameters: the moving average if there is
    one, or the averaged weights of a schedule-free optimizer. None: use the trained parameters."""
    return expert_state.optimizer.averaged_weights() if expert_state.ema is None else expert_state.ema.averages


def _backward(
    expert_state: ExpertState,
    batches: Iterable[StepBatch],
    samples: int,
    scale: float,
    options: StepOptions,
    micro_batches: int | None,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Accumulate the gradients of all micro-batches; return every sample's loss, and the samples' positions."""
    batch_losses: list[torch.Tensor] = []
    positions: list[int] = []
    for number, batch in enumerate(batches, 1):
        if options.reduction is not None:
            options.reduction.begin_backward(number == micro_batches)
        losses = sample_losses(expert_state, batch, options)
        torch.autograd.backward(losses.sum() * (0.0 if batch.idle else scale / samples))
        if not batch.idle:
            batch_losses.append(losses.detach())
            positions += batch.positions
    received = sum(map(len, batch_losses))
    assert received <= samples, f"a window of {samples} samples received {received}"
    return _concatenate(batch_losses, options.precision.device), tuple(positions)


def _concatenate(losses: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(losses) if losses else torch.zeros(0, device=device)


def _update_weights(expert_state: ExpertState) -> None:
    """One optimizer step, then one update of the moving average."""
    offload = expert_state.optimizer_offload
    for names in (expert_state.parameters,) if offload is None else offload.resident_chunks():
        expert_state.optimizer.step()
        if expert_state.ema is not None:
            expert_state.ema.update_subset(names)
    if expert_state.ema is not None:
        expert_state.ema.updates += 1


def _unscaled_norm(gradients: list[torch.Tensor], scale: float, device: torch.device) -> torch.Tensor:
    """Divide the gradients by the loss scale, in place, and return their norm.

    Loss scales are powers of two, so the division is exact.
    """
    if not gradients:
        return torch.zeros((), device=device)
    norms = []
    for same_device in _by_device(gradients):
        if scale != 1.0:
            torch._foreach_mul_(same_device, 1.0 / scale)
        norms.append(torch.stack(torch._foreach_norm(same_device)).to(device))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms) if len(norms) > 1 else norms[0])
    return norm


def _clip(gradients: list[torch.Tensor], norm: torch.Tensor, options: StepOptions) -> None:
    """Scale the gradients down to `max_grad_norm` if their norm is larger, or limit each element to `max_grad_value`.

    The device decides; the host does not wait.
    """
    max_norm, max_value = options.max_grad_norm, options.max_grad_value
    if max_norm is None and max_value is None:
        return
    for same_device in _by_device(gradients):
        if max_norm is not None:
            torch._foreach_mul_(same_device, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(same_device[0].device))
        if max_value is not None:
            torch._foreach_clamp_min_(same_device, -max_value)
            torch._foreach_clamp_max_(same_device, max_value)


def _by_device(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """The tensors grouped by device, for foreach operators: under a plan, gradients may be in two memories."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups.values()


def _window_result(figures: Sequence[float], positions: tuple[int, ...], scaler: LossScaler | None) -> WindowResult:
    loss, norm, *losses = figures
    overflowed = scaler is not None and scaler.can_decrease and math.isfinite(loss) and not math.isfinite(norm)
    return WindowResult(loss, norm, overflowed, positions, tuple(losses))


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators inside the block and restore their state afterwards."""
    if seed is None:
        yield
        return
    if device.type != "cpu":
        with torch.random.fork_rng([device], device_type=device.type):
            torch.manual_seed(seed)
            yield
        return
    # Not by torch.manual_seed, which also seeds every other kind of device and costs ten times as much.
    generator = torch.default_generator
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

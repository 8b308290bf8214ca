"""The optimizers by name, behind one interface: named parameters, a learning rate, a step.

Settings override the defaults in the table below. Prodigy and Adafactor, as implemented by their packages, synchronize
with the device a few times per tensor and step; the other optimizers never do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from supertuner.config.settings.optim import DEFAULT_MAX_LR, DEFAULT_MIN_LR, OptimizerSettings
from supertuner.core.errors import TrainError
from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.packed_rates import LearningRateSpread, PackedRates
from supertuner.optim.automagic.parameter_batches import state_shapes
from supertuner.optim.automagic.rate_grid import LearningRateLimits
from supertuner.optim.lion import Lion

Shape: TypeAlias = tuple[int, ...]
TorchOptimizer: TypeAlias = "torch.optim.Optimizer"
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
SCHEDULE_FREE_BETA = 0.9
"""β₁ of AdamWScheduleFree: its package's default."""


@dataclass(frozen=True, eq=False, slots=True)
class OptimizerInputs:
    """The inputs from which an optimizer is built."""

    parameters: Mapping[str, nn.Parameter]
    learning_rate: float
    weight_decay: float
    settings: OptimizerSettings
    expert: str
    seed: int

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.parameters.values())

    def moments(self, beta1: float, beta2: float, epsilon: float | None = None) -> dict[str, Any]:
        """The arguments `betas` and `eps` of an optimizer with these defaults; no `eps` if it has none."""
        configured = self.settings
        betas = (
            beta1 if configured.beta1 is None else configured.beta1,
            beta2 if configured.beta2 is None else configured.beta2,
        )
        if epsilon is None:
            return {"betas": betas}
        return {"betas": betas, "eps": epsilon if configured.epsilon is None else configured.epsilon}

    @property
    def rates(self) -> dict[str, Any]:
        """The arguments `lr` and `weight_decay`."""
        return {"lr": self.learning_rate, "weight_decay": self.weight_decay}


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """One optimizer of the table."""

    build: Callable[[OptimizerInputs], TorchOptimizer]
    learning_rate: float
    """The default if the settings have none."""
    weight_decay: float
    """The default if the settings have none."""
    state_shapes: Callable[[nn.Parameter], dict[str, tuple[Shape, ...]]]
    """The state of a parameter that has had a gradient: entry → the shapes that the entry may have."""
    elementwise: bool = False
    """Whether the update of each weight depends only on its own gradients, so that a tensor can be updated in parts."""


class ExpertOptimizer:
    """One expert's optimizer over named parameters. The caller sets the learning rate before every step."""

    def __init__(
        self, name: str, torch_optimizer: TorchOptimizer, parameters: Mapping[str, nn.Parameter], learning_rate: float
    ) -> None:
        self.name = name
        self.torch_optimizer = torch_optimizer
        self.parameters = dict(parameters)
        self.base_learning_rate = learning_rate
        """The learning rate before the factor of the schedule."""

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.torch_optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def step(self) -> None:
        with self._compiler_stance():
            self.torch_optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.torch_optimizer.zero_grad(set_to_none=set_to_none)

    def learning_rate_spread(self) -> LearningRateSpread | None:
        """The distribution of Automagic's learning rates; None for other optimizers. Waits for the device."""
        return self.torch_optimizer.learning_rate_spread() if isinstance(self.torch_optimizer, Automagic) else None

    @torch.no_grad()
    def averaged_weights(self) -> dict[str, torch.Tensor] | None:
        """Copies of the weights to validate and to export; None if these are the trained parameters.

        The package's own `eval()` and `train()` convert the parameters in place, and the conversion back does not
        restore the same bits.
        """
        if self.name != "schedule_free":
            return None
        states = {name: self.torch_optimizer.state.get(p, {}) for name, p in self.parameters.items()}
        return {name: schedule_free_average(p.detach(), states[name].get("z")) for name, p in self.parameters.items()}

    def _compiler_stance(self) -> AbstractContextManager[Any]:
        """Switches off torch.compile for torchao on a CPU: compiling its step would take half a minute and a C++
        compiler, and gain nothing."""
        if self.name == "adamw8bit" and all(p.device.type == "cpu" for p in self.parameters.values()):
            return cast("AbstractContextManager[Any]", torch.compiler.set_stance("force_eager"))
        return nullcontext()


def schedule_free_average(parameter: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
    """A copy of the weight to evaluate. Schedule-free (Defazio et al., arXiv 2405.15682) trains y and stores z; the
    weight to evaluate is the average x = y + (1 - 1/β₁)(z - y). Before the first step there is no z."""
    return parameter.clone() if z is None else parameter.lerp(z.to(parameter.device), 1 - 1 / SCHEDULE_FREE_BETA)


def build_optimizer(
    settings: OptimizerSettings, parameters: Mapping[str, nn.Parameter], expert: str, *, seed: int = 0
) -> ExpertOptimizer:
    """The optimizer that the settings name, for the parameters of one expert. `seed` determines its random numbers."""
    spec = OPTIMIZERS[settings.name]
    if not parameters:
        raise TrainError(f"expert {expert} has no trainable parameters; check adapter.targets")
    learning_rate = learning_rate_for(settings, expert)
    weight_decay = spec.weight_decay if settings.weight_decay is None else settings.weight_decay
    inputs = OptimizerInputs(parameters, learning_rate, weight_decay, settings, expert, seed)
    return ExpertOptimizer(settings.name, spec.build(inputs), parameters, learning_rate)


def learning_rate_for(settings: OptimizerSettings, expert: str) -> float:
    """The learning rate of an expert: its own setting, else the shared setting, else the optimizer's default."""
    if settings.name == "automagic":
        return automagic_limits(settings, expert).start
    configured = _configured_learning_rate(settings, expert)
    return OPTIMIZERS[settings.name].learning_rate if configured is None else configured


def automagic_limits(settings: OptimizerSettings, expert: str) -> LearningRateLimits:
    """Start, bump and limits of an expert's learning rates under Automagic.

    Each value is the expert's own setting, else the shared setting, else the default. A default start or bump is
    adapted to the limits; a configured one that conflicts with them raises TrainError.
    """
    lowest_text, lowest = _expert_setting(settings, expert, "min_lr", DEFAULT_LIMITS.lowest)
    highest_text, highest = _expert_setting(settings, expert, "max_lr", DEFAULT_LIMITS.highest)
    if highest < lowest:
        raise TrainError(f"{highest_text} is below {lowest_text}; Automagic's rates move between the two: set both")
    default_bump = min(DEFAULT_LIMITS.bump, (highest - lowest) or DEFAULT_LIMITS.bump)
    bump_text, bump = _expert_setting(settings, expert, "lr_bump", default_bump)
    if bump > highest - lowest > 0:
        raise TrainError(
            f"{bump_text} is larger than the range from {lowest_text} to {highest_text}, so that Automagic's learning "
            "rates would jump between the limits; set a smaller bump"
        )
    configured = _configured_learning_rate(settings, expert)
    start = min(max(DEFAULT_LIMITS.start, lowest), highest) if configured is None else configured
    if not lowest <= start <= highest:
        raise TrainError(
            f"optimizer.{'learning_rate' if start == settings.learning_rate else f'{expert}_lr'} {start:g}, where "
            f"Automagic's learning rates start, is not between {lowest_text} and {highest_text}; remove it or "
            "widen the limits"
        )
    return LearningRateLimits(start=start, bump=bump, lowest=lowest, highest=highest)


def _expert_setting(settings: OptimizerSettings, expert: str, name: str, default: float) -> tuple[str, float]:
    """A setting as text for messages and as a number: the expert's own, else the shared one, else the default."""
    for key in (f"{expert}_{name}", name):
        if (value := getattr(settings, key, None)) is not None:
            return f"optimizer.{key} {value:g}", value
    return f"{name} {default:g} (unset)", default


def _configured_learning_rate(settings: OptimizerSettings, expert: str) -> float | None:
    expert_value: float | None = getattr(settings, f"{expert}_lr", None)
    return settings.learning_rate if expert_value is None else expert_value


def _adamw(inputs: OptimizerInputs) -> TorchOptimizer:
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in inputs.weights)
    moments = inputs.moments(0.9, 0.999, 1e-8)
    return torch.optim.AdamW(inputs.weights, **inputs.rates, **moments, fused=fused, foreach=not fused)


def _adamw8bit(inputs: OptimizerInputs) -> TorchOptimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise TrainError(f'optimizer.name "adamw8bit" needs torchao ({error}); install it, or use "adamw"') from error
    optimizer: TorchOptimizer = AdamW8bit(inputs.weights, **inputs.rates, **inputs.moments(0.9, 0.999, 1e-8))
    return optimizer


def _adafactor(inputs: OptimizerInputs) -> TorchOptimizer:
    # Without foreach, which would need more memory; saving memory is the point of Adafactor.
    return torch.optim.Adafactor(inputs.weights, **inputs.rates)


def _prodigy(inputs: OptimizerInputs) -> TorchOptimizer:
    from prodigyopt import Prodigy

    optimizer: TorchOptimizer = Prodigy(inputs.weights, lr=inputs.learning_rate, **inputs.moments(0.9, 0.999, 1e-8))
    for group in optimizer.param_groups:
        group["weight_decay"] = inputs.weight_decay  # not as an argument: the constructor prints a message then
    return optimizer


def _schedule_free(inputs: OptimizerInputs) -> TorchOptimizer:
    from schedulefree import AdamWScheduleFree

    moments = inputs.moments(SCHEDULE_FREE_BETA, 0.999, 1e-8)
    moments["betas"] = (SCHEDULE_FREE_BETA, moments["betas"][1])  # `schedule_free_average` needs the first
    schedule_free = AdamWScheduleFree(inputs.weights, **inputs.rates, **moments)
    schedule_free.train()
    optimizer: TorchOptimizer = schedule_free
    return optimizer


def _lion(inputs: OptimizerInputs) -> TorchOptimizer:
    return Lion(inputs.weights, **inputs.rates, **inputs.moments(0.9, 0.99))


def _automagic(inputs: OptimizerInputs) -> TorchOptimizer:
    # The names seed the random numbers: with the expert in them, experts draw different ones.
    names = {f"{inputs.expert}/{name}": p for name, p in inputs.parameters.items()}
    limits = automagic_limits(inputs.settings, inputs.expert)
    return Automagic(names, limits, weight_decay=inputs.weight_decay, seed=inputs.seed)


def _adam_shapes(p: nn.Parameter) -> dict[str, tuple[Shape, ...]]:
    return {"step": ((),), "exp_avg": (tuple(p.shape),), "exp_avg_sq": (tuple(p.shape),)}


def _adafactor_shapes(p: nn.Parameter) -> dict[str, tuple[Shape, ...]]:
    if p.dim() < 2:
        return {"step": ((),), "variance": (tuple(p.shape),)}
    rows, columns = (*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])
    return {"step": ((),), "row_var": (rows,), "col_var": (columns,)}


def _prodigy_shapes(p: nn.Parameter) -> dict[str, tuple[Shape, ...]]:
    flat = (p.numel(),)
    # p0, the initial weights, is stored as a single zero if they are all zero.
    return {**_adam_shapes(p), "s": (flat,), "p0": (flat, ())}


def _schedule_free_shapes(p: nn.Parameter) -> dict[str, tuple[Shape, ...]]:
    return {"z": (tuple(p.shape),), "exp_avg_sq": (tuple(p.shape),)}


def _lion_shapes(p: nn.Parameter) -> dict[str, tuple[Shape, ...]]:
    return {"exp_avg": (tuple(p.shape),)}


def _automagic_shapes(p: nn.Parameter) -> dict[str, tuple[Shape, ...]]:
    return {key: ((length,),) for key, (length, _) in state_shapes(p.shape, PackedRates(DEFAULT_LIMITS)).items()}


DEFAULT_LIMITS = LearningRateLimits(start=1e-6, bump=1e-6, lowest=DEFAULT_MIN_LR, highest=DEFAULT_MAX_LR)
"""Automagic's defaults."""
OPTIMIZERS = {
    "adamw": OptimizerSpec(_adamw, 1e-4, 1e-2, _adam_shapes, elementwise=True),
    "adamw8bit": OptimizerSpec(_adamw8bit, 1e-4, 1e-2, _adam_shapes),
    # Adafactor's learning rate is relative to the magnitude of the weights (arXiv 1804.04235, section 8).
    "adafactor": OptimizerSpec(_adafactor, 1e-2, 0.0, _adafactor_shapes),
    # Prodigy estimates the learning rate; the setting is a factor on its estimate.
    "prodigy": OptimizerSpec(_prodigy, 1.0, 0.0, _prodigy_shapes),
    "schedule_free": OptimizerSpec(_schedule_free, 5e-4, 0.0, _schedule_free_shapes, elementwise=True),
    # Lion's updates all have the size of the learning rate: it needs a third to a tenth of AdamW's (arXiv 2302.06675).
    "lion": OptimizerSpec(_lion, 3e-5, 1e-2, _lion_shapes, elementwise=True),
    # The setting is the initial learning rate of every weight.
    "automagic": OptimizerSpec(_automagic, DEFAULT_LIMITS.start, 0.0, _automagic_shapes),
}

"""The optimizers by name, and what each of them is to the rest of the program: named weights, a rate, a step.

Settings win over what an optimizer would choose itself; what neither says comes from the table below. Prodigy and
Adafactor, as their packages write them, ask the device for a few numbers per tensor and step; the others never wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from supertuner.config.settings.optim import DEFAULT_MAX_LR, DEFAULT_MIN_LR, OptimizerSettings
from supertuner.core.errors import TrainError
from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.packed_rates import LearningRateLimits, LearningRateSpread, PackedRates
from supertuner.optim.automagic.parameter_batches import state_shapes

Shape: TypeAlias = tuple[int, ...]
TorchOptimizer: TypeAlias = "torch.optim.Optimizer"
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, eq=False, slots=True)
class OptimizerInputs:
    """What an optimizer is made from."""

    parameters: Mapping[str, nn.Parameter]
    learning_rate: float
    weight_decay: float
    settings: OptimizerSettings
    expert: str
    seed: int

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.parameters.values())


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """One optimizer of the table."""

    build: Callable[[OptimizerInputs], TorchOptimizer]
    learning_rate: float
    """Where the settings give none."""
    weight_decay: float
    """Where the settings give none."""
    state_shapes: Callable[[nn.Parameter], dict[str, tuple[Shape, ...]]]
    """What it remembers of a parameter once that had a gradient, and which shapes each entry may have."""
    elementwise: bool = False
    """Whether a weight's step depends on its own gradients only: then parts of a tensor are stepped like the whole."""


class ExpertOptimizer:
    """One expert's optimizer. Its parameters have names, and it is told its rate before every step."""

    def __init__(
        self, name: str, torch_optimizer: TorchOptimizer, parameters: Mapping[str, nn.Parameter], learning_rate: float
    ) -> None:
        self.name = name
        self.torch_optimizer = torch_optimizer
        self.parameters = dict(parameters)
        self.base_learning_rate = learning_rate
        """The learning rate that a schedule's factor is applied to."""

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
        """How the rates of single weights are spread, where weights have rates of their own. Waits for the device."""
        return self.torch_optimizer.learning_rate_spread() if isinstance(self.torch_optimizer, Automagic) else None

    @torch.no_grad()
    def averaged_weights(self) -> dict[str, torch.Tensor] | None:
        """Copies of the weights to validate and to export, where those are not the ones that are trained.

        Schedule-free trains y and means x; with z, x = y + (1 - 1/β₁)(z - y). Its own way, to swap x in and y back,
        does not give the same bits back.
        """
        if self.name != "schedule_free":
            return None
        beta = self.torch_optimizer.param_groups[0]["betas"][0]
        states = {name: self.torch_optimizer.state.get(p, {}) for name, p in self.parameters.items()}
        return {
            name: p.lerp(states[name]["z"].to(p.device), 1 - 1 / beta) if "z" in states[name] else p.detach().clone()
            for name, p in self.parameters.items()
        }

    def _compiler_stance(self) -> AbstractContextManager[Any]:
        """torchao compiles its step. On a CPU that takes half a minute and a C++ compiler, and gains nothing."""
        if self.name == "adamw8bit" and all(p.device.type == "cpu" for p in self.parameters.values()):
            stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return stance
        return nullcontext()


def build_optimizer(
    settings: OptimizerSettings, parameters: Mapping[str, nn.Parameter], expert: str, *, seed: int = 0
) -> ExpertOptimizer:
    """The optimizer that the settings name, for the parameters of one expert; what it draws by chance is the seed's."""
    spec = optimizer_spec(settings)
    if not parameters:
        raise TrainError(f"expert {expert} has nothing to train: no parameter is left; see adapter.targets")
    learning_rate = learning_rate_for(settings, expert)
    weight_decay = spec.weight_decay if settings.weight_decay is None else settings.weight_decay
    inputs = OptimizerInputs(parameters, learning_rate, weight_decay, settings, expert, seed)
    return ExpertOptimizer(settings.name, spec.build(inputs), parameters, learning_rate)


def optimizer_spec(settings: OptimizerSettings) -> OptimizerSpec:
    """The entry of the table that the settings name."""
    return OPTIMIZERS[settings.name]


def learning_rate_for(settings: OptimizerSettings, expert: str) -> float:
    """Learning rate of an expert: its own, else that of all, else the table's."""
    if settings.name == "automagic":
        return automagic_limits(settings, expert).start
    configured = _configured_learning_rate(settings, expert)
    return OPTIMIZERS[settings.name].learning_rate if configured is None else configured


def automagic_limits(settings: OptimizerSettings, expert: str) -> LearningRateLimits:
    """Between what an expert's rates move under Automagic, and how far in a step: its own settings, else those of all,
    else the usual ones. A start or a bump that nobody chose gives way to the limits."""
    bumps = (settings.lr_bump, settings.high_noise_lr_bump, settings.low_noise_lr_bump)
    lows = (settings.min_lr, settings.high_noise_min_lr, settings.low_noise_min_lr)
    highs = (settings.max_lr, settings.high_noise_max_lr, settings.low_noise_max_lr)
    lowest_text, lowest = _resolve_expert_setting("min_lr", expert, lows, DEFAULT_LIMITS.lowest)
    highest_text, highest = _resolve_expert_setting("max_lr", expert, highs, DEFAULT_LIMITS.highest)
    if highest < lowest:
        raise TrainError(f"{highest_text} is below {lowest_text}: Automagic's rates move between them; set both")
    bump_text, bump = _resolve_expert_setting(
        "lr_bump", expert, bumps, min(DEFAULT_LIMITS.bump, (highest - lowest) or DEFAULT_LIMITS.bump)
    )
    if bump > highest - lowest > 0:
        raise TrainError(
            f"{bump_text} is more than lies between {lowest_text} and {highest_text}: Automagic's rates would jump from one "
            "to the other; set a smaller one"
        )
    configured = _configured_learning_rate(settings, expert)
    start = min(max(DEFAULT_LIMITS.start, lowest), highest) if configured is None else configured
    if not lowest <= start <= highest:
        raise TrainError(
            f"optimizer.{'learning_rate' if start == settings.learning_rate else f'{expert}_lr'} {start:g}, where "
            f"Automagic's rates start, is not between {lowest_text} and {highest_text}; leave it out, or widen the limits"
        )
    return LearningRateLimits(start=start, bump=bump, lowest=lowest, highest=highest)


def _resolve_expert_setting(
    name: str, expert: str, configured: tuple[float | None, ...], default: float
) -> tuple[str, float]:
    """A setting of an expert, in words and as a number: its own, else that of all, else the usual one. `given`: that of
    all, of the high-noise and of the low-noise expert."""
    shared, high, low = configured
    expert_value = {"high_noise": high, "low_noise": low}.get(expert)
    if expert_value is not None:
        return f"optimizer.{expert}_{name} {expert_value:g}", expert_value
    return (f"{name} {default:g} (unset)", default) if shared is None else (f"optimizer.{name} {shared:g}", shared)


def _configured_learning_rate(settings: OptimizerSettings, expert: str) -> float | None:
    expert_value = {"high_noise": settings.high_noise_lr, "low_noise": settings.low_noise_lr}.get(expert)
    return settings.learning_rate if expert_value is None else expert_value


def _adamw(inputs: OptimizerInputs) -> TorchOptimizer:
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in inputs.weights)
    return torch.optim.AdamW(
        inputs.weights, lr=inputs.learning_rate, weight_decay=inputs.weight_decay, fused=fused, foreach=not fused
    )


def _adamw8bit(inputs: OptimizerInputs) -> TorchOptimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise TrainError(f'optimizer.name "adamw8bit" needs torchao ({error}); install it, or use "adamw"') from error
    optimizer: TorchOptimizer = AdamW8bit(inputs.weights, lr=inputs.learning_rate, weight_decay=inputs.weight_decay)
    return optimizer


def _adafactor(inputs: OptimizerInputs) -> TorchOptimizer:
    # One by one: little memory is its point.
    return torch.optim.Adafactor(inputs.weights, lr=inputs.learning_rate, weight_decay=inputs.weight_decay)


def _prodigy(inputs: OptimizerInputs) -> TorchOptimizer:
    from prodigyopt import Prodigy

    optimizer: TorchOptimizer = Prodigy(inputs.weights, lr=inputs.learning_rate)
    for group in optimizer.param_groups:
        group["weight_decay"] = inputs.weight_decay  # given to the constructor, it would be announced on the screen
    return optimizer


def _schedule_free(inputs: OptimizerInputs) -> TorchOptimizer:
    from schedulefree import AdamWScheduleFree

    schedule_free = AdamWScheduleFree(inputs.weights, lr=inputs.learning_rate, weight_decay=inputs.weight_decay)
    schedule_free.train()
    optimizer: TorchOptimizer = schedule_free
    return optimizer


def _automagic(inputs: OptimizerInputs) -> TorchOptimizer:
    names = {f"{inputs.expert}/{name}": p for name, p in inputs.parameters.items()}  # each expert draws for itself
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
    # The starting point of weights that start at zero is kept as one zero.
    return {**_adam_shapes(p), "s": (flat,), "p0": (flat, ())}


def _schedule_free_shapes(p: nn.Parameter) -> dict[str, tuple[Shape, ...]]:
    return {"z": (tuple(p.shape),), "exp_avg_sq": (tuple(p.shape),)}


def _automagic_shapes(p: nn.Parameter) -> dict[str, tuple[Shape, ...]]:
    return {key: ((length,),) for key, (length, _) in state_shapes(p.shape, PackedRates(DEFAULT_LIMITS)).items()}


DEFAULT_LIMITS = LearningRateLimits(start=1e-6, bump=1e-6, lowest=DEFAULT_MIN_LR, highest=DEFAULT_MAX_LR)
"""Automagic's own settings where nothing else is said."""
OPTIMIZERS = {
    "adamw": OptimizerSpec(_adamw, 1e-4, 1e-2, _adam_shapes, elementwise=True),
    "adamw8bit": OptimizerSpec(_adamw8bit, 1e-4, 1e-2, _adam_shapes),
    # The rate of Adafactor is relative to the size of the weights, as in its paper.
    "adafactor": OptimizerSpec(_adafactor, 1e-2, 0.0, _adafactor_shapes),
    # Prodigy estimates the rate; what is given is a factor on it.
    "prodigy": OptimizerSpec(_prodigy, 1.0, 0.0, _prodigy_shapes),
    "schedule_free": OptimizerSpec(_schedule_free, 5e-4, 0.0, _schedule_free_shapes, elementwise=True),
    # The rate is where the rates of all weights start from.
    "automagic": OptimizerSpec(_automagic, DEFAULT_LIMITS.start, 0.0, _automagic_shapes),
}

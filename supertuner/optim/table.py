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

from supertuner.config.settings.optim import USUAL_MAX_LR, USUAL_MIN_LR, OptimizerSettings
from supertuner.core.errors import TrainError
from supertuner.optim.automagic.batched import state_shapes
from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.packed_rates import Limits, PackedRates, Spread

Shape: TypeAlias = tuple[int, ...]
Made: TypeAlias = "torch.optim.Optimizer"
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, eq=False, slots=True)
class Order:
    """What an optimizer is made from."""

    parameters: Mapping[str, nn.Parameter]
    rate: float
    decay: float
    settings: OptimizerSettings
    expert: str
    seed: int

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.parameters.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One optimizer of the table."""

    make: Callable[[Order], Made]
    learning_rate: float
    """Where the settings give none."""
    weight_decay: float
    """Where the settings give none."""
    state_shapes: Callable[[nn.Parameter], dict[str, tuple[Shape, ...]]]
    """What it remembers of a parameter once that had a gradient, and which shapes each entry may have."""
    each_weight_alone: bool = False
    """Whether a weight's step depends on its own gradients only: then parts of a tensor are stepped like the whole."""


class Optimizer:
    """One expert's optimizer. Its parameters have names, and it is told its rate before every step."""

    def __init__(self, name: str, inner: Made, parameters: Mapping[str, nn.Parameter], rate: float) -> None:
        self.name = name
        self.inner = inner
        self.parameters = dict(parameters)
        self.base_rate = rate
        """The learning rate that a schedule's factor is applied to."""

    def set_rate(self, rate: float) -> None:
        for group in self.inner.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def step(self) -> None:
        with self._stance():
            self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def spread(self) -> Spread | None:
        """How the rates of single weights are spread, where weights have rates of their own. Waits for the device."""
        return self.inner.spread() if isinstance(self.inner, Automagic) else None

    @torch.no_grad()
    def averaged(self) -> dict[str, torch.Tensor] | None:
        """Copies of the weights to validate and to export, where those are not the ones that are trained.

        Schedule-free trains y and means x; with z, x = y + (1 - 1/β₁)(z - y). Its own way, to swap x in and y back,
        does not give the same bits back.
        """
        if self.name != "schedule_free":
            return None
        beta = self.inner.param_groups[0]["betas"][0]
        states = {name: self.inner.state.get(p, {}) for name, p in self.parameters.items()}
        return {
            name: p.lerp(states[name]["z"].to(p.device), 1 - 1 / beta) if "z" in states[name] else p.detach().clone()
            for name, p in self.parameters.items()
        }

    def _stance(self) -> AbstractContextManager[Any]:
        """torchao compiles its step. On a CPU that takes half a minute and a C++ compiler, and gains nothing."""
        if self.name == "adamw8bit" and all(p.device.type == "cpu" for p in self.parameters.values()):
            stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return stance
        return nullcontext()


def build(
    settings: OptimizerSettings, parameters: Mapping[str, nn.Parameter], expert: str, *, seed: int = 0
) -> Optimizer:
    """The optimizer that the settings name, for the parameters of one expert; what it draws by chance is the seed's."""
    entry = entry_of(settings)
    if not parameters:
        raise TrainError(f"expert {expert} has nothing to train: no parameter is left; see adapter.targets")
    rate = rate_of(settings, expert)
    decay = entry.weight_decay if settings.weight_decay is None else settings.weight_decay
    order = Order(parameters, rate, decay, settings, expert, seed)
    return Optimizer(settings.name, entry.make(order), parameters, rate)


def entry_of(settings: OptimizerSettings) -> Entry:
    """The entry of the table that the settings name."""
    return OPTIMIZERS[settings.name]


def rate_of(settings: OptimizerSettings, expert: str) -> float:
    """Learning rate of an expert: its own, else that of all, else the table's."""
    if settings.name == "automagic":
        return limits_of(settings, expert).start
    given = _start_of(settings, expert)
    return OPTIMIZERS[settings.name].learning_rate if given is None else given


def limits_of(settings: OptimizerSettings, expert: str) -> Limits:
    """Between what an expert's rates move under Automagic, and how far in a step: its own settings, else those of all,
    else the usual ones. A start or a bump that nobody chose gives way to the limits."""
    bumps = (settings.lr_bump, settings.high_noise_lr_bump, settings.low_noise_lr_bump)
    lows = (settings.min_lr, settings.high_noise_min_lr, settings.low_noise_min_lr)
    highs = (settings.max_lr, settings.high_noise_max_lr, settings.low_noise_max_lr)
    lowest_is, lowest = _said("min_lr", expert, lows, USUAL.lowest)
    highest_is, highest = _said("max_lr", expert, highs, USUAL.highest)
    if highest < lowest:
        raise TrainError(f"{highest_is} is below {lowest_is}: Automagic's rates move between them; set both")
    bump_is, bump = _said("lr_bump", expert, bumps, min(USUAL.bump, (highest - lowest) or USUAL.bump))
    if bump > highest - lowest > 0:
        raise TrainError(
            f"{bump_is} is more than lies between {lowest_is} and {highest_is}: Automagic's rates would jump from one "
            "to the other; set a smaller one"
        )
    given = _start_of(settings, expert)
    start = min(max(USUAL.start, lowest), highest) if given is None else given
    if not lowest <= start <= highest:
        raise TrainError(
            f"optimizer.{'learning_rate' if start == settings.learning_rate else f'{expert}_lr'} {start:g}, where "
            f"Automagic's rates start, is not between {lowest_is} and {highest_is}; leave it out, or widen the limits"
        )
    return Limits(start=start, bump=bump, lowest=lowest, highest=highest)


def _said(name: str, expert: str, given: tuple[float | None, ...], usual: float) -> tuple[str, float]:
    """A setting of an expert, in words and as a number: its own, else that of all, else the usual one. `given`: that of
    all, of the high-noise and of the low-noise expert."""
    everyone, high, low = given
    own = {"high_noise": high, "low_noise": low}.get(expert)
    if own is not None:
        return f"optimizer.{expert}_{name} {own:g}", own
    return (f"{name} {usual:g} (unset)", usual) if everyone is None else (f"optimizer.{name} {everyone:g}", everyone)


def _start_of(settings: OptimizerSettings, expert: str) -> float | None:
    own = {"high_noise": settings.high_noise_lr, "low_noise": settings.low_noise_lr}.get(expert)
    return settings.learning_rate if own is None else own


def _adamw(order: Order) -> Made:
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in order.weights)
    return torch.optim.AdamW(order.weights, lr=order.rate, weight_decay=order.decay, fused=fused, foreach=not fused)


def _adamw8bit(order: Order) -> Made:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as problem:
        raise TrainError(
            f'optimizer.name "adamw8bit" needs torchao ({problem}); install it, or use "adamw"'
        ) from problem
    made: Made = AdamW8bit(order.weights, lr=order.rate, weight_decay=order.decay)
    return made


def _adafactor(order: Order) -> Made:
    # One by one: little memory is its point.
    return torch.optim.Adafactor(order.weights, lr=order.rate, weight_decay=order.decay)


def _prodigy(order: Order) -> Made:
    from prodigyopt import Prodigy

    made: Made = Prodigy(order.weights, lr=order.rate)
    for group in made.param_groups:
        group["weight_decay"] = order.decay  # given to the constructor, it would be announced on the screen
    return made


def _schedule_free(order: Order) -> Made:
    from schedulefree import AdamWScheduleFree

    made = AdamWScheduleFree(order.weights, lr=order.rate, weight_decay=order.decay)
    made.train()
    optimizer: Made = made
    return optimizer


def _automagic(order: Order) -> Made:
    names = {f"{order.expert}/{name}": p for name, p in order.parameters.items()}  # each expert draws for itself
    limits = limits_of(order.settings, order.expert)
    return Automagic(names, limits, weight_decay=order.decay, seed=order.seed)


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
    return {key: ((length,),) for key, (length, _) in state_shapes(p.shape, PackedRates(USUAL)).items()}


USUAL = Limits(start=1e-6, bump=1e-6, lowest=USUAL_MIN_LR, highest=USUAL_MAX_LR)
"""Automagic's own settings where nothing else is said."""
OPTIMIZERS = {
    "adamw": Entry(_adamw, 1e-4, 1e-2, _adam_shapes, each_weight_alone=True),
    "adamw8bit": Entry(_adamw8bit, 1e-4, 1e-2, _adam_shapes),
    # The rate of Adafactor is relative to the size of the weights, as in its paper.
    "adafactor": Entry(_adafactor, 1e-2, 0.0, _adafactor_shapes),
    # Prodigy estimates the rate; what is given is a factor on it.
    "prodigy": Entry(_prodigy, 1.0, 0.0, _prodigy_shapes),
    "schedule_free": Entry(_schedule_free, 5e-4, 0.0, _schedule_free_shapes, each_weight_alone=True),
    # The rate is where the rates of all weights start from.
    "automagic": Entry(_automagic, USUAL.start, 0.0, _automagic_shapes),
}

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

from supertuner.config.optim import OptimizerSettings
from supertuner.core.errors import TrainError

Shape: TypeAlias = tuple[int, ...]
Made: TypeAlias = "torch.optim.Optimizer"
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, slots=True)
class Entry:
    """One optimizer of the table."""

    make: Callable[[list[nn.Parameter], float, float], Made]
    """(parameters, learning rate, weight decay) → the optimizer."""
    learning_rate: float
    """Where the settings give none."""
    weight_decay: float
    """Where the settings give none."""
    state_shapes: Callable[[nn.Parameter], dict[str, tuple[Shape, ...]]]
    """What it remembers of a parameter once that had a gradient, and which shapes each entry may have."""


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
            name: p.lerp(states[name]["z"], 1 - 1 / beta) if "z" in states[name] else p.detach().clone()
            for name, p in self.parameters.items()
        }

    def _stance(self) -> AbstractContextManager[Any]:
        """torchao compiles its step. On a CPU that takes half a minute and a C++ compiler, and gains nothing."""
        if self.name == "adamw8bit" and all(p.device.type == "cpu" for p in self.parameters.values()):
            stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return stance
        return nullcontext()


def build(settings: OptimizerSettings, parameters: Mapping[str, nn.Parameter], expert: str) -> Optimizer:
    """The optimizer that the settings name, for the parameters of one expert."""
    entry = entry_of(settings)
    if not parameters:
        raise TrainError(f"expert {expert} has nothing to train: no parameter is left; see adapter.targets")
    rate = rate_of(settings, expert)
    decay = entry.weight_decay if settings.weight_decay is None else settings.weight_decay
    return Optimizer(settings.name, entry.make(list(parameters.values()), rate, decay), parameters, rate)


def entry_of(settings: OptimizerSettings) -> Entry:
    """The entry of the table that the settings name, which must be there."""
    entry = OPTIMIZERS.get(settings.name)
    if entry is None:
        raise TrainError(
            f'optimizer.name "{settings.name}" is not part of this version yet; use one of {", ".join(OPTIMIZERS)} '
            '("prodigy" finds its learning rate by itself too)'
        )
    return entry


def rate_of(settings: OptimizerSettings, expert: str) -> float:
    """Learning rate of an expert: its own, else that of all, else the table's."""
    own = {"high_noise": settings.high_noise_lr, "low_noise": settings.low_noise_lr}.get(expert)
    given = settings.learning_rate if own is None else own
    return OPTIMIZERS[settings.name].learning_rate if given is None else given


def _adamw(parameters: list[nn.Parameter], rate: float, decay: float) -> Made:
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=fused, foreach=not fused)


def _adamw8bit(parameters: list[nn.Parameter], rate: float, decay: float) -> Made:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as problem:
        raise TrainError(
            f'optimizer.name "adamw8bit" needs torchao ({problem}); install it, or use "adamw"'
        ) from problem
    made: Made = AdamW8bit(parameters, lr=rate, weight_decay=decay)
    return made


def _adafactor(parameters: list[nn.Parameter], rate: float, decay: float) -> Made:
    return torch.optim.Adafactor(parameters, lr=rate, weight_decay=decay)  # one by one: little memory is its point


def _prodigy(parameters: list[nn.Parameter], rate: float, decay: float) -> Made:
    from prodigyopt import Prodigy

    made: Made = Prodigy(parameters, lr=rate)
    for group in made.param_groups:
        group["weight_decay"] = decay  # given to the constructor, it would be announced on the screen
    return made


def _schedule_free(parameters: list[nn.Parameter], rate: float, decay: float) -> Made:
    from schedulefree import AdamWScheduleFree

    made = AdamWScheduleFree(parameters, lr=rate, weight_decay=decay)
    made.train()
    optimizer: Made = made
    return optimizer


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


OPTIMIZERS = {
    "adamw": Entry(_adamw, 1e-4, 1e-2, _adam_shapes),
    "adamw8bit": Entry(_adamw8bit, 1e-4, 1e-2, _adam_shapes),
    # The rate of Adafactor is relative to the size of the weights, as in its paper.
    "adafactor": Entry(_adafactor, 1e-2, 0.0, _adafactor_shapes),
    # Prodigy estimates the rate; what is given is a factor on it.
    "prodigy": Entry(_prodigy, 1.0, 0.0, _prodigy_shapes),
    "schedule_free": Entry(_schedule_free, 5e-4, 0.0, _schedule_free_shapes),
}

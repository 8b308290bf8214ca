"""What tests of optimizers share: weights of several shapes, gradients by step number, and equality to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from supertuner.config.settings.optim import OptimizerSettings
from supertuner.optim.optimizer_registry import OPTIMIZERS, ExpertOptimizer, build_optimizer

NAMES = tuple(OPTIMIZERS)


def build_weights(seed: int = 0) -> dict[str, nn.Parameter]:
    """A large matrix (kept in 8 bits where that is asked), a matrix of zeros, a vector, a kernel, a scalar, strides
    that are not those of its shape, and one that never has a gradient."""
    made = torch.Generator().manual_seed(seed)
    return {
        "blocks.0.lora_A.weight": nn.Parameter(torch.randn(64, 128, generator=made)),
        "blocks.0.lora_B.weight": nn.Parameter(torch.zeros(48, 12)),
        "blocks.0.bias": nn.Parameter(torch.randn(37, generator=made)),
        "conv/odd name": nn.Parameter(torch.randn(3, 2, 3, 3, generator=made)),
        "scale": nn.Parameter(torch.randn((), generator=made)),
        "turned": nn.Parameter(torch.randn(20, 30, generator=made).t()),
        "unused": nn.Parameter(torch.randn(5, 5, generator=made)),
    }


def build_named_optimizer(name: str, parameters: dict[str, nn.Parameter], **settings: object) -> ExpertOptimizer:
    return build_optimizer(OptimizerSettings.model_validate({"name": name, **settings}), parameters, "model")


def train_steps(built: ExpertOptimizer, begin: int, end: int) -> None:
    """Steps `begin` to `end`; the gradient is a function of the step, the parameter's place and its value."""
    for step in range(begin, end):
        for place, (name, parameter) in enumerate(built.parameters.items()):
            if name != "unused":
                noise = torch.Generator().manual_seed(1000 * step + place)
                parameter.grad = parameter.detach() * 0.1 + torch.randn(parameter.shape, generator=noise)
        built.set_learning_rate(built.base_learning_rate * (1 - step / 100))
        built.step()
        built.zero_grad()


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and raw(left[name]) == raw(right[name]) for name in left
    )

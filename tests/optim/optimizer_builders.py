"""Shared by the tests of optimizers: weights of several shapes, gradients by step number, and bitwise equality."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from supertuner.config.settings.optim import OptimizerSettings
from supertuner.optim.optimizer_registry import OPTIMIZERS, ExpertOptimizer, build_optimizer

NAMES = tuple(OPTIMIZERS)


def build_weights(seed: int = 0) -> dict[str, nn.Parameter]:
    """A large matrix (adamw8bit stores its state in 8 bits), a matrix of zeros, a vector, a kernel, a scalar, a tensor
    with transposed strides, and one that never gets a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "blocks.0.lora_A.weight": nn.Parameter(torch.randn(64, 128, generator=generator)),
        "blocks.0.lora_B.weight": nn.Parameter(torch.zeros(48, 12)),
        "blocks.0.bias": nn.Parameter(torch.randn(37, generator=generator)),
        "conv/odd name": nn.Parameter(torch.randn(3, 2, 3, 3, generator=generator)),
        "scale": nn.Parameter(torch.randn((), generator=generator)),
        "transposed": nn.Parameter(torch.randn(20, 30, generator=generator).t()),
        "unused": nn.Parameter(torch.randn(5, 5, generator=generator)),
    }


def build_named_optimizer(name: str, parameters: dict[str, nn.Parameter], **settings: object) -> ExpertOptimizer:
    return build_optimizer(OptimizerSettings.model_validate({"name": name, **settings}), parameters, "model")


def train_steps(optimizer: ExpertOptimizer, begin: int, end: int) -> None:
    """Optimizer steps `begin` to `end`; a gradient depends on the step, the parameter's index and its value."""
    for step in range(begin, end):
        for index, (name, parameter) in enumerate(optimizer.parameters.items()):
            if name != "unused":
                noise = torch.Generator().manual_seed(1000 * step + index)
                parameter.grad = parameter.detach() * 0.1 + torch.randn(parameter.shape, generator=noise)
        optimizer.set_learning_rate(optimizer.base_learning_rate * (1 - step / 100))
        optimizer.step()
        optimizer.zero_grad()


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and raw(left[name]) == raw(right[name]) for name in left
    )

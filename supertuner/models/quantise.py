"""Weights that are not trained, in 8 bits by torchao: tried on a small layer first, and refused with the reason."""

from __future__ import annotations

from typing import Any, Literal, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from supertuner.core.errors import ModelError
from supertuner.core.events import Decided

TOLERANCE = {"int8": 0.02, "fp8": 0.06}
"""How wrong a layer of random weights may be, in its output and in its input's gradient. Measured: 0.6 % and 2.6 %."""


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is stored in 8 bits, and kept so for the backward pass too.

    torchao's own layer makes a weight in the format of the computation and keeps that one until the backward pass: all
    layers together would again need the memory that 8 bits were to save. Here it is made anew.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        output: torch.Tensor = _TimesFrozen.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _TimesFrozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(given, _dense(weight, given.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return upstream[0] @ _dense(weight, upstream[0].dtype), None


def quantise(module: nn.Module, kind: Literal["int8", "fp8"], device: torch.device) -> Decided:
    """Store the linear layers of the module's blocks in 8 bits, in place; they compute in the format they had.

    Before adapters are put on it. What stands outside the numbered blocks (embeddings of time and text, the last
    layer) stays as it is: few bytes, and the most sensitive ones.
    """
    layers = {name: layer for name, layer in module.named_modules() if _in_block(layer, name)}
    if not layers:
        raise ModelError(
            f'model.base_weights is "{kind}", but {type(module).__name__} has no linear layers in numbered blocks; '
            'set model.base_weights: "as_computed"'
        )
    if device.type != "meta":  # where nothing is computed, nothing can go wrong
        probe(kind, device, next(iter(layers.values())).weight.dtype)
    before = stored_bytes(module)
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, frozen(layer, kind))
    after = stored_bytes(module)
    return Decided(
        "model.base_weights",
        kind,
        f"{len(layers)} linear layers of {type(module).__name__} in 8 bits: {after / 2**20:.1f} MiB instead of "
        f"{before / 2**20:.1f}; tried on {device.type}",
    )


def frozen(layer: nn.Linear, kind: Literal["int8", "fp8"]) -> FrozenLinear:
    """The layer with its weight in 8 bits; the one given is used up."""
    from torchao.quantization import quantize_

    layer.requires_grad_(False)
    quantize_(layer, _config(kind))
    made = FrozenLinear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def probe(kind: Literal["int8", "fp8"], device: torch.device, dtype: torch.dtype) -> None:
    """Run a small layer forward and backward in 8 bits on `device`; an error says what the machine cannot do."""
    generator = torch.Generator().manual_seed(0)
    weight, given, upstream = (torch.randn(64, 64, generator=generator).to(device, dtype) for _ in range(3))
    layer = nn.Linear(64, 64, bias=False, device=device, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(weight)
    given.requires_grad_(True)
    try:
        output = frozen(layer, kind)(given)
        (gradient,) = torch.autograd.grad(output, given, upstream)
    except Exception as error:
        raise ModelError(
            f'model.base_weights is "{kind}", and {device.type} cannot compute with such weights here: '
            f'{_first_line(error)}; set model.base_weights: "as_computed"'
        ) from error
    wrong = max(_error(output, given @ weight.T), _error(gradient, upstream @ weight))
    if not wrong < TOLERANCE[kind]:
        raise ModelError(
            f'model.base_weights is "{kind}", and on {device.type} a layer in 8 bits is wrong by {wrong:.1%} (at most '
            f'{TOLERANCE[kind]:.0%} is expected); set model.base_weights: "as_computed"'
        )


def stored_bytes(module: nn.Module) -> int:
    """Bytes of the module's parameters and buffers as they are stored."""
    return sum(_bytes(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _config(kind: Literal["int8", "fp8"]) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    # Its advice for the compiler is a setting of the whole process; that is not ours to change.
    return (Int8WeightOnlyConfig if kind == "int8" else Float8WeightOnlyConfig)(set_inductor_config=False)


def _dense(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = weight.dequantize().to(dtype)
    return made


def _in_block(layer: nn.Module, name: str) -> TypeGuard[nn.Linear]:
    return isinstance(layer, nn.Linear) and any(part.isdigit() for part in name.split("."))


def _bytes(tensor: torch.Tensor) -> int:
    if type(tensor.data) is torch.Tensor:
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(_bytes(getattr(tensor, name)) for name in names)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach() - wanted.detach()).float().norm() / wanted.detach().float().norm())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

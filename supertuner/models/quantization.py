"""Quantizes frozen weights to 8 bits with torchao, after a test on a small layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from supertuner.core.errors import ModelError
from supertuner.core.events import DecisionEvent
from supertuner.models.library_guards import exclusive_construction

TOLERANCE = {"int8": 0.02, "fp8": 0.06}
"""Largest relative error of a layer of random weights, in its output and its input's gradient. Measured: 0.6 % (int8)
and 2.6 % (fp8)."""

EightBitFormat: TypeAlias = Literal["int8", "fp8"]
LayerFunction: TypeAlias = Callable[[str, nn.Module], object]
"""Called with the name and the module of a layer."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is stored in 8 bits, also between the forward and the backward pass.

    torchao's own layer dequantizes the weight and saves the result for the backward pass, so that all layers together
    would need the memory that quantization is meant to save. This layer dequantizes it again in the backward pass.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        output: torch.Tensor = _QuantizedLinearFunction.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _QuantizedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(inputs, _dequantize(weight, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return upstream[0] @ _dequantize(weight, upstream[0].dtype), None


@exclusive_construction()
def quantize_blocks(
    module: nn.Module, kind: EightBitFormat, device: torch.device, prepare: LayerFunction | None = None
) -> DecisionEvent:
    """Quantize the linear layers in the module's numbered blocks, in place; they compute in their previous format.

    `prepare` is called for each of these layers just before it is quantized. It may move the layer to another device,
    where then only one layer at a time has its previous format. Layers outside the blocks (embeddings of time and text,
    the last layer) are not quantized: they are small and the most sensitive. Call before attaching adapters.
    """
    layers = quantizable_layers(module)
    if not layers:
        raise ModelError(
            f'model.base_weights is "{kind}", but {type(module).__name__} has no linear layers in numbered blocks; '
            'set model.base_weights: "as_computed"'
        )
    if device.type != "meta":  # nothing is computed on the meta device
        check_quantization(kind, device, next(iter(layers.values())).weight.dtype)
    before = stored_bytes(module)
    for name, layer in layers.items():
        if prepare is not None:
            prepare(name, layer)
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, quantize_linear(layer, kind))
    after = stored_bytes(module)
    return DecisionEvent(
        "model.base_weights",
        kind,
        f"{len(layers)} linear layers of {type(module).__name__} in 8 bits: {after / 2**20:.1f} MiB instead of "
        f"{before / 2**20:.1f}; tested on {device.type}",
    )


def quantizable_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The layers that `quantize_blocks` quantizes, in its order."""
    return {name: layer for name, layer in module.named_modules() if _in_block(layer, name)}


def quantize_linear(layer: nn.Linear, kind: EightBitFormat) -> QuantizedLinear:
    """A layer with the quantized weight of `layer`, which must not be used afterwards."""
    from torchao.quantization import quantize_

    layer.requires_grad_(False)
    quantize_(layer, _config(kind))
    quantized = QuantizedLinear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    quantized.weight, quantized.bias = layer.weight, layer.bias
    return quantized.train(layer.training)


def check_quantization(kind: EightBitFormat, device: torch.device, dtype: torch.dtype) -> None:
    """Run a small quantized layer forward and backward on `device`. Raises ModelError if it fails or is inaccurate."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs, upstream = (torch.randn(64, 64, generator=generator).to(device, dtype) for _ in range(3))
    layer = nn.Linear(64, 64, bias=False, device=device, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(weight)
    inputs.requires_grad_(True)
    try:
        output = quantize_linear(layer, kind)(inputs)
        (gradient,) = torch.autograd.grad(output, inputs, upstream)
    except Exception as error:
        raise ModelError(
            f'model.base_weights is "{kind}", but {device.type} cannot compute with such weights here: '
            f'{_first_line(error)}; set model.base_weights: "as_computed"'
        ) from error
    error_ratio = max(_relative_error(output, inputs @ weight.T), _relative_error(gradient, upstream @ weight))
    if not error_ratio < TOLERANCE[kind]:
        raise ModelError(
            f'model.base_weights is "{kind}", but on {device.type} a quantized layer has an error of {error_ratio:.1%} '
            f'(at most {TOLERANCE[kind]:.0%} is expected); set model.base_weights: "as_computed"'
        )


def stored_bytes(module: nn.Module) -> int:
    """Bytes of the module's parameters and buffers in their stored formats."""
    return sum(_tensor_bytes(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _config(kind: EightBitFormat) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    # set_inductor_config would change compiler settings of the whole process.
    return (Int8WeightOnlyConfig if kind == "int8" else Float8WeightOnlyConfig)(set_inductor_config=False)


def _dequantize(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    dense: torch.Tensor = weight.dequantize().to(dtype)
    return dense


def _in_block(layer: nn.Module, name: str) -> TypeGuard[nn.Linear]:
    return isinstance(layer, nn.Linear) and any(part.isdigit() for part in name.split("."))


def _tensor_bytes(tensor: torch.Tensor) -> int:
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return tensor.nbytes
    names, _ = wrapper.__tensor_flatten__()
    return sum(_tensor_bytes(getattr(wrapper, name)) for name in names)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.detach() - expected.detach()).float().norm() / expected.detach().float().norm())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

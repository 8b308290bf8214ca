"""8-bit base weights: fewer bytes, also for the backward pass, and adapters on them train as without quantization."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models.adapters.attach import TrainableExpert, attach, load_trainable_state, trainable_state
from supertuner.models.quantization import (
    TOLERANCE,
    QuantizedLinear,
    check_quantization,
    quantize_blocks,
    quantize_linear,
    stored_bytes,
)
from tests.models.adapters.modules import flux, flux_output, random_tensor, wan, wan_output

Kind = Literal["int8", "fp8"]
KINDS = pytest.mark.parametrize("kind", ["int8", "fp8"])
CPU = torch.device("cpu")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def with_trained_values(module: nn.Module) -> TrainableExpert:
    trained = attach(module, AdapterSettings(rank=4), ATTENTION, seed=1, name="model")
    load_trainable_state(
        trained,
        {name: tensor + 0.05 * random_tensor(*tensor.shape) for name, tensor in trainable_state(trained).items()},
    )
    return trained


def gradients(trained: TrainableExpert, output: torch.Tensor) -> torch.Tensor:
    output.float().square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in trained.parameters.values()])  # type: ignore[union-attr]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm())


@KINDS
def test_gradients_of_an_adapter_are_those_on_the_same_weights_dequantized(kind: Kind) -> None:
    """The reference has the rounded weights in fp32: apart from that rounding, nothing is lost."""
    small, full = wan(), wan()
    quantize_blocks(small, kind, CPU)
    for name, layer in small.named_modules():
        if isinstance(layer, QuantizedLinear):
            full.get_submodule(name).weight.data = layer.weight.dequantize()
    ours, reference = with_trained_values(small), with_trained_values(full)
    actual, expected = wan_output(small), wan_output(full)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    assert relative(gradients(ours, actual), gradients(reference, expected)) < 1e-5


@KINDS
@pytest.mark.parametrize("make, forward", [(wan, wan_output), (flux, flux_output)], ids=["wan", "flux"])
def test_gradients_of_an_adapter_are_near_those_on_the_original_weights(kind: Kind, make, forward) -> None:  # type: ignore[no-untyped-def]
    """In two blocks the errors of the layers add up, so the tolerance is four times that of one layer."""
    small, full = make(), make()
    quantize_blocks(small, kind, CPU)
    ours, reference = with_trained_values(small), with_trained_values(full)
    actual, expected = forward(small), forward(full)
    assert relative(actual, expected) < 4 * TOLERANCE[kind]
    assert relative(gradients(ours, actual), gradients(reference, expected)) < 4 * TOLERANCE[kind]


@KINDS
def test_an_adapter_on_8_bit_weights_trains_and_nothing_else_changes(kind: Kind) -> None:
    module = wan()
    quantize_blocks(module, kind, CPU)
    trained = attach(module, AdapterSettings(rank=4), ATTENTION, seed=1, name="model")
    assert all("lora_" in name for name, parameter in module.named_parameters() if parameter.requires_grad)
    base = {name: layer.weight.dequantize() for name, layer in _frozen(module)}
    optimizer, losses = torch.optim.Adam(trained.parameters.values(), lr=1e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (wan_output(module) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(base[name], layer.weight.dequantize()) for name, layer in _frozen(module))


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_layer_has_the_formats_of_a_plain_one(kind: Kind, dtype: torch.dtype) -> None:
    plain = nn.Linear(64, 32).to(dtype).requires_grad_(False)
    given = random_tensor(4, 64).requires_grad_(True)
    with torch.autocast("cpu", dtype):
        expected = plain(given)
        actual = quantize_linear(plain, kind)(given)
    assert actual.dtype == expected.dtype == dtype
    assert relative(actual.float(), expected.float()) < TOLERANCE[kind] + 0.01
    actual.float().sum().backward()
    assert given.grad is not None and given.grad.dtype == torch.float32


@KINDS
def test_quantized_weights_take_half_the_bytes_of_bf16_and_other_layers_do_not_change(kind: Kind) -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
    module.proj_out = nn.Linear(256, 16)
    module.bfloat16()
    before = stored_bytes(module)
    decided = quantize_blocks(module, kind, CPU)
    saved = before - stored_bytes(module)
    scales = 4 * 256 * 8  # at most a scale and a zero point for each row
    assert 4 * 256 * 256 - scales <= saved <= 4 * 256 * 256
    assert type(module.proj_out.weight.data) is torch.Tensor and module.proj_out.weight.dtype == torch.bfloat16
    assert decided.value == kind and "4 linear layers" in decided.reason


@KINDS
def test_no_dequantized_weight_is_kept_for_the_backward_pass(kind: Kind) -> None:
    layer = quantize_linear(nn.Linear(256, 256).bfloat16(), kind)
    given = random_tensor(2, 256).bfloat16().requires_grad_(True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        layer(given)
    dense = [tensor for tensor in kept if type(tensor.data) is torch.Tensor and tensor.numel() >= 256 * 256]
    assert not dense, [tuple(tensor.shape) for tensor in dense]


def test_full_training_of_8_bit_weights_raises_an_error_with_a_remedy() -> None:
    module = wan()
    quantize_blocks(module, "int8", CPU)
    with pytest.raises(
        ModelError, match=r'"full", but 20 weights of model are 8-bit .* model\.base_weights: "as_computed"'
    ):
        attach(module, AdapterSettings(type="full"), (), seed=1, name="model")


def test_a_device_that_cannot_quantize_raises_an_error_with_a_remedy() -> None:
    """The meta device, which computes nothing, stands in for a device that cannot."""
    with pytest.raises(ModelError, match=r'model.base_weights is "int8", but meta cannot .*; set .* "as_computed"'):
        check_quantization("int8", torch.device("meta"), torch.bfloat16)


def test_a_module_without_blocks_raises_an_error() -> None:
    with pytest.raises(ModelError, match="Linear has no linear layers in numbered blocks"):
        quantize_blocks(nn.Linear(4, 4), "int8", CPU)


def _frozen(module: nn.Module) -> list[tuple[str, QuantizedLinear]]:
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, QuantizedLinear)]

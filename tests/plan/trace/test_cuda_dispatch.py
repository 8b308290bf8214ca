"""Inside `dispatch_as_cuda` fake CPU tensors dispatch as CUDA tensors do, and outside as CPU tensors.

tests/phantom/test_forecast.py compares the memory of whole steps with CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from supertuner.plan.trace import cuda_dispatch as cuda_ways
from supertuner.plan.trace.cuda_dispatch import dispatch_as_cuda

HOPPER, BLACKWELL_SMALL = (9, 0), (12, 1)
RARE = {
    "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "cudnn_convolution",
    "cudnn_convolution_transpose", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell", "norm.Scalar",
    "norm.ScalarOpt_dim",
}  # fmt: skip
"""Operators that CUDA autocast casts and no model here uses: recurrent cells, deprecated norms, internal kernels."""


class OperatorRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def cast_on(key: str) -> set[str]:
    """The operators that the installed torch casts under autocast."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name.removeprefix("aten::") for name in names if has(name, key)}


def test_the_lists_are_the_operators_that_torch_casts_on_cuda_and_not_on_the_cpu() -> None:
    """Fails if a new release of torch casts other operators."""
    listed = {
        *cuda_ways.AUTOCAST_FP32,
        *cuda_ways.AUTOCAST_FP32_OUTPUT,
        *cuda_ways.AUTOCAST_LOWER_PRECISION,
        *cuda_ways.AUTOCAST_PROMOTE,
    }
    assert listed == cast_on("AutocastCUDA") - cast_on("AutocastCPU") - RARE


def test_operators_not_cast_on_cuda_are_cast_on_the_cpu() -> None:
    assert set(cuda_ways.NOT_CAST_ON_CUDA) <= cast_on("AutocastCPU") - cast_on("AutocastCUDA")


def test_every_operator_of_the_lists_exists() -> None:
    for name in (
        *cuda_ways.AUTOCAST_FP32,
        *cuda_ways.AUTOCAST_FP32_OUTPUT,
        *cuda_ways.AUTOCAST_LOWER_PRECISION,
        *cuda_ways.AUTOCAST_PROMOTE,
    ):
        assert isinstance(cuda_ways.find_operator(name), torch._ops.OpOverload)


@pytest.mark.usefixtures("fake")
def test_under_autocast_norms_and_powers_are_fp32_as_on_cuda() -> None:
    values = torch.empty(2, 8, 16, dtype=torch.bfloat16)
    with dispatch_as_cuda(HOPPER), torch.autocast("cpu", torch.bfloat16):
        assert F.layer_norm(values, (16,)).dtype == torch.float32
        assert values.pow(2).dtype == torch.float32
        assert F.rms_norm(values, (16,)).dtype == torch.float32
        assert values.softmax(-1).dtype == torch.float32
        assert values.sum(1).dtype == torch.float32
        assert torch.cat([values, values.float()]).dtype == torch.float32
        assert torch.addcmul(values, values, values.float()).dtype == torch.float32
        assert F.linear(values.float(), torch.empty(4, 16)).dtype == torch.bfloat16
        assert values.double().exp().dtype == torch.float64


@pytest.mark.usefixtures("fake")
def test_without_autocast_nothing_is_cast() -> None:
    values = torch.empty(2, 8, 16, dtype=torch.bfloat16)
    with dispatch_as_cuda(HOPPER):
        assert F.layer_norm(values, (16,)).dtype == torch.bfloat16


@pytest.mark.usefixtures("fake")
def test_outside_the_context_cpu_dispatch_is_restored() -> None:
    values = torch.empty(2, 8, 16, dtype=torch.bfloat16)
    with dispatch_as_cuda(HOPPER):
        pass
    with torch.autocast("cpu", torch.bfloat16), OperatorRecorder() as seen:
        assert F.layer_norm(values, (16,)).dtype == torch.bfloat16
        F.scaled_dot_product_attention(*(torch.empty(1, 2, 16, 64, dtype=torch.bfloat16) for _ in range(3)))
        torch.stack([values, values.float()])
    assert not any("cudnn" in name for name in seen.names)
    assert "_to_copy" in seen.names  # CPU autocast casts the inputs of stack


@pytest.mark.usefixtures("fake")
def test_an_exception_restores_cpu_dispatch() -> None:
    with pytest.raises(ZeroDivisionError), dispatch_as_cuda(HOPPER):
        raise ZeroDivisionError
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.empty(4, dtype=torch.bfloat16).exp().dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "dtype", "masked", "expected"),
    (
        (HOPPER, torch.bfloat16, False, "_scaled_dot_product_cudnn_attention"),
        (HOPPER, torch.bfloat16, True, "_scaled_dot_product_cudnn_attention"),
        (HOPPER, torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (BLACKWELL_SMALL, torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (BLACKWELL_SMALL, torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
    ),
)
@pytest.mark.usefixtures("fake")
def test_attention_and_its_backward_use_the_kernel_of_the_chip(
    capability: tuple[int, int], dtype: torch.dtype, masked: bool, expected: str
) -> None:
    query, key, value = (torch.empty(2, 4, 64, 32, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.empty(2, 1, 64, 64, dtype=torch.bool) if masked else None
    with dispatch_as_cuda(capability), OperatorRecorder() as seen:
        result = F.scaled_dot_product_attention(query, key, value, mask)
        result.sum().backward()
    assert [name for name in seen.names if "attention" in name] == [expected, f"{expected}_backward"]
    assert result.shape == query.shape == query.grad.shape  # type: ignore[union-attr]


@pytest.mark.usefixtures("fake")
def test_head_dimensions_that_are_no_multiple_of_8_are_padded_for_flash_attention() -> None:
    query = torch.empty(1, 2, 16, 20, dtype=torch.bfloat16)
    with dispatch_as_cuda(HOPPER), OperatorRecorder() as seen:
        assert F.scaled_dot_product_attention(query, query, query).shape == query.shape
    assert seen.names.count("constant_pad_nd") == 3


@pytest.mark.usefixtures("fake")
def test_an_rms_norm_is_one_kernel_in_each_pass() -> None:
    values, weight = torch.empty(4, 64, requires_grad=True), torch.empty(64, requires_grad=True)
    with dispatch_as_cuda(HOPPER), OperatorRecorder() as seen:
        F.rms_norm(values, (64,), weight).sum().backward()
    assert {"_fused_rms_norm", "_fused_rms_norm_backward"} <= set(seen.names)
    assert values.grad is not None and weight.grad is not None


@pytest.mark.usefixtures("fake")
def test_an_rms_norm_with_two_types_is_decomposed() -> None:
    values, weight = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(64)
    with dispatch_as_cuda(HOPPER), OperatorRecorder() as seen:
        assert F.rms_norm(values, (64,), weight).dtype == torch.bfloat16
    assert "_fused_rms_norm" not in seen.names

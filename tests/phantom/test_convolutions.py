"""Convolutions on the phantom use torch's cuDNN path: their memory is output and workspace, without im2col buffers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def peak_of(work: Callable[[], object]) -> int:
    """Bytes above what is held now, at the highest point of `work`."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    del kept
    return torch.cuda.max_memory_allocated() - before


def conv_arguments(dims: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.empty(2, 16, *(24,) * dims, device="cuda", dtype=dtype)
    return x, torch.empty(32, 16, *(3,) * dims, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [2, 3])
def test_the_forward_pass_takes_the_output_and_the_workspace_of_the_rule(dims: int, dtype: torch.dtype) -> None:
    convolve = {2: F.conv2d, 3: F.conv3d}[dims]
    x, weight = conv_arguments(dims, dtype)
    output_bytes = convolve(x, weight, padding=1).nbytes
    peak = peak_of(lambda: convolve(x, weight, padding=1))
    # None of the three is channels-last, so the workspace holds a copy of each.
    workspace = x.nbytes + weight.nbytes + output_bytes
    assert peak == pytest.approx(output_bytes + workspace, rel=0.02)


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_needs_no_workspace(dims: int) -> None:
    convolve = {2: F.conv2d, 3: F.conv3d}[dims]
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    x, weight = (tensor.to(memory_format=layout) for tensor in conv_arguments(dims, torch.bfloat16))
    output_bytes = convolve(x, weight, padding=1).nbytes
    assert peak_of(lambda: convolve(x, weight, padding=1)) == pytest.approx(output_bytes, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_backward_runs_on_autograds_thread(dims: int, dtype: torch.dtype) -> None:
    layer = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}[dims](16, 32, 3, padding=1)
    layer = layer.to("cuda", dtype)
    x = torch.empty(2, 16, *(16,) * dims, device="cuda", dtype=dtype, requires_grad=True)
    layer(x).float().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert layer.weight.grad.shape == layer.weight.shape


def test_a_layer_of_wans_decoder_takes_no_gigabytes() -> None:
    """Four frames of 480×832 with 96 channels: 292 MiB of output, for which im2col unfolds 27 times its input."""
    x = torch.empty(1, 96, 6, 482, 834, device="cuda", dtype=torch.bfloat16)
    weight = torch.empty(96, 96, 3, 3, 3, device="cuda", dtype=torch.bfloat16)
    output_bytes = 96 * 4 * 480 * 832 * 2
    peak = peak_of(lambda: F.conv3d(x, weight))
    assert peak < output_bytes + 1.02 * (x.nbytes + weight.nbytes + output_bytes)
    torch.backends.cudnn.enabled = False
    try:
        assert peak_of(lambda: F.conv3d(x, weight)) > 5 * output_bytes
    finally:
        torch.backends.cudnn.enabled = True


def test_another_workspace_can_be_stated() -> None:
    code = """
import torch, torch.nn.functional as F
x, w = torch.empty(1, 8, 32, 32, device="cuda"), torch.empty(8, 8, 3, 3, device="cuda")
before = torch.cuda.memory_allocated()
F.conv2d(x, w)
print(torch.cuda.max_memory_allocated() - before >= 1 << 26)
"""
    env = {**os.environ, "FAKECUDA_CUDNN_WORKSPACE": str(1 << 26)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"

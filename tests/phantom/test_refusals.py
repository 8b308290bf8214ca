"""What the phantom does not do ends in an error that says so: nothing is missing at load time, and nothing crashes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

NOT_SUPPORTED = 801


def said_by(code: str, **variables: str) -> str:
    """What a process of its own prints."""
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_symbol_that_torch_wants_is_there() -> None:
    assert said_by("import torch; torch.ones(1, device='cuda'); print('bound')", LD_BIND_NOW="1") == "bound"


def test_a_function_that_nobody_wrote_says_that_it_is_not_supported() -> None:
    assert ctypes.CDLL("libcudart.so.13").cudaGraphLaunch(None, None) == NOT_SUPPORTED


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_are_refused(setting: str) -> None:
    code = """
import torch
try:
    torch.empty(1 << 25, device="cuda")
except RuntimeError as error:
    print("operation not supported" in str(error))
"""
    assert said_by(code, PYTORCH_CUDA_ALLOC_CONF=setting) == "True"


def test_graphs_are_refused() -> None:
    code = """
import torch
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
except RuntimeError as error:
    print("docs/phantom.md" in str(error))
"""
    assert said_by(code) == "True"


def test_fourier_transforms_are_refused() -> None:
    with pytest.raises(RuntimeError, match="CUFFT_NOT_SUPPORTED"):
        torch.fft.fft(torch.empty(64, device="cuda"))


def test_a_launch_that_no_gpu_would_accept_is_refused() -> None:
    class Dim3(ctypes.Structure):
        _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    launch = ctypes.CDLL("libcudart.so.13").cudaLaunchKernel
    launch.argtypes = [ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert launch(None, Dim3(1, 1, 1), Dim3(256, 1, 1), None, 0, None) == 0
    assert launch(None, Dim3(1, 1, 1), Dim3(2048, 1, 1), None, 0, None) != 0
    assert launch(None, Dim3(0, 1, 1), Dim3(256, 1, 1), None, 0, None) != 0
    ctypes.CDLL("libcudart.so.13").cudaGetLastError()  # torch must not find it

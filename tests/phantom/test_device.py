"""The GPU that torch sees on the phantom: the properties of a GH200, as the fake driver's profile states them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

PROPERTIES = (
    "multi_processor_count", "max_threads_per_multi_processor", "warp_size", "regs_per_multiprocessor",
    "shared_memory_per_block", "shared_memory_per_block_optin", "shared_memory_per_multiprocessor", "L2_cache_size",
    "max_threads_per_block", "clock_rate", "memory_clock_rate", "memory_bus_width",
)  # fmt: skip


def test_torch_is_the_stock_cuda_build() -> None:
    assert torch.version.cuda is not None
    assert torch.cuda.is_available()
    assert torch.backends.cudnn.is_available()


def test_the_gpu_is_a_gh200_of_the_size_that_was_asked_for() -> None:
    seen = torch.cuda.get_device_properties(0)
    assert "GH200" in seen.name
    assert (seen.major, seen.minor) == (9, 0)
    assert seen.total_memory == int(os.environ["FAKECUDA_HBM"])
    assert not seen.is_integrated


@pytest.mark.parametrize("name", PROPERTIES)
def test_nothing_that_torch_may_divide_by_is_zero(name: str) -> None:
    assert getattr(torch.cuda.get_device_properties(0), name) > 0


def test_the_driver_and_the_runtime_name_one_machine() -> None:
    from supertuner.memory.cuda import CudaDriver, open_cuda

    driver = open_cuda()
    assert isinstance(driver, CudaDriver)
    (device,) = driver.devices()
    assert device.name == torch.cuda.get_device_name(0)
    assert device.total_bytes == torch.cuda.get_device_properties(0).total_memory
    assert device.host_page_tables


def test_torch_and_the_driver_count_the_same_bytes() -> None:
    from supertuner.memory.cuda import CudaDriver, open_cuda

    driver = open_cuda()
    assert isinstance(driver, CudaDriver)
    before = driver.free_bytes(0)
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert before - driver.free_bytes(0) == held.nbytes
    assert torch.cuda.mem_get_info()[0] == driver.free_bytes(0)


@pytest.mark.parametrize(("profile", "integrated"), [("gb10", True), ("pcie", False)])
def test_another_machine_is_a_variable_away(profile: str, integrated: bool) -> None:
    code = "import torch; torch.ones(4, device='cuda'); print(bool(torch.cuda.get_device_properties(0).is_integrated))"
    env = {**os.environ, "FAKECUDA_PROFILE": profile}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(integrated)


def test_two_gpus_have_memory_of_their_own() -> None:
    code = """
import torch
one = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:1")
print([torch.cuda.mem_get_info(d)[1] - torch.cuda.mem_get_info(d)[0] for d in (0, 1)], one.to("cuda:0").device)
"""
    env = {**os.environ, "FAKECUDA_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[0, {1 << 28}] cuda:0"


def test_allocator_settings_that_torch_refuses_are_named_not_a_traceback() -> None:
    code = """
from supertuner.core.errors import TrainError
from supertuner.train.run_checks import select_device
try:
    select_device("auto")
except TrainError as error:
    print(error)
"""
    env = {**os.environ, "PYTORCH_ALLOC_CONF": "no_such_key:1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch refuses its allocator settings: Unrecognized key 'no_such_key'")
    assert done.stdout.strip().endswith("Correct PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF")

"""What is real of the phantom's memory: bytes that are copied arrive; what a kernel would have written is zeros."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [1, 4096, 65537, 5 * MIB + 3])
def test_what_is_copied_to_the_gpu_and_back_is_the_same(nbytes: int) -> None:
    host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    there = host.to("cuda")
    assert torch.equal(there.cpu(), host)
    assert torch.equal(there.clone().cpu(), host)


def test_a_copy_between_holes_and_data_is_exact() -> None:
    """Blocks of zeros are not written but given back: what surrounds them must not go with them."""
    host = torch.zeros(9 * MIB, dtype=torch.uint8)
    host[100:200] = 7
    host[3 * MIB + 5] = 8
    host[-1] = 9
    target = torch.full_like(host, 1).to("cuda")
    target[17:].copy_(host[17:].to("cuda"))
    expected = host.clone()
    expected[:17] = 1
    assert torch.equal(target.cpu(), expected)


def test_zeroing_leaves_its_neighbours_alone() -> None:
    host = torch.full((8 * MIB,), 3, dtype=torch.uint8)
    there = host.to("cuda")
    runtime = ctypes.CDLL("libcudart.so.13")  # torch's own zero_() may be a kernel, and kernels do nothing
    assert runtime.cudaMemset(ctypes.c_void_p(there.data_ptr() + 5), 0, ctypes.c_size_t(6 * MIB - 4)) == 0
    host[5 : 6 * MIB + 1] = 0
    assert torch.equal(there.cpu(), host)


@pytest.mark.parametrize("nbytes", [512, 4 * MIB])
def test_the_result_of_a_kernel_is_zeros_and_not_what_lay_there_before(nbytes: int) -> None:
    stale = torch.full((nbytes,), 255, dtype=torch.uint8).to("cuda")
    address = stale.data_ptr()
    del stale
    result = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    assert result.data_ptr() == address
    assert not result.cpu().any()


def test_a_capsule_makes_a_cuda_tensor_of_the_same_memory() -> None:
    there = torch.arange(1000).to("cuda")
    again = from_dlpack(to_dlpack(there))
    assert again.device.type == "cuda"
    assert again.data_ptr() == there.data_ptr()
    assert torch.equal(again.cpu(), torch.arange(1000))


def test_safetensors_writes_and_reads_cuda_tensors(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from safetensors.torch import load_file, save_file

    weights = {"a": torch.randn(64, 64).to("cuda"), "b": torch.arange(7).to("cuda")}
    save_file(weights, tmp_path / "x.safetensors")
    for name, tensor in load_file(tmp_path / "x.safetensors", device="cuda").items():
        assert tensor.is_cuda and torch.equal(tensor.cpu(), weights[name].cpu())

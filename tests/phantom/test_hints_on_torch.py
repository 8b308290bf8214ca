"""Hints and unified batches on torch's real CUDA tensors: its allocator, its events, its storages, the fake driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from supertuner.core.types import MIB
from supertuner.memory.cuda import CudaDriver, open_cuda
from supertuner.memory.driver import MemoryKind
from supertuner.memory.hints import api as process
from supertuner.memory.hints.api import HintStatus, ResidencyHints
from supertuner.memory.unified.buffers import UnifiedBuffers
from supertuner.step.batch import StepBatch

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def driver() -> CudaDriver:
    found = open_cuda()
    assert isinstance(found, CudaDriver)
    return found


def test_what_torch_allocates_is_device_memory_and_its_hints_have_no_effect(driver: CudaDriver) -> None:
    tensor, hints = torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE), ResidencyHints(driver)
    assert driver.memory_kind_at(tensor.data_ptr()) is MemoryKind.DEVICE
    assert hints.prefetch(tensor).reason == "device memory never leaves its GPU"
    assert hints.prefer_gpu(tensor).status is HintStatus.NO_EFFECT
    assert hints.prefer_cpu(tensor).status is HintStatus.UNSUPPORTED


def test_the_caching_allocators_reuse_of_an_address_is_another_tensor(driver: CudaDriver) -> None:
    hints = ResidencyHints(driver)
    first = torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
    address = first.data_ptr()
    hints.prefetch(first)
    assert len(hints._applied_hints) == 1
    del first
    gc.collect()
    assert len(hints._applied_hints) == 0
    second = torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
    assert second.data_ptr() == address
    assert hints.prefetch(second).status is HintStatus.NO_EFFECT


def test_pinned_memory_is_told_apart(driver: CudaDriver) -> None:
    pinned = torch.zeros(MIB, dtype=torch.uint8).pin_memory()
    assert ResidencyHints(driver).prefetch(pinned).reason == "pinned memory is locked in host memory"


def test_a_batch_in_unified_memory_is_tensors_of_cuda_with_the_same_bytes(driver: CudaDriver) -> None:
    buffers = UnifiedBuffers(driver, DEVICE)
    latents, mask = torch.randn(2, 16, 64, 64).to(torch.bfloat16), torch.tensor([True, False])
    placed, outcome = buffers.place([latents, mask])
    assert placed is not None
    assert outcome.status is HintStatus.APPLIED
    assert [tensor.device for tensor in placed] == [DEVICE, DEVICE]
    assert [(t.dtype, t.shape) for t in placed] == [(torch.bfloat16, latents.shape), (torch.bool, mask.shape)]
    assert driver.memory_kind_at(placed[0].data_ptr()) is MemoryKind.MANAGED
    assert torch.equal(placed[0].cpu(), latents)
    assert placed[1].tolist() == [True, False]


def test_unified_memory_takes_the_hints_that_device_memory_does_not(driver: CudaDriver) -> None:
    placed, _ = UnifiedBuffers(driver, DEVICE).place([torch.zeros(MIB)])
    assert placed is not None
    assert ResidencyHints(driver).prefer_cpu(placed[0]).status is HintStatus.APPLIED


def test_a_block_comes_again_after_its_tensors_and_the_stream_are_done(driver: CudaDriver) -> None:
    buffers = UnifiedBuffers(driver, DEVICE)
    placed, _ = buffers.place([torch.zeros(MIB)])
    assert placed is not None
    address = placed[0].data_ptr()
    weight = torch.ones(MIB, device=DEVICE, requires_grad=True)
    loss = (weight * placed[0]).sum()
    del placed
    buffers.reclaim_blocks()
    assert buffers.blocks_in_use == 1, "autograd saved it"
    loss.backward()
    del loss
    gc.collect()
    torch.cuda.synchronize()
    buffers.reclaim_blocks()
    assert buffers.blocks_in_use == 0
    again, _ = buffers.place([torch.zeros(MIB)])
    assert again is not None and again[0].data_ptr() == address
    del again
    buffers.close()
    assert buffers.held_bytes == 0


def test_torchs_allocator_knows_nothing_of_unified_batches(driver: CudaDriver) -> None:
    before = torch.cuda.memory_allocated()
    placed, _ = UnifiedBuffers(driver, DEVICE).place([torch.zeros(8 * MIB)])
    assert placed is not None
    assert torch.cuda.memory_allocated() == before


def test_a_step_batch_is_counted_by_the_policy(driver: CudaDriver) -> None:
    batch = StepBatch(
        latents=torch.zeros(1, 16, 64, 64),
        noise=torch.zeros(1, 16, 64, 64),
        sigmas=torch.zeros(1),
        text={"prompt_embeds": torch.zeros(1, 512, 4096)},
        conditions={},
    ).to(DEVICE)
    hints = ResidencyHints(driver)
    counts = hints.place_batch(batch.named_tensors())
    assert sum(counts.values()) == 4
    assert {status for status, _ in counts} == {HintStatus.NO_EFFECT}
    assert hints.place_batch(batch.named_tensors()) == counts


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    process.reset_hints()
    monkeypatch.setenv("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "1")
    yield
    process.reset_hints()


def test_the_seeds_functions_work_on_stock_torch(fresh: None) -> None:
    from supertuner import gh200

    assert gh200.gh200_uvm_enabled()
    told = gh200.prefetch_to_device(torch.zeros(MIB))
    assert told.applied_to, "the driver was told"
    # The fake driver says yes, and the real kernel knows that nothing moved, where it may be asked at all.
    assert told.status in (HintStatus.NO_EFFECT, HintStatus.UNVERIFIED)
    batch = {"latents": torch.zeros(1, 4, 64, 64, device=DEVICE), "audio_latents": torch.zeros(MIB)}
    counted = gh200.optimize_batch_for_gh200(batch)
    assert sum(count for _, _, count in counted.rows) == 2
    gh200.set_uvm_hint_override(False)
    assert not gh200.gh200_uvm_enabled()

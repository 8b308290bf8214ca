"""Hints through the real bindings on the fake driver: its calls, its read-back, and the location of its pages."""

from __future__ import annotations

import ctypes

import torch

from supertuner.memory.driver import HOST, AddressRange, GpuLocation, MemoryKind
from supertuner.memory.hints.api import HintStatus, ResidencyHints
from tests.memory.on_fake import FakeBench, on_fake

PAGES = 64


def host_bytes(bench: FakeBench) -> torch.Tensor:
    page = bench.driver.page_bytes
    memory = torch.zeros((PAGES + 1) * page, dtype=torch.uint8)
    begin = -memory.data_ptr() % page
    return memory[begin : begin + PAGES * page]


def managed(bench: FakeBench) -> tuple[AddressRange, torch.Tensor]:
    nbytes = PAGES * bench.driver.page_bytes
    address = bench.driver.allocate(MemoryKind.MANAGED, nbytes)
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    return AddressRange(address, nbytes), torch.frombuffer(buffer, dtype=torch.uint8)


@on_fake()
def test_managed_memory_is_hinted_and_read_back(bench: FakeBench) -> None:
    span, tensor = managed(bench)
    hints = ResidencyHints(bench.driver)
    assert hints.prefer_cpu(tensor).status is HintStatus.APPLIED
    assert bench.driver.preferred_location(span) == HOST
    assert hints.prefer_gpu(tensor).status is HintStatus.APPLIED
    assert bench.driver.preferred_location(span) == GpuLocation(0)
    outcome = hints.prefetch(tensor)
    assert (outcome.status, outcome.applied_to) == (HintStatus.APPLIED, (span,))
    bench.driver.synchronize()
    assert bench.resident(span)[GpuLocation(0)] == PAGES
    assert hints.accessed_by(tensor).status is HintStatus.APPLIED
    assert hints.read_mostly(tensor).status is HintStatus.APPLIED
    bench.driver.free(span.address)


@on_fake()
def test_ordinary_memory_migrates_to_the_gpu_and_its_pages_are_located_there(bench: FakeBench) -> None:
    tensor = host_bytes(bench)
    span = AddressRange(tensor.data_ptr(), tensor.nbytes)
    outcome = ResidencyHints(bench.driver).prefetch(tensor)
    assert (outcome.status, outcome.reason) == (HintStatus.APPLIED, "the kernel finds its pages there")
    assert bench.resident(span)[GpuLocation(0)] == PAGES


@on_fake()
def test_a_view_is_hinted_and_nothing_else(bench: FakeBench) -> None:
    page = bench.driver.page_bytes
    span, tensor = managed(bench)
    bench.fake.host_touch(span.address, span.nbytes)
    outcome = ResidencyHints(bench.driver).prefetch(tensor.view(-1, 4 * page)[:, 1 : 2 * page])
    bench.driver.synchronize()
    assert len(outcome.applied_to) == PAGES // 4
    assert bench.resident(span)[GpuLocation(0)] == PAGES // 4
    bench.driver.free(span.address)


@on_fake()
def test_a_repeated_hint_makes_no_driver_call(bench: FakeBench) -> None:
    span, tensor = managed(bench)
    hints = ResidencyHints(bench.driver)
    batch = {"latents": tensor, "text.mask": tensor[:100]}
    first = hints.place_batch(batch)
    called = {name: bench.fake.calls(name) for name in ("cuMemPrefetchBatchAsync", "cuPointerGetAttributes")}
    assert called["cuMemPrefetchBatchAsync"] == 1
    assert hints.place_batch(batch) == first
    assert {name: bench.fake.calls(name) for name in called} == called
    bench.driver.free(span.address)


@on_fake()
def test_advice_without_effect_makes_no_driver_call(bench: FakeBench) -> None:
    outcome = ResidencyHints(bench.driver).accessed_by(host_bytes(bench))
    assert outcome.status is HintStatus.NO_EFFECT
    assert bench.fake.calls("cuMemAdvise") == 0


@on_fake()
def test_driver_errors_are_reported_by_name(bench: FakeBench) -> None:
    span, tensor = managed(bench)
    hints = ResidencyHints(bench.driver)
    bench.fail("prefetch", "CUDA_ERROR_INVALID_VALUE")
    outcome = hints.prefetch(tensor)
    assert (outcome.status, outcome.applied_to) == (HintStatus.REFUSED, ())
    assert outcome.reason == "cuMemPrefetchBatchAsync: CUDA_ERROR_INVALID_VALUE"
    bench.fail("advise", "CUDA_ERROR_NOT_SUPPORTED")
    assert hints.prefer_cpu(tensor).status is HintStatus.UNSUPPORTED
    bench.fail("preferred_location", "CUDA_ERROR_INVALID_VALUE")
    assert hints.prefer_gpu(tensor).status is HintStatus.UNVERIFIED
    bench.driver.free(span.address)


@on_fake(driver=12020)
def test_an_older_driver_receives_one_call_per_piece(bench: FakeBench) -> None:
    span, tensor = managed(bench)
    rows = tensor.view(-1, 2 * bench.driver.page_bytes)[:, : bench.driver.page_bytes]
    assert ResidencyHints(bench.driver).prefetch(rows).status is HintStatus.APPLIED
    assert bench.fake.calls("cuMemPrefetchAsync") == PAGES // 2
    bench.driver.free(span.address)


@on_fake("pcie")
def test_a_card_accepts_hints_for_managed_memory_only(bench: FakeBench) -> None:
    span, tensor = managed(bench)
    assert ResidencyHints(bench.driver).prefetch(tensor).status is HintStatus.APPLIED
    assert ResidencyHints(bench.driver).prefetch(host_bytes(bench)).status is HintStatus.UNSUPPORTED
    bench.driver.free(span.address)


@on_fake("gb10")
def test_hints_have_no_effect_on_a_one_pool_machine(bench: FakeBench) -> None:
    assert ResidencyHints(bench.driver).prefetch(host_bytes(bench)).reason == "CPU and GPU share one pool of memory"


@on_fake()
def test_device_memory_is_recognised(bench: FakeBench) -> None:
    nbytes = PAGES * bench.driver.page_bytes
    address = bench.driver.allocate(MemoryKind.DEVICE, nbytes)
    tensor = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    hints = ResidencyHints(bench.driver)
    assert hints.prefetch(tensor).status is HintStatus.NO_EFFECT
    assert hints.prefer_cpu(tensor).status is HintStatus.UNSUPPORTED
    bench.driver.free(address)


@on_fake()
def test_headroom_is_kept_according_to_the_drivers_free_memory(bench: FakeBench) -> None:
    span, tensor = managed(bench)
    taken = bench.driver.allocate(MemoryKind.DEVICE, bench.driver.free_bytes(0) * 97 // 100)
    outcome = ResidencyHints(bench.driver).prefetch(tensor)
    assert (outcome.status, outcome.reason) == (HintStatus.REFUSED, "too little GPU memory would stay free")
    assert bench.fake.calls("cuMemPrefetchBatchAsync") == 0
    bench.driver.free(taken)
    bench.driver.free(span.address)

"""A repeated hint is a look-up, and nothing is remembered about memory that may belong to another tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from supertuner.memory.driver import HOST, AddressRange, GpuLocation, MemoryKind, NotAvailable
from supertuner.memory.emulator.configuration import InjectedFault
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.hints.api import HintStatus, ResidencyHints
from tests.memory.tensors import PAGE, DriverMemory, host_tensor, superchip

GPU = GpuLocation(0)


def break_driver(driver: EmulatedSuperchip) -> None:
    """Let every driver call fail from now on, so that a hint that succeeds did not call it."""
    for verb in ("memory_kind_at", "advise", "prefetch", "preferred_location", "last_prefetch_location"):
        driver.inject_fault(InjectedFault(verb, "CUDA_ERROR_UNKNOWN", times=1000))


def test_a_repeated_hint_does_not_call_the_driver() -> None:
    driver = superchip()
    hints, tensor = ResidencyHints(driver), DriverMemory(driver, MemoryKind.MANAGED).tensor()
    first = [hints.prefer_cpu(tensor), hints.prefetch(tensor)]
    break_driver(driver)
    assert [hints.prefer_cpu(tensor), hints.prefetch(tensor)] == first
    assert hints.prefer_cpu(tensor[:]) == first[0]
    assert hints.prefer_cpu(tensor[:-1]).status is HintStatus.ERROR


def test_memory_that_another_tensor_reuses_is_hinted_again() -> None:
    """Like a caching allocator: the same address with another storage, and the driver saw neither free nor
    allocation.
    """
    driver = superchip()
    memory, hints = DriverMemory(driver, MemoryKind.MANAGED), ResidencyHints(driver)
    first = memory.tensor()
    assert hints.prefer_cpu(first).status is HintStatus.APPLIED
    del first
    break_driver(driver)
    assert hints.prefer_cpu(memory.tensor()).status is HintStatus.ERROR


def test_memory_that_malloc_returns_again_is_hinted_again() -> None:
    driver = superchip()
    hints, seen = ResidencyHints(driver), set()
    for _ in range(20):
        tensor = torch.empty(8 * PAGE, dtype=torch.uint8)
        reused = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        driver.inject_fault(InjectedFault("prefetch", "CUDA_ERROR_INVALID_VALUE"))
        assert hints.prefetch(tensor).status is HintStatus.REFUSED
        assert hints.prefetch(tensor).accepted
        if reused:
            return
        del tensor
    pytest.skip("malloc gave no address twice")


def test_an_entry_ends_with_the_storage_and_not_with_one_of_its_tensors() -> None:
    driver = superchip()
    hints, tensor = ResidencyHints(driver), host_tensor()
    hints.prefetch(tensor)
    view = tensor[:]
    del tensor
    gc.collect()
    assert len(hints._applied_hints) == 1
    break_driver(driver)
    assert hints.prefetch(view).status is HintStatus.APPLIED
    del view
    gc.collect()
    assert len(hints._applied_hints) == 0


def test_a_storage_with_a_new_address_is_hinted_again() -> None:
    driver = superchip()
    hints, tensor = ResidencyHints(driver), torch.zeros(4 * PAGE, dtype=torch.uint8)
    hints.prefetch(tensor)
    tensor.untyped_storage().resize_(64 * PAGE)
    break_driver(driver)
    assert hints.prefetch(tensor).status is HintStatus.ERROR


@pytest.mark.parametrize("other", [lambda t: t, lambda t: t[: 2 * PAGE], lambda t: t[4 * PAGE :]])
def test_a_hint_is_issued_again_after_a_conflicting_hint_for_some_of_its_bytes(
    other: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    driver = superchip()
    memory, hints = DriverMemory(driver, MemoryKind.MANAGED), ResidencyHints(driver)
    tensor = memory.tensor()
    hints.prefer_cpu(tensor)
    hints.prefer_gpu(other(tensor))
    assert hints.prefer_cpu(tensor).status is HintStatus.APPLIED
    assert driver.preferred_location(memory.span) == HOST


def test_a_conflicting_hint_through_another_storage_drops_the_entry() -> None:
    driver = superchip()
    memory, hints = DriverMemory(driver, MemoryKind.MANAGED), ResidencyHints(driver)
    one, other = memory.tensor(), memory.tensor()
    hints.prefer_cpu(one)
    hints.prefer_gpu(other)
    hints.prefer_cpu(one)
    assert driver.preferred_location(memory.span) == HOST


def test_a_forgotten_hint_is_issued_again() -> None:
    driver = superchip()
    hints, kept, lost = ResidencyHints(driver), host_tensor(), host_tensor()
    hints.prefetch(kept)
    hints.prefetch(lost)
    hints.forget(AddressRange(lost.data_ptr() + PAGE, PAGE))
    break_driver(driver)
    assert hints.prefetch(kept).status is HintStatus.APPLIED
    assert hints.prefetch(lost).status is HintStatus.ERROR
    hints.forget()
    assert hints.prefetch(kept).status is HintStatus.ERROR


def test_a_prefetch_can_be_forced_after_an_eviction() -> None:
    driver = superchip()
    memory, hints = DriverMemory(driver, MemoryKind.MANAGED), ResidencyHints(driver)
    tensor = memory.tensor()
    hints.prefetch(tensor)
    driver.prefetch([memory.span], HOST)
    hints.prefetch(tensor)
    assert driver.resident_pages(memory.span) == {HOST: 16}
    hints.prefetch(tensor, force=True)
    assert driver.resident_pages(memory.span) == {GPU: 16}


def test_the_number_of_remembered_storages_is_limited() -> None:
    hints, alive = ResidencyHints(NotAvailable("none")), [torch.zeros(1) for _ in range(1100)]
    for tensor in alive:
        hints.prefetch(tensor)
    assert len(hints._applied_hints) == 1024

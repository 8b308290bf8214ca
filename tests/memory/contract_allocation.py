"""Contract tests of allocating and freeing memory: accounting, kinds, contents, injected faults, threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from supertuner.memory.driver import HOST, AddressRange, DriverError, MemoryAdvice, MemoryKind
from tests.memory.bench import (
    BLOCK,
    GPU,
    INVALID_DEVICE,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    DriverBench,
    allocated,
    device,
    fails_once,
    gpu_kinds,
    kinds,
    migrates_pages,
    needs,
    on_gpu,
    prefetch_and_wait,
    refuses,
    start,
)


class AllocationContract:
    def test_device_memory_reduces_the_free_bytes_until_it_is_freed(self, bench: DriverBench) -> None:
        before = bench.driver.free_bytes(0)
        address = bench.driver.allocate(MemoryKind.DEVICE, 4 * BLOCK)
        assert bench.driver.free_bytes(0) == before - 4 * BLOCK
        bench.driver.free(address)
        assert bench.driver.free_bytes(0) == before

    def test_free_bytes_do_not_exceed_the_device(self, bench: DriverBench) -> None:
        assert 0 < bench.driver.free_bytes(0) <= device(bench).total_bytes

    def test_device_memory_beyond_free_memory_is_refused_without_side_effects(self, bench: DriverBench) -> None:
        before = bench.driver.free_bytes(0)
        with pytest.raises(DriverError) as refused:
            bench.driver.allocate(MemoryKind.DEVICE, before + BLOCK)
        assert refused.value.name == OUT_OF_MEMORY
        assert not refused.value.unsupported, "a smaller request would succeed"
        assert bench.driver.free_bytes(0) == before

    def test_all_free_memory_can_be_allocated(self, bench: DriverBench) -> None:
        all_of_it = bench.driver.free_bytes(0) // BLOCK * BLOCK
        address = bench.driver.allocate(MemoryKind.DEVICE, all_of_it)
        bench.driver.free(address)

    def test_allocations_do_not_overlap(self, bench: DriverBench) -> None:
        spans = []
        for kind in kinds(bench) * 3:
            spans.append(
                AddressRange(bench.driver.allocate(kind, bench.driver.page_bytes + 1), bench.driver.page_bytes + 1)
            )
        for before, after in zip(sorted(spans, key=start), sorted(spans, key=start)[1:], strict=False):
            assert before.end <= after.address
        for span in spans:
            bench.driver.free(span.address)

    @needs("prefetch")
    def test_managed_memory_occupies_gpu_memory_when_the_gpu_fills_it(self, bench: DriverBench) -> None:
        # without concurrent access its GPU memory may be reserved from the start
        before = bench.driver.free_bytes(0)
        with allocated(bench, MemoryKind.MANAGED, 4 * BLOCK) as span:
            assert bench.driver.free_bytes(0) == before
            bench.driver.fill(span, 1)
            assert bench.driver.free_bytes(0) == before - 4 * BLOCK
        assert bench.driver.free_bytes(0) == before

    def test_an_empty_request_is_refused(self, bench: DriverBench) -> None:
        for kind in kinds(bench):
            refuses(INVALID_VALUE, bench.driver.allocate, kind, 0)
        if migrates_pages(bench):
            with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
                empty = AddressRange(span.address, 0)
                refuses(INVALID_VALUE, bench.driver.prefetch, [empty], GPU)
                refuses(INVALID_VALUE, bench.driver.advise, empty, MemoryAdvice.PREFERRED_LOCATION, HOST)

    def test_a_missing_device_is_refused(self, bench: DriverBench) -> None:
        with pytest.raises(DriverError) as refused:
            bench.driver.allocate(MemoryKind.DEVICE, BLOCK, device=len(bench.driver.devices()))
        assert refused.value.name == INVALID_DEVICE

    def test_memory_has_the_requested_kind_at_every_address(self, bench: DriverBench) -> None:
        for kind in kinds(bench):
            address = bench.driver.allocate(kind, BLOCK)
            for offset in (0, 1, BLOCK // 2, BLOCK - 1):
                assert bench.driver.memory_kind_at(address + offset) is kind
            bench.driver.free(address)

    def test_memory_that_the_driver_does_not_know_is_system_memory(self, bench: DriverBench) -> None:
        assert bench.driver.memory_kind_at(0x10) is MemoryKind.SYSTEM
        address = bench.driver.allocate(MemoryKind.DEVICE, BLOCK)
        bench.driver.free(address)
        assert bench.driver.memory_kind_at(address) is MemoryKind.SYSTEM, "the driver does not know freed memory"

    def test_freeing_a_foreign_or_inner_address_is_refused_without_side_effects(self, bench: DriverBench) -> None:
        for kind in kinds(bench):
            address = bench.driver.allocate(kind, 2 * BLOCK)
            free = bench.driver.free_bytes(0)
            for wrong in (address + bench.driver.page_bytes, address + 1, 0x10):
                refuses(INVALID_VALUE, bench.driver.free, wrong)
            assert bench.driver.memory_kind_at(address) is kind
            assert bench.driver.free_bytes(0) == free
            bench.driver.free(address)
            refuses(INVALID_VALUE, bench.driver.free, address)

    def test_filled_bytes_are_read_back_exactly(self, bench: DriverBench) -> None:
        page = bench.driver.page_bytes
        for kind in gpu_kinds(bench):
            with allocated(bench, kind, BLOCK) as span:
                bench.driver.fill(span, 7)
                bench.driver.fill(AddressRange(span.address + page // 2, page), 9)
                bench.driver.fill(AddressRange(span.address + page, 3), 11)
                expected = bytes([7]) * (page // 2) + bytes([9]) * page + bytes([7]) * (page // 2)
                expected = expected[:page] + bytes([11]) * 3 + expected[page + 3 :]
                assert bench.driver.read(AddressRange(span.address, 2 * page)) == expected
                assert bench.driver.read(AddressRange(span.address + page - 1, 5)) == bytes([9, 11, 11, 11, 9])

    def test_a_copy_transfers_bytes_between_all_kinds(self, bench: DriverBench) -> None:
        page = bench.driver.page_bytes
        for source_kind in gpu_kinds(bench):
            for target_kind in kinds(bench):
                with allocated(bench, source_kind, BLOCK) as source, allocated(bench, target_kind, BLOCK) as target:
                    bench.driver.fill(source, 3)
                    bench.driver.fill(AddressRange(source.address + 5, page), 4)
                    bench.driver.copy(target.address, source.address, BLOCK)
                    bench.driver.copy(target.address + page + 1, source.address + 3, 4)
                    found = bench.driver.read(AddressRange(target.address, 2 * page))
                    assert found[:6] == bytes([3] * 5 + [4])
                    assert found[page : page + 6] == bytes([4, 3, 3, 4, 4, 3])
                    assert bench.driver.read(AddressRange(target.end - 1, 1)) == bytes([3])

    def test_a_fill_beyond_its_allocation_is_refused(self, bench: DriverBench) -> None:
        address = bench.driver.allocate(MemoryKind.DEVICE, BLOCK)
        refuses(INVALID_VALUE, bench.driver.fill, AddressRange(address + BLOCK // 2, bench.hbm_bytes), 1)
        bench.driver.free(address)

    @pytest.mark.parametrize("verb", ["allocate", "free", "free_bytes", "fill", "copy", "synchronize"])
    @needs("injected faults")
    def test_an_injected_fault_raises_its_own_error_once(self, bench: DriverBench, verb: str) -> None:
        with allocated(bench, MemoryKind.DEVICE, BLOCK) as span:
            spare = [bench.driver.allocate(MemoryKind.DEVICE, BLOCK)]
            act: Mapping[str, Callable[[], object]] = {
                "allocate": lambda: spare.append(bench.driver.allocate(MemoryKind.DEVICE, BLOCK)),
                "free": lambda: (bench.driver.free(spare[-1]), spare.pop()),
                "free_bytes": lambda: bench.driver.free_bytes(0),
                "fill": lambda: bench.driver.fill(span, 1),
                "copy": lambda: bench.driver.copy(span.address, spare[0], BLOCK // 2),
                "synchronize": lambda: bench.driver.synchronize(),
            }
            fails_once(bench, verb, act[verb], spare)

    @pytest.mark.parametrize("verb", ["advise", "prefetch", "preferred_location", "last_prefetch_location"])
    @needs("prefetch", "injected faults")
    def test_an_injected_fault_in_a_hint_raises_its_own_error_once(self, bench: DriverBench, verb: str) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            prefer = MemoryAdvice.PREFERRED_LOCATION
            act: Mapping[str, Callable[[], object]] = {
                "advise": lambda: bench.driver.advise(span, prefer, HOST),
                "prefetch": lambda: bench.driver.prefetch([span], GPU),
                "preferred_location": lambda: bench.driver.preferred_location(span),
                "last_prefetch_location": lambda: bench.driver.last_prefetch_location(span),
            }
            fails_once(bench, verb, act[verb], [])

    @needs("prefetch", "discard", "injected faults")
    def test_a_fault_in_a_discard_surfaces_under_its_own_name_once(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            fails_once(bench, "discard", lambda: bench.driver.discard([span]), [])

    @needs("oversubscription", "page locations", "injected faults")
    def test_what_a_fault_stopped_did_not_happen(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            bench.fail("prefetch", "CUDA_ERROR_UNKNOWN")
            refuses("CUDA_ERROR_UNKNOWN", bench.driver.prefetch, [span], GPU)
            assert on_gpu(bench, span) == 0
            assert bench.driver.last_prefetch_location(span) is None

    def test_threads_keep_the_account_exact(self, bench: DriverBench) -> None:
        before = bench.driver.free_bytes(0)
        kind = MemoryKind.MANAGED if migrates_pages(bench) else MemoryKind.DEVICE

        def work(seed: int) -> None:
            for turn in range(25):
                with allocated(bench, kind, BLOCK) as span:
                    if migrates_pages(bench):
                        prefetch_and_wait(bench, [span], GPU if turn % 3 else HOST)
                    bench.driver.fill(span, seed)
                    assert bench.driver.read(AddressRange(span.address, 1)) == bytes([seed])
                    assert bench.driver.memory_kind_at(span.address) is kind

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # so that Python switches threads very often
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(work, range(1, 5)))
        finally:
            sys.setswitchinterval(interval)
        assert bench.driver.free_bytes(0) == before

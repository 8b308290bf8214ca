"""Laws of what is advised, and of system memory, for which advice and movement have rules of their own."""

from __future__ import annotations

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
    needs_ats,
    needs_movement,
    needs_prefetch,
    on_gpu,
    on_host,
    pages,
    prefetch_and_wait,
    refuses,
    resident,
)


class AdviceLaws:
    def test_a_preferred_location_is_read_back_and_moves_nothing(self, bench: DriverBench) -> None:
        needs_prefetch(bench)
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            assert bench.driver.preferred_location(span) is None
            bench.driver.fill(span, 1)
            before = dict(resident(bench, span))
            for home in (HOST, GPU):
                bench.driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, home)
                assert bench.driver.preferred_location(span) == home
                assert dict(resident(bench, span)) == before
            bench.driver.unadvise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)  # whichever home is named: it is ignored
            assert bench.driver.preferred_location(span) is None

    def test_a_range_with_two_preferences_has_none(self, bench: DriverBench) -> None:
        needs_prefetch(bench)
        with allocated(bench, MemoryKind.MANAGED, 2 * BLOCK) as span:
            first, second = AddressRange(span.address, BLOCK), AddressRange(span.address + BLOCK, BLOCK)
            bench.driver.advise(first, MemoryAdvice.PREFERRED_LOCATION, HOST)
            assert bench.driver.preferred_location(span) is None, "a part without one"
            bench.driver.advise(second, MemoryAdvice.PREFERRED_LOCATION, GPU)
            assert bench.driver.preferred_location(span) is None
            assert (bench.driver.preferred_location(first), bench.driver.preferred_location(second)) == (HOST, GPU)

    def test_memory_that_prefers_the_host_and_lies_there_is_not_moved_by_the_gpus_use(self, bench: DriverBench) -> None:
        needs_movement(bench)
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            prefetch_and_wait(bench, [span], HOST)
            bench.driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
            bench.driver.fill(span, 1)
            assert on_gpu(bench, span) == 0
            prefetch_and_wait(bench, [span], GPU)
            assert on_gpu(bench, span) == pages(bench, span), "a prefetch moves it all the same"
            assert bench.driver.read(AddressRange(span.address, 2)) == bytes([1, 1])

    def test_without_concurrent_access_no_gpu_can_be_preferred_and_the_host_can(self, bench: DriverBench) -> None:
        if not device(bench).managed or device(bench).concurrent_managed:
            pytest.skip("needs managed memory without concurrent access")
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            prefer = MemoryAdvice.PREFERRED_LOCATION
            assert refuses(INVALID_DEVICE, bench.driver.advise, span, prefer, GPU).unsupported
            bench.driver.advise(span, prefer, HOST)
            assert bench.driver.preferred_location(span) == HOST

    def test_accessed_by_and_read_mostly_are_read_back_for_all_of_a_range(self, bench: DriverBench) -> None:
        needs_prefetch(bench)
        with allocated(bench, MemoryKind.MANAGED, 2 * BLOCK) as span:
            half = AddressRange(span.address, BLOCK)
            assert (bench.driver.accessed_by(span), bench.driver.read_mostly(span)) == ((), False)
            bench.driver.advise(half, MemoryAdvice.ACCESSED_BY, GPU)
            bench.driver.advise(half, MemoryAdvice.READ_MOSTLY, HOST)
            assert (bench.driver.accessed_by(half), bench.driver.read_mostly(half)) == ((GPU,), True)
            assert (bench.driver.accessed_by(span), bench.driver.read_mostly(span)) == ((), False)
            bench.driver.advise(half, MemoryAdvice.ACCESSED_BY, HOST)
            assert set(bench.driver.accessed_by(half)) == {GPU, HOST}
            bench.driver.unadvise(half, MemoryAdvice.ACCESSED_BY, GPU)
            bench.driver.unadvise(half, MemoryAdvice.READ_MOSTLY, HOST)
            assert (bench.driver.accessed_by(half), bench.driver.read_mostly(half)) == ((HOST,), False)

    def test_advice_is_gone_with_its_memory(self, bench: DriverBench) -> None:
        needs_prefetch(bench)
        for _ in range(2):  # whether or not the second allocation has the address of the first
            with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
                assert bench.driver.preferred_location(span) is None
                assert bench.driver.last_prefetch_location(span) is None
                bench.driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
                prefetch_and_wait(bench, [span], HOST)

    def test_system_memory_goes_to_the_gpu_by_its_use_and_does_not_come_back(self, bench: DriverBench) -> None:
        needs_ats(bench)
        with allocated(bench, MemoryKind.SYSTEM, 2 * BLOCK) as span:
            bench.driver.fill(span, 3)
            assert on_gpu(bench, span) == pages(bench, span)
            assert bench.driver.read(span) == bytes([3]) * span.nbytes
            assert on_gpu(bench, span) == pages(bench, span)

    def test_system_memory_on_the_gpu_is_not_evicted_for_device_memory(self, bench: DriverBench) -> None:
        needs_ats(bench)
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with allocated(bench, MemoryKind.SYSTEM, half) as span:
            bench.driver.fill(span, 3)
            refuses(OUT_OF_MEMORY, bench.driver.allocate, MemoryKind.DEVICE, half + 4 * BLOCK)
            assert on_gpu(bench, span) == pages(bench, span)

    def test_system_memory_that_the_gpu_has_no_room_for_stays_with_the_host(self, bench: DriverBench) -> None:
        needs_ats(bench)
        with allocated(bench, MemoryKind.SYSTEM, bench.driver.free_bytes(0) // BLOCK * BLOCK + 4 * BLOCK) as span:
            bench.driver.fill(span, 3)
            assert on_host(bench, span) >= 4 * BLOCK // bench.driver.page_bytes
            assert bench.driver.read(AddressRange(span.end - 2, 2)) == bytes([3, 3])

    def test_a_prefetch_moves_system_memory_both_ways_where_the_gpu_reads_it(self, bench: DriverBench) -> None:
        needs_ats(bench)
        with allocated(bench, MemoryKind.SYSTEM, BLOCK) as span:
            for home, count in ((GPU, pages(bench, span)), (HOST, 0), (GPU, pages(bench, span))):
                prefetch_and_wait(bench, [span], home)
                assert on_gpu(bench, span) == count

    def test_the_gpu_cannot_reach_system_memory_without_pageable_access(self, bench: DriverBench) -> None:
        if device(bench).pageable:
            pytest.skip("the GPU reads system memory here")
        with allocated(bench, MemoryKind.SYSTEM, BLOCK) as span:
            refuses(None, bench.driver.prefetch, [span], GPU)
            refuses(None, bench.driver.advise, span, MemoryAdvice.PREFERRED_LOCATION, GPU)
            refuses(None, bench.driver.fill, span, 1)

    def test_on_ats_advice_of_access_has_no_effect_on_system_memory(self, bench: DriverBench) -> None:
        if not device(bench).host_page_tables:
            pytest.skip("needs ATS")
        with allocated(bench, MemoryKind.SYSTEM, BLOCK) as span:
            bench.driver.advise(span, MemoryAdvice.ACCESSED_BY, GPU)
            bench.driver.advise(span, MemoryAdvice.READ_MOSTLY, GPU)
            before = dict(resident(bench, span))
            bench.driver.fill(span, 2)
            moved = dict(resident(bench, span))
            assert before != moved
            assert sum(moved.values()) == pages(bench, span), "one copy of each page"
            for home in (HOST, GPU, HOST):
                prefetch_and_wait(bench, [span], home)
                assert sum(resident(bench, span).values()) == pages(bench, span), "and no prefetch leaves a copy behind"
            # The documentation promises read-back for managed memory only: a refusal is an answer too.
            for read_back, nothing in ((bench.driver.accessed_by, ()), (bench.driver.read_mostly, False)):
                try:
                    assert read_back(span) == nothing
                except DriverError as refused:
                    assert refused.name == INVALID_VALUE

    def test_pages_are_located_on_their_node_and_unpopulated_ones_nowhere(self, bench: DriverBench) -> None:
        needs_ats(bench)
        page = bench.driver.page_bytes
        with allocated(bench, MemoryKind.SYSTEM, BLOCK) as span:
            addresses = [span.address, span.address + page, span.address + 2 * page]
            assert bench.driver.locate(addresses) == [None, None, None]
            prefetch_and_wait(bench, [AddressRange(span.address, page)], GPU)
            prefetch_and_wait(bench, [AddressRange(span.address + page, page)], HOST)
            found = bench.driver.locate(addresses)
            assert found == [device(bench).numa_node, device(bench).host_node, None]
            assert None not in found[:2]

"""Contract tests of advice, and of system memory, which has its own rules for advice and migration."""

from __future__ import annotations

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
    needs,
    on_gpu,
    on_host,
    pages,
    prefetch_and_wait,
    refuses,
    resident,
)


class AdviceContract:
    @needs("prefetch", "page locations")
    def test_a_preferred_location_is_read_back_and_moves_nothing(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            assert bench.driver.preferred_location(span) is None
            bench.driver.fill(span, 1)
            before = dict(resident(bench, span))
            for home in (HOST, GPU):
                bench.driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, home)
                assert bench.driver.preferred_location(span) == home
                assert dict(resident(bench, span)) == before

    @needs("prefetch")
    def test_a_range_with_two_preferred_locations_reads_back_none(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, 2 * BLOCK) as span:
            first, second = AddressRange(span.address, BLOCK), AddressRange(span.address + BLOCK, BLOCK)
            bench.driver.advise(first, MemoryAdvice.PREFERRED_LOCATION, HOST)
            assert bench.driver.preferred_location(span) is None, "a part has no preferred location"
            bench.driver.advise(second, MemoryAdvice.PREFERRED_LOCATION, GPU)
            assert bench.driver.preferred_location(span) is None
            assert (bench.driver.preferred_location(first), bench.driver.preferred_location(second)) == (HOST, GPU)

    @needs("oversubscription", "page locations")
    def test_memory_at_its_preferred_host_does_not_migrate_when_the_gpu_uses_it(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            prefetch_and_wait(bench, [span], HOST)
            bench.driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
            bench.driver.fill(span, 1)
            assert on_gpu(bench, span) == 0
            prefetch_and_wait(bench, [span], GPU)
            assert on_gpu(bench, span) == pages(bench, span), "a prefetch moves it nevertheless"
            assert bench.driver.read(AddressRange(span.address, 2)) == bytes([1, 1])

    @needs("managed without concurrent access")
    def test_without_concurrent_access_only_the_host_can_be_the_preferred_location(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            prefer = MemoryAdvice.PREFERRED_LOCATION
            assert refuses(INVALID_DEVICE, bench.driver.advise, span, prefer, GPU).unsupported
            bench.driver.advise(span, prefer, HOST)
            assert bench.driver.preferred_location(span) == HOST

    @needs("prefetch")
    def test_accessed_by_and_read_mostly_are_read_back_for_a_whole_range(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, 2 * BLOCK) as span:
            half = AddressRange(span.address, BLOCK)
            assert (bench.driver.accessed_by(span), bench.driver.read_mostly(span)) == ((), False)
            bench.driver.advise(half, MemoryAdvice.ACCESSED_BY, GPU)
            bench.driver.advise(half, MemoryAdvice.READ_MOSTLY, HOST)
            assert (bench.driver.accessed_by(half), bench.driver.read_mostly(half)) == ((GPU,), True)
            assert (bench.driver.accessed_by(span), bench.driver.read_mostly(span)) == ((), False)
            bench.driver.advise(half, MemoryAdvice.ACCESSED_BY, HOST)
            assert set(bench.driver.accessed_by(half)) == {GPU, HOST}

    @needs("prefetch")
    def test_advice_ends_with_its_memory(self, bench: DriverBench) -> None:
        for _ in range(2):  # the second allocation may or may not have the address of the first
            with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
                assert bench.driver.preferred_location(span) is None
                assert bench.driver.last_prefetch_location(span) is None
                bench.driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
                prefetch_and_wait(bench, [span], HOST)

    @needs("ats", "page locations")
    def test_system_memory_migrates_to_the_gpu_on_use_and_does_not_come_back(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.SYSTEM, 2 * BLOCK) as span:
            bench.driver.fill(span, 3)
            assert on_gpu(bench, span) == pages(bench, span)
            assert bench.driver.read(span) == bytes([3]) * span.nbytes
            assert on_gpu(bench, span) == pages(bench, span)

    @needs("ats", "page locations")
    def test_system_memory_on_the_gpu_is_not_evicted_for_device_memory(self, bench: DriverBench) -> None:
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with allocated(bench, MemoryKind.SYSTEM, half) as span:
            bench.driver.fill(span, 3)
            refuses(OUT_OF_MEMORY, bench.driver.allocate, MemoryKind.DEVICE, half + 4 * BLOCK)
            assert on_gpu(bench, span) == pages(bench, span)

    @needs("ats", "page locations")
    def test_system_memory_that_does_not_fit_on_the_gpu_stays_at_the_host(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.SYSTEM, bench.driver.free_bytes(0) // BLOCK * BLOCK + 4 * BLOCK) as span:
            bench.driver.fill(span, 3)
            assert on_host(bench, span) >= 4 * BLOCK // bench.driver.page_bytes
            assert bench.driver.read(AddressRange(span.end - 2, 2)) == bytes([3, 3])

    @needs("ats", "page locations")
    def test_a_prefetch_moves_system_memory_in_both_directions_where_the_gpu_reads_it(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.SYSTEM, BLOCK) as span:
            for home, count in ((GPU, pages(bench, span)), (HOST, 0), (GPU, pages(bench, span))):
                prefetch_and_wait(bench, [span], home)
                assert on_gpu(bench, span) == count

    @needs("no pageable access")
    def test_the_gpu_cannot_access_system_memory_without_pageable_access(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.SYSTEM, BLOCK) as span:
            refuses(None, bench.driver.prefetch, [span], GPU)
            refuses(None, bench.driver.advise, span, MemoryAdvice.PREFERRED_LOCATION, GPU)
            refuses(None, bench.driver.fill, span, 1)

    @needs("host page tables", "page locations")
    def test_on_ats_access_advice_has_no_effect_on_system_memory(self, bench: DriverBench) -> None:
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
                assert sum(resident(bench, span).values()) == pages(bench, span), "no prefetch leaves a copy"
            # The documentation promises read-back only for managed memory, so an error is valid as well.
            for read_back, nothing in ((bench.driver.accessed_by, ()), (bench.driver.read_mostly, False)):
                try:
                    assert read_back(span) == nothing
                except DriverError as refused:
                    assert refused.name == INVALID_VALUE

    @needs("ats")
    def test_pages_are_located_on_their_node_and_unpopulated_pages_have_none(self, bench: DriverBench) -> None:
        page = bench.driver.page_bytes
        with allocated(bench, MemoryKind.SYSTEM, BLOCK) as span:
            addresses = [span.address, span.address + page, span.address + 2 * page]
            assert bench.driver.locate(addresses) == [None, None, None]
            prefetch_and_wait(bench, [AddressRange(span.address, page)], GPU)
            prefetch_and_wait(bench, [AddressRange(span.address + page, page)], HOST)
            found = bench.driver.locate(addresses)
            assert found == [device(bench).numa_node, device(bench).host_node, None]
            assert None not in found[:2]

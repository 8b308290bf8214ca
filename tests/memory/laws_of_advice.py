"""Laws of what is advised, and of system memory, for which advice and movement have rules of their own."""

from __future__ import annotations

import pytest

from supertuner.memory.driver import HOST, Advice, Kind, Refused, Span
from tests.memory.bench import (
    BLOCK,
    GPU,
    INVALID_DEVICE,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    Bench,
    at_home,
    device,
    needs_ats,
    needs_movement,
    needs_prefetch,
    on_gpu,
    pages,
    prefetched,
    refuses,
    resident,
    taken,
)


class AdviceLaws:
    def test_a_preferred_location_is_read_back_and_moves_nothing(self, bench: Bench) -> None:
        needs_prefetch(bench)
        with taken(bench, Kind.MANAGED, BLOCK) as span:
            assert bench.driver.preferred(span) is None
            bench.driver.fill(span, 1)
            before = dict(resident(bench, span))
            for home in (HOST, GPU):
                bench.driver.advise(span, Advice.PREFERRED_LOCATION, home)
                assert bench.driver.preferred(span) == home
                assert dict(resident(bench, span)) == before
            bench.driver.unadvise(span, Advice.PREFERRED_LOCATION, HOST)  # whichever home is named: it is ignored
            assert bench.driver.preferred(span) is None

    def test_a_range_with_two_preferences_has_none(self, bench: Bench) -> None:
        needs_prefetch(bench)
        with taken(bench, Kind.MANAGED, 2 * BLOCK) as span:
            first, second = Span(span.address, BLOCK), Span(span.address + BLOCK, BLOCK)
            bench.driver.advise(first, Advice.PREFERRED_LOCATION, HOST)
            assert bench.driver.preferred(span) is None, "a part without one"
            bench.driver.advise(second, Advice.PREFERRED_LOCATION, GPU)
            assert bench.driver.preferred(span) is None
            assert (bench.driver.preferred(first), bench.driver.preferred(second)) == (HOST, GPU)

    def test_memory_that_prefers_the_host_and_lies_there_is_not_moved_by_the_gpus_use(self, bench: Bench) -> None:
        needs_movement(bench)
        with taken(bench, Kind.MANAGED, BLOCK) as span:
            prefetched(bench, [span], HOST)
            bench.driver.advise(span, Advice.PREFERRED_LOCATION, HOST)
            bench.driver.fill(span, 1)
            assert on_gpu(bench, span) == 0
            prefetched(bench, [span], GPU)
            assert on_gpu(bench, span) == pages(bench, span), "a prefetch moves it all the same"
            assert bench.driver.read(Span(span.address, 2)) == bytes([1, 1])

    def test_without_concurrent_access_no_gpu_can_be_preferred_and_the_host_can(self, bench: Bench) -> None:
        if not device(bench).managed or device(bench).concurrent_managed:
            pytest.skip("needs managed memory without concurrent access")
        with taken(bench, Kind.MANAGED, BLOCK) as span:
            prefer = Advice.PREFERRED_LOCATION
            assert refuses(INVALID_DEVICE, bench.driver.advise, span, prefer, GPU).unsupported
            bench.driver.advise(span, prefer, HOST)
            assert bench.driver.preferred(span) == HOST

    def test_accessed_by_and_read_mostly_are_read_back_for_all_of_a_range(self, bench: Bench) -> None:
        needs_prefetch(bench)
        with taken(bench, Kind.MANAGED, 2 * BLOCK) as span:
            half = Span(span.address, BLOCK)
            assert (bench.driver.accessed_by(span), bench.driver.read_mostly(span)) == ((), False)
            bench.driver.advise(half, Advice.ACCESSED_BY, GPU)
            bench.driver.advise(half, Advice.READ_MOSTLY, HOST)
            assert (bench.driver.accessed_by(half), bench.driver.read_mostly(half)) == ((GPU,), True)
            assert (bench.driver.accessed_by(span), bench.driver.read_mostly(span)) == ((), False)
            bench.driver.advise(half, Advice.ACCESSED_BY, HOST)
            assert set(bench.driver.accessed_by(half)) == {GPU, HOST}
            bench.driver.unadvise(half, Advice.ACCESSED_BY, GPU)
            bench.driver.unadvise(half, Advice.READ_MOSTLY, HOST)
            assert (bench.driver.accessed_by(half), bench.driver.read_mostly(half)) == ((HOST,), False)

    def test_advice_is_gone_with_its_memory(self, bench: Bench) -> None:
        needs_prefetch(bench)
        for _ in range(2):  # whether or not the second allocation has the address of the first
            with taken(bench, Kind.MANAGED, BLOCK) as span:
                assert bench.driver.preferred(span) is None
                assert bench.driver.last_prefetch(span) is None
                bench.driver.advise(span, Advice.PREFERRED_LOCATION, HOST)
                prefetched(bench, [span], HOST)

    def test_system_memory_goes_to_the_gpu_by_its_use_and_does_not_come_back(self, bench: Bench) -> None:
        needs_ats(bench)
        with taken(bench, Kind.SYSTEM, 2 * BLOCK) as span:
            bench.driver.fill(span, 3)
            assert on_gpu(bench, span) == pages(bench, span)
            assert bench.driver.read(span) == bytes([3]) * span.nbytes
            assert on_gpu(bench, span) == pages(bench, span)

    def test_system_memory_on_the_gpu_is_not_evicted_for_device_memory(self, bench: Bench) -> None:
        needs_ats(bench)
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with taken(bench, Kind.SYSTEM, half) as span:
            bench.driver.fill(span, 3)
            refuses(OUT_OF_MEMORY, bench.driver.allocate, Kind.DEVICE, half + 4 * BLOCK)
            assert on_gpu(bench, span) == pages(bench, span)

    def test_system_memory_that_the_gpu_has_no_room_for_stays_with_the_host(self, bench: Bench) -> None:
        needs_ats(bench)
        with taken(bench, Kind.SYSTEM, bench.driver.free_bytes(0) // BLOCK * BLOCK + 4 * BLOCK) as span:
            bench.driver.fill(span, 3)
            assert at_home(bench, span) >= 4 * BLOCK // bench.driver.page_bytes
            assert bench.driver.read(Span(span.end - 2, 2)) == bytes([3, 3])

    def test_a_prefetch_moves_system_memory_both_ways_where_the_gpu_reads_it(self, bench: Bench) -> None:
        needs_ats(bench)
        with taken(bench, Kind.SYSTEM, BLOCK) as span:
            for home, count in ((GPU, pages(bench, span)), (HOST, 0), (GPU, pages(bench, span))):
                prefetched(bench, [span], home)
                assert on_gpu(bench, span) == count

    def test_the_gpu_cannot_reach_system_memory_without_pageable_access(self, bench: Bench) -> None:
        if device(bench).pageable:
            pytest.skip("the GPU reads system memory here")
        with taken(bench, Kind.SYSTEM, BLOCK) as span:
            refuses(None, bench.driver.prefetch, [span], GPU)
            refuses(None, bench.driver.advise, span, Advice.PREFERRED_LOCATION, GPU)
            refuses(None, bench.driver.fill, span, 1)

    def test_on_ats_advice_of_access_has_no_effect_on_system_memory(self, bench: Bench) -> None:
        if not device(bench).host_page_tables:
            pytest.skip("needs ATS")
        with taken(bench, Kind.SYSTEM, BLOCK) as span:
            bench.driver.advise(span, Advice.ACCESSED_BY, GPU)
            bench.driver.advise(span, Advice.READ_MOSTLY, GPU)
            before = dict(resident(bench, span))
            bench.driver.fill(span, 2)
            moved = dict(resident(bench, span))
            assert before != moved
            assert sum(moved.values()) == pages(bench, span), "one copy of each page"
            for home in (HOST, GPU, HOST):
                prefetched(bench, [span], home)
                assert sum(resident(bench, span).values()) == pages(bench, span), "and no prefetch leaves a copy behind"
            # The documentation promises read-back for managed memory only: a refusal is an answer too.
            for read_back, nothing in ((bench.driver.accessed_by, ()), (bench.driver.read_mostly, False)):
                try:
                    assert read_back(span) == nothing
                except Refused as refused:
                    assert refused.name == INVALID_VALUE

    def test_pages_are_located_on_their_node_and_unpopulated_ones_nowhere(self, bench: Bench) -> None:
        needs_ats(bench)
        page = bench.driver.page_bytes
        with taken(bench, Kind.SYSTEM, BLOCK) as span:
            addresses = [span.address, span.address + page, span.address + 2 * page]
            assert bench.driver.locate(addresses) == [None, None, None]
            prefetched(bench, [Span(span.address, page)], GPU)
            prefetched(bench, [Span(span.address + page, page)], HOST)
            found = bench.driver.locate(addresses)
            assert found == [device(bench).numa_node, device(bench).host_node, None]
            assert None not in found[:2]

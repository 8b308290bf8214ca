"""Laws of what moves managed memory: pressure, prefetches, and giving contents up."""

from __future__ import annotations

import pytest

from supertuner.memory.driver import HOST, Advice, HostNode, Kind, Span
from tests.memory.bench import (
    BLOCK,
    CUDA_13,
    GPU,
    INVALID_DEVICE,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    Bench,
    at_home,
    device,
    needs_discard,
    needs_movement,
    needs_oversubscription,
    needs_prefetch,
    on_gpu,
    pages,
    prefetched,
    refuses,
    resident,
    taken,
)


class MovementLaws:
    def test_managed_memory_may_exceed_the_gpu_and_keeps_its_bytes(self, bench: Bench) -> None:
        needs_oversubscription(bench)
        piece = bench.hbm_bytes // 8 // BLOCK * BLOCK
        with taken(bench, Kind.MANAGED, 12 * piece) as span:
            pieces = [Span(span.address + i * piece, piece) for i in range(12)]
            for value, part in enumerate(pieces):
                bench.driver.fill(part, value + 1)
            for value, part in enumerate(pieces):
                assert bench.driver.read(Span(part.address, 2)) == bytes([value + 1] * 2)
                assert bench.driver.read(Span(part.end - 2, 2)) == bytes([value + 1] * 2)

    def test_under_pressure_the_managed_memory_least_recently_used_goes(self, bench: Bench) -> None:
        needs_oversubscription(bench)
        free = bench.driver.free_bytes(0)
        quarter = free // 4 // BLOCK * BLOCK
        over = 5 * quarter - free // BLOCK * BLOCK
        with taken(bench, Kind.MANAGED, 5 * quarter) as span:
            parts = [Span(span.address + i * quarter, quarter) for i in range(5)]
            for value in (0, 1, 2, 3, 0, 4):  # the first is used again, so the second has waited longest
                bench.driver.fill(parts[value], value + 1)
            for number in (0, 2, 3, 4):
                assert on_gpu(bench, parts[number]) == pages(bench, parts[number]), f"part {number} was used later"
            assert at_home(bench, parts[1]) >= over // bench.driver.page_bytes
            assert at_home(bench, parts[1]) + on_gpu(bench, parts[1]) == pages(bench, parts[1])
            for value, part in enumerate(parts):
                assert bench.driver.read(Span(part.end - 2, 2)) == bytes([value + 1] * 2)

    def test_device_memory_is_never_evicted(self, bench: Bench) -> None:
        needs_oversubscription(bench)
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with taken(bench, Kind.DEVICE, half) as device_span, taken(bench, Kind.MANAGED, 3 * half) as managed:
            bench.driver.fill(device_span, 5)
            bench.driver.fill(managed, 6)
            assert on_gpu(bench, device_span) == pages(bench, device_span)
            assert bench.driver.read(Span(device_span.address, 2)) == bytes([5, 5])

    def test_device_memory_evicts_managed_memory_whose_bytes_survive(self, bench: Bench) -> None:
        needs_oversubscription(bench)
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with taken(bench, Kind.MANAGED, half) as managed:
            bench.driver.fill(managed, 6)
            address = bench.driver.allocate(Kind.DEVICE, half + 4 * BLOCK)
            assert bench.driver.read(Span(managed.address, 2)) == bytes([6, 6])
            assert bench.driver.read(Span(managed.end - 2, 2)) == bytes([6, 6])
            bench.driver.free(address)

    def test_without_concurrent_access_managed_memory_cannot_exceed_the_gpu(self, bench: Bench) -> None:
        if not device(bench).managed or device(bench).concurrent_managed:
            pytest.skip("needs managed memory without concurrent access")
        refuses(OUT_OF_MEMORY, bench.driver.allocate, Kind.MANAGED, bench.hbm_bytes + BLOCK)

    def test_without_managed_memory_asking_for_it_is_unsupported(self, bench: Bench) -> None:
        if device(bench).managed:
            pytest.skip("managed memory exists here")
        assert refuses(None, bench.driver.allocate, Kind.MANAGED, BLOCK).unsupported

    def test_a_managed_page_goes_to_the_gpu_when_the_gpu_fills_it(self, bench: Bench) -> None:
        needs_movement(bench)
        with taken(bench, Kind.MANAGED, 4 * BLOCK) as span:
            bench.driver.fill(Span(span.address, BLOCK), 1)
            assert on_gpu(bench, Span(span.address, BLOCK)) == pages(bench, Span(span.address, BLOCK))
            assert resident(bench, Span(span.address + 2 * BLOCK, 2 * BLOCK)).keys() <= {None, HOST}

    def test_a_prefetch_moves_the_pages_of_the_range_and_no_others_there_and_back(self, bench: Bench) -> None:
        needs_movement(bench)
        page = bench.driver.page_bytes
        with taken(bench, Kind.MANAGED, 2 * BLOCK) as span:
            bench.driver.fill(span, 8)
            prefetched(bench, [span], HOST)
            assert (on_gpu(bench, span), at_home(bench, span)) == (0, pages(bench, span))
            inner = Span(span.address + 3 * page, 5 * page)
            prefetched(bench, [inner], GPU)
            assert on_gpu(bench, inner) == 5
            assert on_gpu(bench, span) == 5, "no neighbour moved"
            prefetched(bench, [inner], HOST)
            assert on_gpu(bench, span) == 0
            assert bench.driver.read(Span(inner.address, 2)) == bytes([8, 8])

    def test_a_range_that_cuts_pages_is_rounded_outward_as_documented(self, bench: Bench) -> None:
        needs_movement(bench)
        page = bench.driver.page_bytes
        with taken(bench, Kind.MANAGED, BLOCK) as span:
            cut = Span(span.address + page + 1, page)
            prefetched(bench, [cut], GPU)
            assert on_gpu(bench, span) == 2
            assert bench.driver.last_prefetch(Span(span.address + page, 2 * page)) == GPU

    def test_prefetching_home_gives_the_gpus_memory_back(self, bench: Bench) -> None:
        needs_oversubscription(bench)
        before = bench.driver.free_bytes(0)
        with taken(bench, Kind.MANAGED, 2 * BLOCK) as span:
            prefetched(bench, [span], GPU)
            assert bench.driver.free_bytes(0) == before - 2 * BLOCK
            prefetched(bench, [span], HOST)
            assert bench.driver.free_bytes(0) == before

    def test_several_ranges_move_in_one_call(self, bench: Bench) -> None:
        needs_movement(bench)
        with taken(bench, Kind.MANAGED, BLOCK) as first, taken(bench, Kind.MANAGED, BLOCK) as second:
            prefetched(bench, [first, second], GPU)
            assert on_gpu(bench, first) == on_gpu(bench, second) == pages(bench, first)

    def test_the_last_prefetch_is_what_was_asked_for_all_of_the_range(self, bench: Bench) -> None:
        needs_prefetch(bench)
        with taken(bench, Kind.MANAGED, 2 * BLOCK) as span:
            half = Span(span.address, BLOCK)
            assert bench.driver.last_prefetch(span) is None
            prefetched(bench, [half], GPU)
            assert bench.driver.last_prefetch(half) == GPU
            assert bench.driver.last_prefetch(span) is None
            prefetched(bench, [span], HOST)
            assert bench.driver.last_prefetch(span) == HOST

    def test_a_prefetch_names_its_numa_node_where_the_driver_can(self, bench: Bench) -> None:
        needs_prefetch(bench)
        if bench.driver.version() < CUDA_13:
            pytest.skip("needs CUDA 13")
        node = HostNode(device(bench).host_node or 0)
        with taken(bench, Kind.MANAGED, BLOCK) as span:
            prefetched(bench, [span], node)
            assert bench.driver.last_prefetch(span) == node

    def test_more_can_be_prefetched_than_the_gpu_holds(self, bench: Bench) -> None:
        needs_oversubscription(bench)
        total = bench.driver.free_bytes(0) // BLOCK * BLOCK + 4 * BLOCK
        with taken(bench, Kind.MANAGED, total) as span:
            bench.driver.fill(span, 4)
            prefetched(bench, [span], GPU)
            assert at_home(bench, span) >= 4 * BLOCK // bench.driver.page_bytes
            assert bench.driver.read(Span(span.address, 2)) == bytes([4, 4])

    def test_on_one_pool_nothing_moves(self, bench: Bench) -> None:
        needs_prefetch(bench)
        if not device(bench).integrated:
            pytest.skip("CPU and GPU have a memory each")
        with taken(bench, Kind.MANAGED, BLOCK) as span:
            bench.driver.fill(span, 1)
            where, free = dict(resident(bench, span)), bench.driver.free_bytes(0)
            for home in (GPU, HOST):
                prefetched(bench, [span], home)
                assert bench.driver.last_prefetch(span) == home
                assert dict(resident(bench, span)) == where
                assert bench.driver.free_bytes(0) == free

    def test_without_concurrent_access_a_prefetch_is_unsupported(self, bench: Bench) -> None:
        if not device(bench).managed or device(bench).concurrent_managed:
            pytest.skip("needs managed memory without concurrent access")
        with taken(bench, Kind.MANAGED, BLOCK) as span:
            for home in (GPU, HOST):  # even to the host: the stream's own device must have it
                assert refuses(INVALID_DEVICE, bench.driver.prefetch, [span], home).unsupported

    def test_device_memory_takes_no_prefetch_and_no_advice(self, bench: Bench) -> None:
        needs_prefetch(bench)
        with taken(bench, Kind.DEVICE, BLOCK) as span:
            refuses(INVALID_VALUE, bench.driver.prefetch, [span], HOST)
            refuses(INVALID_VALUE, bench.driver.advise, span, Advice.PREFERRED_LOCATION, HOST)

    def test_discarded_pages_make_room_and_never_travel_home(self, bench: Bench) -> None:
        needs_oversubscription(bench)
        needs_discard(bench)
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with taken(bench, Kind.MANAGED, half) as span:
            bench.driver.fill(span, 1)
            bench.driver.discard([span])
            bench.driver.synchronize()
            address = bench.driver.allocate(Kind.DEVICE, half + 4 * BLOCK)
            assert at_home(bench, span) == 0
            bench.driver.free(address)
            bench.driver.fill(span, 2)
            assert bench.driver.read(Span(span.address, 2)) == bytes([2, 2]), "written again, it is memory again"

    def test_only_managed_memory_is_discarded(self, bench: Bench) -> None:
        needs_prefetch(bench)
        needs_discard(bench)
        with taken(bench, Kind.DEVICE, BLOCK) as span:
            bench.driver.fill(span, 1)
            refuses(INVALID_VALUE, bench.driver.discard, [span])
            assert bench.driver.read(Span(span.address, 2)) == bytes([1, 1])

    def test_before_cuda_13_nothing_is_discarded(self, bench: Bench) -> None:
        needs_prefetch(bench)
        if bench.driver.version() >= CUDA_13:
            pytest.skip("CUDA 13 can")
        with taken(bench, Kind.MANAGED, BLOCK) as span:
            assert refuses(None, bench.driver.discard, [span]).unsupported

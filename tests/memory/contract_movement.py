"""Contract tests of migrating managed memory: memory pressure, prefetches, and discarding contents."""

from __future__ import annotations

from supertuner.memory.driver import HOST, AddressRange, HostNumaLocation, MemoryAdvice, MemoryKind
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


class MovementContract:
    @needs("oversubscription")
    def test_managed_memory_can_exceed_gpu_memory_and_keeps_its_bytes(self, bench: DriverBench) -> None:
        piece = bench.hbm_bytes // 8 // BLOCK * BLOCK
        with allocated(bench, MemoryKind.MANAGED, 12 * piece) as span:
            pieces = [AddressRange(span.address + i * piece, piece) for i in range(12)]
            for value, part in enumerate(pieces):
                bench.driver.fill(part, value + 1)
            for value, part in enumerate(pieces):
                assert bench.driver.read(AddressRange(part.address, 2)) == bytes([value + 1] * 2)
                assert bench.driver.read(AddressRange(part.end - 2, 2)) == bytes([value + 1] * 2)

    @needs("oversubscription", "page locations")
    def test_under_pressure_the_least_recently_used_managed_memory_is_evicted(self, bench: DriverBench) -> None:
        free = bench.driver.free_bytes(0)
        quarter = free // 4 // BLOCK * BLOCK
        over = 5 * quarter - free // BLOCK * BLOCK
        with allocated(bench, MemoryKind.MANAGED, 5 * quarter) as span:
            parts = [AddressRange(span.address + i * quarter, quarter) for i in range(5)]
            for value in (0, 1, 2, 3, 0, 4):  # the first part is used again, so the second is least recently used
                bench.driver.fill(parts[value], value + 1)
            for number in (0, 2, 3, 4):
                assert on_gpu(bench, parts[number]) == pages(bench, parts[number]), f"part {number} was used later"
            assert on_host(bench, parts[1]) >= over // bench.driver.page_bytes
            assert on_host(bench, parts[1]) + on_gpu(bench, parts[1]) == pages(bench, parts[1])
            for value, part in enumerate(parts):
                assert bench.driver.read(AddressRange(part.end - 2, 2)) == bytes([value + 1] * 2)

    @needs("oversubscription", "page locations")
    def test_device_memory_is_never_evicted(self, bench: DriverBench) -> None:
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with (
            allocated(bench, MemoryKind.DEVICE, half) as device_span,
            allocated(bench, MemoryKind.MANAGED, 3 * half) as managed,
        ):
            bench.driver.fill(device_span, 5)
            bench.driver.fill(managed, 6)
            assert on_gpu(bench, device_span) == pages(bench, device_span)
            assert bench.driver.read(AddressRange(device_span.address, 2)) == bytes([5, 5])

    @needs("oversubscription")
    def test_device_memory_evicts_managed_memory_without_losing_its_bytes(self, bench: DriverBench) -> None:
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with allocated(bench, MemoryKind.MANAGED, half) as managed:
            bench.driver.fill(managed, 6)
            address = bench.driver.allocate(MemoryKind.DEVICE, half + 4 * BLOCK)
            assert bench.driver.read(AddressRange(managed.address, 2)) == bytes([6, 6])
            assert bench.driver.read(AddressRange(managed.end - 2, 2)) == bytes([6, 6])
            bench.driver.free(address)

    @needs("managed without concurrent access")
    def test_without_concurrent_access_managed_memory_cannot_exceed_the_gpu(self, bench: DriverBench) -> None:
        refuses(OUT_OF_MEMORY, bench.driver.allocate, MemoryKind.MANAGED, bench.hbm_bytes + BLOCK)

    @needs("no managed memory")
    def test_without_managed_memory_allocating_it_is_unsupported(self, bench: DriverBench) -> None:
        assert refuses(None, bench.driver.allocate, MemoryKind.MANAGED, BLOCK).unsupported

    @needs("oversubscription", "page locations")
    def test_a_managed_page_migrates_to_the_gpu_when_the_gpu_fills_it(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, 4 * BLOCK) as span:
            bench.driver.fill(AddressRange(span.address, BLOCK), 1)
            assert on_gpu(bench, AddressRange(span.address, BLOCK)) == pages(bench, AddressRange(span.address, BLOCK))
            assert resident(bench, AddressRange(span.address + 2 * BLOCK, 2 * BLOCK)).keys() <= {None, HOST}

    @needs("oversubscription", "page locations")
    def test_a_prefetch_moves_exactly_the_pages_of_the_range_in_both_directions(self, bench: DriverBench) -> None:
        page = bench.driver.page_bytes
        with allocated(bench, MemoryKind.MANAGED, 2 * BLOCK) as span:
            bench.driver.fill(span, 8)
            prefetch_and_wait(bench, [span], HOST)
            assert (on_gpu(bench, span), on_host(bench, span)) == (0, pages(bench, span))
            inner = AddressRange(span.address + 3 * page, 5 * page)
            prefetch_and_wait(bench, [inner], GPU)
            assert on_gpu(bench, inner) == 5
            assert on_gpu(bench, span) == 5, "no other page moved"
            prefetch_and_wait(bench, [inner], HOST)
            assert on_gpu(bench, span) == 0
            assert bench.driver.read(AddressRange(inner.address, 2)) == bytes([8, 8])

    @needs("oversubscription", "page locations")
    def test_a_range_with_partial_pages_is_rounded_outward_as_documented(self, bench: DriverBench) -> None:
        page = bench.driver.page_bytes
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            cut = AddressRange(span.address + page + 1, page)
            prefetch_and_wait(bench, [cut], GPU)
            assert on_gpu(bench, span) == 2
            assert bench.driver.last_prefetch_location(AddressRange(span.address + page, 2 * page)) == GPU

    @needs("oversubscription")
    def test_prefetching_to_the_host_frees_gpu_memory(self, bench: DriverBench) -> None:
        before = bench.driver.free_bytes(0)
        with allocated(bench, MemoryKind.MANAGED, 2 * BLOCK) as span:
            prefetch_and_wait(bench, [span], GPU)
            assert bench.driver.free_bytes(0) == before - 2 * BLOCK
            prefetch_and_wait(bench, [span], HOST)
            assert bench.driver.free_bytes(0) == before

    @needs("oversubscription", "page locations")
    def test_several_ranges_move_in_one_call(self, bench: DriverBench) -> None:
        with (
            allocated(bench, MemoryKind.MANAGED, BLOCK) as first,
            allocated(bench, MemoryKind.MANAGED, BLOCK) as second,
        ):
            prefetch_and_wait(bench, [first, second], GPU)
            assert on_gpu(bench, first) == on_gpu(bench, second) == pages(bench, first)

    @needs("prefetch")
    def test_the_last_prefetch_location_is_the_last_request_for_the_whole_range(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, 2 * BLOCK) as span:
            half = AddressRange(span.address, BLOCK)
            assert bench.driver.last_prefetch_location(span) is None
            prefetch_and_wait(bench, [half], GPU)
            assert bench.driver.last_prefetch_location(half) == GPU
            assert bench.driver.last_prefetch_location(span) is None
            prefetch_and_wait(bench, [span], HOST)
            assert bench.driver.last_prefetch_location(span) == HOST

    @needs("prefetch", "discard")
    def test_a_prefetch_can_target_a_numa_node_where_the_driver_supports_it(self, bench: DriverBench) -> None:
        node = HostNumaLocation(device(bench).host_node or 0)
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            prefetch_and_wait(bench, [span], node)
            assert bench.driver.last_prefetch_location(span) == node

    @needs("oversubscription", "page locations")
    def test_a_prefetch_can_exceed_gpu_memory(self, bench: DriverBench) -> None:
        total = bench.driver.free_bytes(0) // BLOCK * BLOCK + 4 * BLOCK
        with allocated(bench, MemoryKind.MANAGED, total) as span:
            bench.driver.fill(span, 4)
            prefetch_and_wait(bench, [span], GPU)
            assert on_host(bench, span) >= 4 * BLOCK // bench.driver.page_bytes
            assert bench.driver.read(AddressRange(span.address, 2)) == bytes([4, 4])

    @needs("prefetch", "one pool", "page locations")
    def test_on_one_pool_nothing_moves(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            bench.driver.fill(span, 1)
            where, free = dict(resident(bench, span)), bench.driver.free_bytes(0)
            for home in (GPU, HOST):
                prefetch_and_wait(bench, [span], home)
                assert bench.driver.last_prefetch_location(span) == home
                assert dict(resident(bench, span)) == where
                assert bench.driver.free_bytes(0) == free

    @needs("managed without concurrent access")
    def test_without_concurrent_access_a_prefetch_is_unsupported(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            for home in (GPU, HOST):  # even to the host, because the stream's own device must support it
                assert refuses(INVALID_DEVICE, bench.driver.prefetch, [span], home).unsupported

    @needs("prefetch")
    def test_device_memory_accepts_no_prefetch_and_no_advice(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.DEVICE, BLOCK) as span:
            refuses(INVALID_VALUE, bench.driver.prefetch, [span], HOST)
            refuses(INVALID_VALUE, bench.driver.advise, span, MemoryAdvice.PREFERRED_LOCATION, HOST)

    @needs("oversubscription", "discard", "page locations")
    def test_discarded_pages_free_gpu_memory_and_are_not_transferred(self, bench: DriverBench) -> None:
        half = bench.driver.free_bytes(0) // 2 // BLOCK * BLOCK
        with allocated(bench, MemoryKind.MANAGED, half) as span:
            bench.driver.fill(span, 1)
            bench.driver.discard([span])
            bench.driver.synchronize()
            address = bench.driver.allocate(MemoryKind.DEVICE, half + 4 * BLOCK)
            assert on_host(bench, span) == 0
            bench.driver.free(address)
            bench.driver.fill(span, 2)
            assert bench.driver.read(AddressRange(span.address, 2)) == bytes([2, 2]), (
                "memory is usable again after it is written"
            )

    @needs("prefetch", "discard")
    def test_only_managed_memory_can_be_discarded(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.DEVICE, BLOCK) as span:
            bench.driver.fill(span, 1)
            refuses(INVALID_VALUE, bench.driver.discard, [span])
            assert bench.driver.read(AddressRange(span.address, 2)) == bytes([1, 1])

    @needs("prefetch", "no discard")
    def test_before_cuda_13_discarding_is_unsupported(self, bench: DriverBench) -> None:
        with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
            assert refuses(None, bench.driver.discard, [span]).unsupported

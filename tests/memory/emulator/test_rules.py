"""Tests of the software superchip beyond the contract: evictions against an oracle, access counters, read
duplicates.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.core.errors import MemoryEngineError
from supertuner.memory.driver import (
    HOST,
    AddressRange,
    DriverError,
    GpuLocation,
    HostNumaLocation,
    MemoryAdvice,
    MemoryKind,
)
from supertuner.memory.emulator.configuration import EmulatedMachine, EmulatorParameters, InjectedFault
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from tests.memory.bench import BLOCK, GPU, INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY, refuses

PAGE = 65536
GH200 = EmulatedMachine.from_spec(MACHINES["gh200-96"])
SMALL = replace(GH200, gpu_bytes=8 * BLOCK)


class LruOracle:
    """Least-recently-used eviction, one page and one block at a time, in the simplest way."""

    def __init__(self, capacity_pages: int, block_pages: int, hits_refresh: bool) -> None:
        self.capacity, self.block_pages, self.hits_refresh = capacity_pages, block_pages, hits_refresh
        self.blocks: OrderedDict[tuple[int, int], set[int]] = OrderedDict()
        self.up = self.down = 0
        self.at_host: set[tuple[int, int]] = set()

    def touch(self, region: int, first: int, last: int) -> None:
        """The GPU uses pages [first, last) in order; the pages of a block arrive together."""
        for block in range(first // self.block_pages, (last - 1) // self.block_pages + 1):
            begin, end = max(first, block * self.block_pages), min(last, (block + 1) * self.block_pages)
            self._touch_block((region, block), range(begin, end))

    def _touch_block(self, key: tuple[int, int], pages: range) -> None:
        here = self.blocks.get(key, set())
        missing = set(pages) - here
        if here and (missing or self.hits_refresh):
            self.blocks.move_to_end(key)
        while sum(map(len, self.blocks.values())) + len(missing) > self.capacity:
            victim = next(iter(self.blocks))
            assert victim != key
            left = self.blocks.pop(victim)
            self.down += len(left)
            self.at_host |= {(victim[0], page) for page in left}
        came = {(key[0], page) for page in missing} & self.at_host
        self.up += len(came)
        self.at_host -= came
        self.blocks.setdefault(key, set()).update(missing)

    def move_to_host(self, region: int, first: int, last: int) -> None:
        for key in [k for k in self.blocks if k[0] == region]:
            leaving = {p for p in self.blocks[key] if first <= p < last}
            self.down += len(leaving)
            self.blocks[key] -= leaving
            if not self.blocks[key]:
                del self.blocks[key]
        self.at_host |= {(region, page) for page in range(first, last)}


REGION_PAGES = (6 * 32, 5 * 32 + 7, 9)
OPERATION = st.tuples(
    st.sampled_from(["touch", "touch", "touch", "prefetch", "home"]),
    st.integers(0, len(REGION_PAGES) - 1),
    st.floats(0, 1),
    st.floats(0, 1),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATION, min_size=1, max_size=25), st.booleans(), st.booleans(), st.integers(33, 200))
def test_evictions_equal_those_of_an_oracle_page_by_page(
    operations: list[tuple[str, int, float, float]], hits_refresh: bool, host_is_short: bool, capacity: int
) -> None:
    """If host memory may run out the model works block by block, otherwise in one sweep: both must agree."""
    figures = replace(GH200, gpu_bytes=capacity * PAGE, host_bytes=sum(REGION_PAGES) * PAGE)
    model = EmulatedSuperchip(figures, parameters=EmulatorParameters(hits_refresh=hits_refresh))
    if host_is_short:
        model.allocate(MemoryKind.SYSTEM, PAGE)
    oracle = LruOracle(capacity, BLOCK // PAGE, hits_refresh)
    spans = [AddressRange(model.allocate(MemoryKind.MANAGED, pages * PAGE), pages * PAGE) for pages in REGION_PAGES]
    for verb, region, begin, end in operations:
        first, last = sorted(round(x * REGION_PAGES[region]) for x in (begin, end))
        if first == last:
            continue
        part = AddressRange(spans[region].address + first * PAGE, (last - first) * PAGE)
        if verb == "home":
            model.prefetch([part], HOST)
            oracle.move_to_host(region, first, last)
        else:
            model.touch(part, GPU) if verb == "touch" else model.prefetch([part], GPU)
            oracle.touch(region, first, last)
    for region, span in enumerate(spans):
        there = [page for key, pages in oracle.blocks.items() if key[0] == region for page in pages]
        assert model.resident_pages(span).get(GPU, 0) == len(there)
        for page in there[:: max(1, len(there) // 7)]:
            assert model.resident_pages(AddressRange(span.address + page * PAGE, PAGE)) == {GPU: 1}
    assert model.traffic.to_device_bytes == oracle.up * PAGE
    assert model.traffic.to_host_bytes == oracle.down * PAGE
    assert model.free_bytes(0) == capacity * PAGE - sum(map(len, oracle.blocks.values())) * PAGE


def test_a_cyclic_pass_one_block_larger_than_the_gpu_always_misses() -> None:
    model = EmulatedSuperchip(SMALL)
    span = managed(model, 9 * BLOCK)
    model.touch(span, GPU)
    before = model.traffic.to_device_bytes
    model.touch(span, GPU)
    assert model.traffic.to_device_bytes - before == 9 * BLOCK


def test_a_pass_forward_and_back_hits_what_fits() -> None:
    model = EmulatedSuperchip(SMALL)
    span = managed(model, 12 * BLOCK)
    blocks = [AddressRange(span.address + i * BLOCK, BLOCK) for i in range(12)]
    for block in blocks:
        model.touch(block, GPU)
    before = model.traffic.to_device_bytes
    for block in reversed(blocks):
        model.touch(block, GPU)
    assert model.traffic.to_device_bytes - before == 4 * BLOCK


def test_managed_memory_without_any_room_is_used_over_the_link() -> None:
    model = EmulatedSuperchip(SMALL)
    model.allocate(MemoryKind.DEVICE, 8 * BLOCK)
    span = managed(model, 2 * BLOCK)
    model.fill(span, 7)
    assert model.resident_pages(span) == {HOST: 64}
    assert model.traffic.remote_bytes == 2 * BLOCK
    assert model.read(AddressRange(span.address, 3)) == bytes([7] * 3)


def test_a_block_larger_than_the_free_gpu_memory_is_split() -> None:
    model = EmulatedSuperchip(SMALL)
    model.allocate(MemoryKind.DEVICE, 8 * BLOCK - 5 * PAGE)
    span = managed(model, 2 * BLOCK)
    model.touch(span, GPU)
    assert model.resident_pages(span) == {GPU: 5, HOST: 59}
    assert model.free_bytes(0) == 0


# ── access counters ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_system_memory_migrates_once_the_access_threshold_is_reached() -> None:
    model = EmulatedSuperchip(SMALL)
    span = system(model, 2 * BLOCK)
    model.touch(span, HOST, write=True)
    first = AddressRange(span.address, PAGE)
    for _ in range(255):
        model.touch(first, GPU, accesses=1)
    assert model.resident_pages(span) == {HOST: 64}
    model.touch(first, GPU, accesses=1)
    assert model.resident_pages(span) == {GPU: 32, HOST: 32}, "exactly the whole block migrates"
    assert model.traffic.counter_migrations == 1


def test_mapped_managed_memory_is_read_in_place_until_its_counter_is_full() -> None:
    model = EmulatedSuperchip(SMALL)
    span = managed(model, BLOCK)
    model.prefetch([span], HOST)
    model.advise(span, MemoryAdvice.ACCESSED_BY, GPU)
    model.touch(span, GPU, accesses=4)
    assert model.resident_pages(span) == {HOST: 32}
    assert model.traffic.remote_bytes == BLOCK
    model.touch(span, GPU, accesses=4)
    assert model.resident_pages(span) == {GPU: 32}


def test_the_threshold_is_a_parameter() -> None:
    model = EmulatedSuperchip(SMALL, parameters=EmulatorParameters(counter_threshold=2))
    span = system(model, BLOCK)
    model.touch(span, HOST, write=True)
    model.touch(AddressRange(span.address, PAGE), GPU, accesses=2)
    assert model.resident_pages(span) == {GPU: 32}


def test_system_memory_that_prefers_the_host_does_not_migrate() -> None:
    model = EmulatedSuperchip(SMALL)
    span = system(model, BLOCK)
    model.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
    model.touch(span, GPU)
    model.touch(span, GPU, accesses=10_000)
    assert model.resident_pages(span) == {HOST: 32}


# ── copies ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_read_mostly_memory_is_duplicated_by_reads_and_single_after_a_write() -> None:
    model = EmulatedSuperchip(SMALL)
    span = managed(model, BLOCK)
    model.touch(span, HOST, write=True)
    model.advise(span, MemoryAdvice.READ_MOSTLY, HOST)
    model.touch(span, GPU)
    assert model.resident_pages(span) == {HOST: 32, GPU: 32}
    assert model.free_bytes(0) == 7 * BLOCK
    down = model.traffic.to_host_bytes
    model.touch(span, HOST)
    assert model.traffic.to_host_bytes == down, "the host already has a copy"
    model.touch(span, HOST, write=True)
    assert model.resident_pages(span) == {HOST: 32}
    assert model.free_bytes(0) == 8 * BLOCK
    model.prefetch([span], GPU)
    assert model.resident_pages(span) == {HOST: 32, GPU: 32}
    model.touch(span, GPU, write=True)
    assert model.resident_pages(span) == {GPU: 32}


def test_evicting_a_duplicate_transfers_nothing() -> None:
    model = EmulatedSuperchip(SMALL)
    span = managed(model, 4 * BLOCK)
    model.touch(span, HOST, write=True)
    model.advise(span, MemoryAdvice.READ_MOSTLY, HOST)
    model.touch(span, GPU)
    model.allocate(MemoryKind.DEVICE, 8 * BLOCK)
    assert model.resident_pages(span) == {HOST: 128}
    assert model.traffic.to_host_bytes == 0


# ── host memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_host_uses_gpu_memory_in_place_on_a_superchip_and_migrates_it_on_a_card() -> None:
    for figures, where in ((SMALL, GPU), (replace(SMALL, ats=False), HOST)):
        model = EmulatedSuperchip(figures)
        span = managed(model, BLOCK)
        model.fill(span, 3)
        assert model.read(AddressRange(span.address, 1)) == bytes([3])
        assert model.resident_pages(AddressRange(span.address, PAGE)) == {where: 1}
        assert model.resident_pages(AddressRange(span.address + PAGE, PAGE)) == {GPU: 1}, "a page that was not read"
        assert model.traffic.to_host_bytes == PAGE, "over the link in both cases"


def test_memory_that_prefers_the_gpu_is_populated_there_even_if_the_host_uses_it_first() -> None:
    model = EmulatedSuperchip(SMALL)
    span = managed(model, BLOCK)
    model.advise(span, MemoryAdvice.PREFERRED_LOCATION, GPU)
    model.touch(span, HOST, write=True)
    assert model.resident_pages(span) == {GPU: 32}


def test_host_memory_is_finite() -> None:
    model = EmulatedSuperchip(replace(SMALL, host_bytes=2 * BLOCK))
    span = managed(model, 4 * BLOCK)
    model.fill(span, 1)
    refuses(OUT_OF_MEMORY, model.prefetch, [span], HOST)
    assert model.resident_pages(span) == {GPU: 128}
    assert model.free_bytes(0) == 4 * BLOCK


def test_a_full_pool_raises() -> None:
    model = EmulatedSuperchip(replace(EmulatedMachine.from_spec(MACHINES["gb10"]), gpu_bytes=4 * BLOCK))
    span = managed(model, 6 * BLOCK)
    refuses(OUT_OF_MEMORY, model.fill, span, 1)
    assert model.free_bytes(0) == 4 * BLOCK
    model.fill(AddressRange(span.address, 3 * BLOCK), 1)
    refuses(OUT_OF_MEMORY, model.allocate, MemoryKind.DEVICE, 2 * BLOCK)
    model.free(span.address)
    assert model.free_bytes(0) == 4 * BLOCK


# ── foreign memory ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_foreign_memory_of_the_process_can_be_hinted_where_the_gpu_reads_it() -> None:
    array = np.zeros(3 * BLOCK, np.uint8)
    start = -(-array.ctypes.data // PAGE) * PAGE
    span = AddressRange(start, 2 * BLOCK)
    model = EmulatedSuperchip(SMALL)
    assert model.memory_kind_at(start) is MemoryKind.SYSTEM
    assert model.locate([start]) == [None], "the model does not know it yet"
    model.prefetch([span], GPU)
    assert model.resident_pages(span) == {GPU: 64}
    assert model.locate([start, start + 2 * BLOCK - 1]) == [1, 1]
    model.prefetch([AddressRange(start, PAGE)], HOST)
    assert model.locate([start, start + PAGE]) == [0, 1]
    card = EmulatedSuperchip(replace(SMALL, ats=False))
    refuses(INVALID_VALUE, card.prefetch, [span], GPU)
    refuses(INVALID_VALUE, model.fill, span, 1)


def test_memory_beyond_the_end_of_an_allocation_does_not_have_its_kind() -> None:
    model = EmulatedSuperchip(SMALL)
    address = model.allocate(MemoryKind.DEVICE, BLOCK + 1)
    model.allocate(MemoryKind.DEVICE, BLOCK)
    assert model.memory_kind_at(address + BLOCK) is MemoryKind.DEVICE
    assert model.memory_kind_at(address + BLOCK + 1) is MemoryKind.SYSTEM


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_locations_that_do_not_exist_are_refused() -> None:
    model = EmulatedSuperchip(SMALL)
    span = managed(model, BLOCK)
    prefer, accessed = MemoryAdvice.PREFERRED_LOCATION, MemoryAdvice.ACCESSED_BY
    refuses(INVALID_DEVICE, model.prefetch, [span], GpuLocation(1))
    refuses(INVALID_VALUE, model.prefetch, [span], HostNumaLocation(7))
    refuses(INVALID_DEVICE, model.advise, span, prefer, GpuLocation(1))
    refuses(INVALID_VALUE, model.advise, span, accessed, HostNumaLocation(0))
    model.advise(span, prefer, HostNumaLocation(0))
    assert model.preferred_location(span) == HostNumaLocation(0)


def test_a_partly_refused_prefetch_does_nothing() -> None:
    model = EmulatedSuperchip(SMALL)
    good, bad = managed(model, BLOCK), AddressRange(model.allocate(MemoryKind.DEVICE, BLOCK), BLOCK)
    refuses(INVALID_VALUE, model.prefetch, [good, bad], GPU)
    assert model.resident_pages(good) == {None: 32}
    assert model.last_prefetch_location(good) is None


def test_a_page_that_is_only_partly_discarded_keeps_its_bytes() -> None:
    model = EmulatedSuperchip(SMALL)
    span = managed(model, BLOCK)
    model.fill(span, 5)
    model.discard([AddressRange(span.address + 1, 2 * PAGE)])
    assert model.resident_pages(span) == {GPU: 31, None: 1}
    assert model.read(AddressRange(span.address, 2)) == bytes([5, 5])
    assert model.read(AddressRange(span.address + PAGE, 2)) != bytes([5, 5]), "a reader of discarded bytes must notice"
    assert model.traffic.to_host_bytes == PAGE, "the first page, read in place; the discard itself moved nothing"


def test_a_machine_without_a_gpu_is_not_modelled() -> None:
    with pytest.raises(MemoryEngineError, match="no GPU"):
        EmulatedSuperchip(MACHINES["cpu"])


@pytest.mark.parametrize("key", [key for key in MACHINES if key != "cpu"])
def test_every_machine_of_the_table_is_modelled_at_its_full_size(key: str) -> None:
    model = EmulatedSuperchip(MACHINES[key])
    span = managed(model, model.free_bytes(0) // 2)
    model.touch(span, GPU, write=True)
    assert sum(model.resident_pages(span).values()) * PAGE == span.nbytes
    assert model.devices()[0].total_bytes == MACHINES[key].gpu_bytes.value


def test_counts_stay_exact_when_threads_evict_each_others_memory() -> None:
    model = EmulatedSuperchip(SMALL)
    spans = [managed(model, 6 * BLOCK) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda span: [model.touch(span, GPU) for _ in range(150)], spans))
    finally:
        sys.setswitchinterval(interval)
    on_gpu = sum(model.resident_pages(span).get(GPU, 0) for span in spans)
    assert on_gpu * PAGE == 8 * BLOCK - model.free_bytes(0) == 8 * BLOCK
    assert model.traffic.to_host_bytes == model.traffic.to_device_bytes + 16 * BLOCK, (
        "24 blocks were populated on the GPU"
    )


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_injected_faults_begin_at_the_planned_call_and_repeat_as_planned() -> None:
    model = EmulatedSuperchip(SMALL, faults=(InjectedFault("free_bytes", "CUDA_ERROR_UNKNOWN", first=2, times=2),))
    answers = []
    for _ in range(5):
        try:
            answers.append(str(model.free_bytes(0) == SMALL.gpu_bytes))
        except DriverError as refused:
            answers.append(refused.name)
    assert answers == ["True", "CUDA_ERROR_UNKNOWN", "CUDA_ERROR_UNKNOWN", "True", "True"]


def test_an_unknown_error_name_cannot_be_injected() -> None:
    with pytest.raises(AssertionError):
        InjectedFault("free", "CUDA_ERROR_TYPO")


def managed(model: EmulatedSuperchip, nbytes: int) -> AddressRange:
    return AddressRange(model.allocate(MemoryKind.MANAGED, nbytes), nbytes)


def system(model: EmulatedSuperchip, nbytes: int) -> AddressRange:
    return AddressRange(model.allocate(MemoryKind.SYSTEM, nbytes), nbytes)

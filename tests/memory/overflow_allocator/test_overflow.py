"""The overflow allocator on the fake driver: stages and their margin, limits, faults, forks, and many segments."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.memory.driver import HOST, AddressRange, GpuLocation, MemoryKind
from supertuner.memory.overflow_allocator.plugin import OverflowLimits
from tests.fakes.fake_libraries import MIB, environment, run_python
from tests.memory.on_fake import FakeBench, on_fake
from tests.memory.plugin import PluginCopy

SEGMENT = 2 * MIB
OUT_OF_MEMORY = 2


def fill_gpu(plugin: PluginCopy) -> list[int]:
    """Allocate segments until one is managed, which is the last of the list."""
    segments = []
    while True:
        segments.append(plugin.alloc(SEGMENT))
        if plugin.overflow.segment_kind(segments[-1]) is MemoryKind.MANAGED:
            return segments


def free_all(plugin: PluginCopy, segments: list[int]) -> None:
    for address in segments:
        plugin.free(address, SEGMENT)


@on_fake()
def test_segments_are_device_memory_while_the_reserve_stays_free_and_managed_afterwards(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(gpu_reserve_bytes=8 * MIB))
    segments = fill_gpu(plugin)
    assert bench.driver.free_bytes(0) == 8 * MIB
    assert [bench.driver.memory_kind_at(address) for address in segments] == [MemoryKind.DEVICE] * 28 + [
        MemoryKind.MANAGED
    ]
    stats = plugin.stats()
    assert (stats.stage, stats.entered, stats.left) == (2, 1, 0)
    assert (stats.device_bytes, stats.managed_bytes) == (56 * MIB, 2 * MIB)
    assert (stats.total_bytes, stats.limit_bytes, stats.reserve_bytes) == (64 * MIB, 320 * MIB, 8 * MIB)
    free_all(plugin, segments)
    stats = plugin.stats()
    assert (stats.stage, stats.left, stats.device_bytes, stats.managed_bytes, stats.frees) == (1, 1, 0, 0, 29)
    assert (stats.device_peak_bytes, stats.managed_peak_bytes) == (56 * MIB, 2 * MIB)
    assert bench.fake.hbm_used() == 0


@on_fake()
def test_the_reserve_is_five_percent_by_default(bench: FakeBench) -> None:
    plugin = PluginCopy()
    plugin.free(plugin.alloc(SEGMENT))
    assert plugin.stats().reserve_bytes == plugin.stats().margin_bytes == int(0.05 * bench.hbm_bytes)
    plugin.change_limits(gpu_reserve_bytes=0)
    plugin.free(plugin.alloc(SEGMENT))
    assert plugin.stats().reserve_bytes == 0


@on_fake()
def test_a_repeated_allocation_at_the_threshold_changes_the_stage_once(bench: FakeBench) -> None:
    plugin = PluginCopy()
    segments = fill_gpu(plugin)
    plugin.free(segments.pop(0), SEGMENT)  # without the margin, one more segment would fit on the GPU now
    for _ in range(300):
        plugin.free(segments.pop(), SEGMENT)
        segments.append(plugin.alloc(SEGMENT))
    assert (plugin.stats().entered, plugin.stats().left) == (1, 0)
    free_all(plugin, segments)


def check_no_oscillation(bench: FakeBench, operations: list[tuple[bool, int]]) -> None:
    plugin, driver = PluginCopy(OverflowLimits(gpu_reserve_bytes=4 * MIB)), bench.driver
    reserve, margin = 4 * MIB, int(0.05 * bench.hbm_bytes)
    live: list[tuple[int, int]] = []
    for allocate, number in operations:
        before, nbytes = plugin.stats(), (1 + number % 16) * MIB // 2
        if allocate or not live:
            left = driver.free_bytes(0) - nbytes
            address = plugin.alloc(nbytes)
            assert address is not None
            live.append((address, nbytes))
            now = plugin.stats()
            assert driver.memory_kind_at(address) is (MemoryKind.MANAGED if now.stage == 2 else MemoryKind.DEVICE)
            if number % 3 == 0:
                driver.fill(AddressRange(address, nbytes), 1)  # managed memory occupies GPU memory once it is used
        else:
            plugin.free(live.pop(number % len(live))[0])
            left, now = driver.free_bytes(0), plugin.stats()
        if reserve <= left < reserve + margin and before.stage:
            assert now.stage == before.stage, "the stage changed inside the margin"
        assert now.entered == before.entered or left < reserve
        assert now.left == before.left or left >= reserve + margin
        assert now.entered - now.left == (now.stage == 2)
    for address, _ in live:
        plugin.free(address)
    assert plugin.stats().device_bytes == plugin.stats().managed_bytes == 0


@on_fake()
def test_no_sequence_of_allocations_changes_the_stage_inside_the_margin(bench: FakeBench) -> None:
    operation = st.tuples(st.sampled_from((True, True, False)), st.integers(0, 63))

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.lists(operation, max_size=60))
    def check(operations: list[tuple[bool, int]]) -> None:
        check_no_oscillation(bench, operations)

    check()


@on_fake()
def test_the_ratio_is_a_hard_limit_and_freed_bytes_can_be_allocated_again(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(ratio=1.5))
    segments = [plugin.alloc(SEGMENT) for _ in range(48)]
    assert None not in segments and plugin.alloc(1) is None
    stats = plugin.stats()
    assert (stats.device_bytes + stats.managed_bytes, stats.refused_ratio, stats.last_error) == (96 * MIB, 1, 0)
    plugin.free(segments.pop(), SEGMENT)
    assert plugin.alloc(SEGMENT + 1) is None
    segments.append(plugin.alloc(SEGMENT))
    assert segments[-1] is not None
    free_all(plugin, segments)


@on_fake()
def test_the_host_memory_floor_stays_free(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(ratio=100.0, gpu_reserve_bytes=64 * MIB, host_floor_bytes=100 * MIB))
    plugin.set_host_available(110 * MIB)
    segments = [plugin.alloc(SEGMENT) for _ in range(5)]
    assert None not in segments and plugin.alloc(SEGMENT) is None
    assert (plugin.stats().refused_host, plugin.stats().refusals) == (1, 1)
    plugin.free(segments.pop(), SEGMENT)
    segments.append(plugin.alloc(SEGMENT))
    assert segments[-1] is not None
    free_all(plugin, segments)


@on_fake()
def test_allocated_memory_that_is_not_used_yet_counts_against_the_floor(bench: FakeBench) -> None:
    plugin = PluginCopy(
        OverflowLimits(ratio=100.0, gpu_reserve_bytes=64 * MIB, host_floor_bytes=100 * MIB, host_reserve_bytes=0)
    )
    plugin.set_host_available(110 * MIB)  # unchanged, because the allocated memory is untouched
    segments = [plugin.alloc(SEGMENT) for _ in range(5)]
    assert None not in segments and plugin.alloc(SEGMENT) is None
    plugin.set_host_available(100 * MIB)  # all of it is used now, and must not be counted twice
    assert plugin.alloc(SEGMENT) is None
    free_all(plugin, segments[:1])
    plugin.set_host_available(102 * MIB)
    segments[0] = plugin.alloc(SEGMENT)
    assert segments[0] is not None
    free_all(plugin, segments)


@on_fake()
def test_memory_that_others_freed_can_be_allocated(bench: FakeBench) -> None:
    plugin = PluginCopy(
        OverflowLimits(ratio=100.0, gpu_reserve_bytes=64 * MIB, host_floor_bytes=100 * MIB, host_reserve_bytes=0)
    )
    plugin.set_host_available(120 * MIB)
    segments = [plugin.alloc(SEGMENT) for _ in range(5)]
    plugin.set_host_available(100 * MIB)  # all our memory is used, and others took 10 MiB
    assert None not in segments and plugin.alloc(SEGMENT) is None
    plugin.set_host_available(110 * MIB)
    segments += [plugin.alloc(SEGMENT) for _ in range(5)]
    assert None not in segments and plugin.alloc(SEGMENT) is None
    free_all(plugin, segments)


@on_fake()
def test_memory_that_others_take_counts_after_the_next_reading(bench: FakeBench) -> None:
    limits = OverflowLimits(
        ratio=100.0, gpu_reserve_bytes=64 * MIB, host_floor_bytes=100 * MIB, host_reserve_bytes=4 * MIB
    )
    for _ in range(20):
        plugin, began = PluginCopy(limits), time.monotonic()
        plugin.set_host_available(1000 * MIB)
        segments = [plugin.alloc(SEGMENT)]
        plugin.set_host_available(101 * MIB)
        segments.append(plugin.alloc(SEGMENT))  # within the bytes that may be allocated between two readings
        looks, prompt = plugin.stats().host_looks, time.monotonic() - began < 0.08
        last = plugin.alloc(SEGMENT)
        free_all(plugin, [address for address in segments if address])
        assert last is None
        if prompt:  # on a busy machine the first reading may be too old by now
            break
    assert prompt and None not in segments and looks == 1


@on_fake()
def test_an_old_reading_is_repeated(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(ratio=100.0, gpu_reserve_bytes=64 * MIB, host_floor_bytes=100 * MIB))
    free_all(plugin, [plugin.alloc(SEGMENT)])
    plugin.set_host_available(50 * MIB)
    time.sleep(0.15)
    assert plugin.alloc(SEGMENT) is None


@on_fake()
def test_the_hosts_memory_is_read_rarely(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(ratio=100.0, gpu_reserve_bytes=64 * MIB, host_reserve_bytes=64 * MIB))
    segments = [plugin.alloc(SEGMENT) for _ in range(500)]
    assert plugin.stats().managed_segments == 500 and 15 <= plugin.stats().host_looks <= 40
    free_all(plugin, segments)


@on_fake()
def test_a_container_limits_managed_memory_and_an_unreadable_host_allows_none(bench) -> None:
    plugin = PluginCopy(OverflowLimits(ratio=100.0, gpu_reserve_bytes=64 * MIB, host_cap_bytes=4 * MIB))
    segments = [plugin.alloc(SEGMENT), plugin.alloc(SEGMENT)]
    assert None not in segments and plugin.alloc(SEGMENT) is None
    plugin.change_limits(host_cap_bytes=None)
    segments.append(plugin.alloc(SEGMENT))
    assert segments[-1] is not None
    plugin.meminfo.unlink()
    plugin.change_limits(host_reserve_bytes=0)
    assert plugin.alloc(SEGMENT) is None and plugin.stats().refused_host == 2
    free_all(plugin, segments)


@on_fake()
def test_foreign_pointers_and_double_frees_are_counted_and_ignored(bench: FakeBench) -> None:
    plugin = PluginCopy()
    mine, foreign = plugin.alloc(SEGMENT), bench.driver.allocate(MemoryKind.DEVICE, SEGMENT)
    for address in (foreign, mine + 512, mine, mine, None):
        plugin.free(address, SEGMENT)
    stats = plugin.stats()
    assert (stats.frees, stats.foreign_frees, stats.device_bytes, stats.free_failures) == (1, 3, 0, 0)
    assert bench.driver.memory_kind_at(foreign) is MemoryKind.DEVICE and plugin.overflow.segment_kind(foreign) is None
    bench.driver.free(foreign)


@on_fake()
def test_managed_memory_replaces_device_memory_that_fails_although_it_is_free(bench: FakeBench) -> None:
    plugin = PluginCopy()
    bench.fake.fault("cuMemAlloc", OUT_OF_MEMORY)
    segments = [plugin.alloc(SEGMENT), plugin.alloc(SEGMENT)]
    assert [plugin.overflow.segment_kind(address) for address in segments] == [MemoryKind.MANAGED, MemoryKind.DEVICE]
    stats = plugin.stats()
    assert (stats.stage, stats.device_failures, stats.refusals) == (1, 1, 0)
    assert (stats.last_call, stats.last_error) == ("cuMemAlloc", OUT_OF_MEMORY)
    assert (stats.device_bytes, stats.managed_bytes) == (SEGMENT, SEGMENT)
    free_all(plugin, segments)


@on_fake()
def test_a_driver_error_refuses_the_request_with_its_code_and_leaves_no_trace(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(gpu_reserve_bytes=64 * MIB))
    free_all(plugin, [plugin.alloc(SEGMENT)])
    for call, code in (("cuMemAllocManaged", OUT_OF_MEMORY), ("cuMemGetInfo", 700)):
        refused = plugin.stats().refused_driver
        bench.fake.fault(call, code)
        assert plugin.alloc(SEGMENT) is None
        stats = plugin.stats()
        assert (stats.refused_driver, stats.last_call, stats.last_error) == (refused + 1, call, code)
        assert (stats.managed_bytes, stats.managed_segments) == (0, 0)
    again = plugin.alloc(SEGMENT)
    assert again is not None
    free_all(plugin, [again])


@on_fake()
def test_failed_advice_is_counted_and_the_memory_is_still_allocated(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(gpu_reserve_bytes=64 * MIB))
    bench.fake.fault("cuMemAdvise", 1, times=1)
    segments = [plugin.alloc(SEGMENT, "cpu_first")]
    assert segments[0] is not None
    assert (plugin.stats().advice_failures, plugin.stats().last_call) == (1, "cuMemAdvise")
    free_all(plugin, segments)


@on_fake()
def test_memory_that_the_driver_fails_to_free_stays_booked(bench: FakeBench) -> None:
    plugin = PluginCopy()
    address = plugin.alloc(SEGMENT)
    bench.fake.fault("cuMemFree", 4)
    plugin.free(address, SEGMENT)
    stats = plugin.stats()
    assert (stats.free_failures, stats.device_bytes, stats.last_call, stats.frees) == (1, SEGMENT, "cuMemFree", 0)
    bench.driver.free(address)


def check_patterns(bench: FakeBench) -> None:
    plugin, driver = PluginCopy(OverflowLimits(gpu_reserve_bytes=64 * MIB)), bench.driver
    spans = {p: AddressRange(plugin.alloc(SEGMENT, p), SEGMENT) for p in ("gpu_first", "balanced", "cpu_first")}
    assert {p: driver.preferred_location(span) for p, span in spans.items()} == {
        "gpu_first": GpuLocation(0), "balanced": None, "cpu_first": HOST,
    }  # fmt: skip
    assert {p: driver.accessed_by(span) for p, span in spans.items()} == {
        "gpu_first": (), "balanced": (GpuLocation(0),), "cpu_first": (GpuLocation(0),),
    }  # fmt: skip
    assert plugin.stats().advice_failures == 0
    free_all(plugin, [span.address for span in spans.values()])


@on_fake()
def test_each_access_pattern_reaches_the_driver_as_advice(bench: FakeBench) -> None:
    check_patterns(bench)


def test_a_driver_before_cuda_12_2_receives_advice_in_its_older_form(tmp_path) -> None:
    code = """
from supertuner.memory.overflow_allocator.plugin import OverflowLimits
from tests.memory.plugin import PluginCopy
plugin = PluginCopy(OverflowLimits(gpu_reserve_bytes=64 << 20))
assert plugin.alloc(2 << 20, "cpu_first") and plugin.alloc(2 << 20, "balanced")
assert plugin.stats().advice_failures == 0, plugin.stats()
"""
    run_python(code, environment(driver=12010, log=tmp_path / "calls"))
    calls = (tmp_path / "calls").read_text().splitlines()
    advice = [line.split(" ", 3)[3] for line in calls if line.startswith("cuMemAdvise ")]
    assert advice == ["advice=3 to=2:0 -> 0", "advice=5 to=1:0 -> 0", "advice=5 to=1:0 -> 0"]


@on_fake(devices=2)
def test_each_gpu_has_separate_statistics_and_the_caller_keeps_its_context(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(gpu_reserve_bytes=64 * MIB))
    before = current_context()
    here, there = plugin.alloc(SEGMENT), plugin.alloc(SEGMENT, device=1)
    assert (plugin.overflow.segment_kind(here), plugin.overflow.segment_kind(there)) == (
        MemoryKind.MANAGED,
        MemoryKind.DEVICE,
    )
    assert (bench.fake.hbm_used(0), bench.fake.hbm_used(1)) == (0, SEGMENT)
    assert (plugin.stats(0).stage, plugin.stats(1).stage) == (2, 1)
    assert current_context() == before
    plugin.free(there, SEGMENT, device=1)
    plugin.free(here, SEGMENT)
    assert plugin.stats(1).device_bytes == 0 and bench.fake.hbm_used(1) == 0
    assert plugin.alloc(SEGMENT, device=9) is None and plugin.alloc(SEGMENT, device=-1) is None
    assert plugin.alloc(0) is None and plugin.alloc(-5) is None


def current_context() -> int | None:
    """The current context of this thread according to the driver."""
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


@on_fake()
def test_a_thread_without_a_context_can_allocate_and_has_none_afterwards(bench: FakeBench) -> None:
    plugin, seen = PluginCopy(), []

    def work() -> None:
        address = plugin.alloc(SEGMENT)
        seen.append((plugin.overflow.segment_kind(address), current_context()))
        plugin.free(address, SEGMENT)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(MemoryKind.DEVICE, None)] and plugin.stats().device_bytes == 0


def in_child(body) -> object:
    """The result of a forked child."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, json.dumps(body()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        output = answer.read()
    os.waitpid(child, 0)
    return json.loads(output)


@on_fake()
def test_a_forked_child_is_refused_and_affects_nothing(bench: FakeBench) -> None:
    plugin = PluginCopy()
    address = plugin.alloc(SEGMENT)
    calls = bench.fake.calls("cuMemFree")

    def child() -> list[object]:
        refused = plugin.alloc(SEGMENT)
        plugin.free(address, SEGMENT)
        stats = plugin.stats()
        return [refused, stats.device_bytes, stats.frees, stats.last_call, bench.fake.calls("cuMemFree")]

    assert in_child(child) == [None, SEGMENT, 0, "fork", calls]
    assert plugin.stats().device_bytes == SEGMENT
    plugin.free(address, SEGMENT)
    assert plugin.stats().device_bytes == 0


@on_fake()
def test_the_time_per_segment_does_not_grow_with_a_hundred_thousand_segments(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(ratio=100.0, gpu_reserve_bytes=64 * MIB))

    def pair_s() -> float:
        """The shortest of many measurements, because other programs use this machine."""
        taken = []
        for _ in range(400):
            begin = time.perf_counter()
            plugin.free(plugin.alloc(4096))
            taken.append(time.perf_counter() - begin)
        return sorted(taken)[40]

    few = [plugin.alloc(4096) for _ in range(10)]
    with_few = pair_s()
    many = [plugin.alloc(4096) for _ in range(100_000)]
    with_many = pair_s()
    assert plugin.stats().managed_segments == 100_010
    assert with_many < with_few + 2e-6 + with_few, (with_few, with_many)
    for address in many[::2] + few + many[1::2]:
        plugin.free(address)
    assert plugin.stats().managed_bytes == plugin.stats().managed_segments == plugin.stats().foreign_frees == 0


def test_without_a_driver_everything_is_refused_with_the_reason() -> None:
    plugin = PluginCopy()
    assert plugin.alloc(SEGMENT) is None
    plugin.free(4096, SEGMENT)
    stats = plugin.stats()
    assert (stats.stage, stats.last_call, stats.last_error, stats.device_bytes) == (0, "libcuda.so.1", -1, 0)
    assert stats.refused_driver >= 1

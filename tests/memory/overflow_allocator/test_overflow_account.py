"""The overflow allocator's bookkeeping when something fails: a refused or failed request leaves no trace in it."""

from __future__ import annotations

import ctypes

from supertuner.memory.driver import MemoryKind
from supertuner.memory.overflow_allocator.plugin import OverflowLimits
from tests.fakes.fake_libraries import MIB
from tests.memory.on_fake import FakeBench, on_fake
from tests.memory.plugin import PluginCopy

SEGMENT = 2 * MIB
OUT_OF_MEMORY, DEINITIALIZED = 2, 4


@on_fake()
def test_a_request_refused_for_host_memory_does_not_change_the_stage(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(ratio=100.0, gpu_reserve_bytes=8 * MIB, host_floor_bytes=100 * MIB))
    plugin.set_host_available(100 * MIB)  # no memory can be spilled
    held = [plugin.alloc(SEGMENT) for _ in range(27)]  # 10 MiB are free: one more segment still leaves the reserve
    assert plugin.alloc(32 * MIB) is None and plugin.stats().refused_host == 1
    assert (plugin.stats().stage, plugin.stats().entered) == (1, 0)
    held.append(plugin.alloc(SEGMENT))
    assert held[-1] is not None, "device memory within the limits was refused"
    for address in held:
        plugin.free(address)


@on_fake()
def test_the_peak_counts_only_allocated_memory(bench: FakeBench) -> None:
    plugin = PluginCopy()
    for call in ("cuMemAlloc", "cuMemAllocManaged"):
        bench.fake.fault(call, OUT_OF_MEMORY)
    assert plugin.alloc(SEGMENT) is None
    stats = plugin.stats()
    assert (stats.device_peak_bytes, stats.managed_peak_bytes, stats.device_bytes, stats.managed_bytes) == (0, 0, 0, 0)


@on_fake()
def test_a_free_after_the_driver_has_ended_is_not_a_refusal_and_stays_booked(bench: FakeBench) -> None:
    plugin = PluginCopy()
    address, calls = plugin.alloc(SEGMENT), bench.fake.calls("cuMemFree")
    bench.fake.fault("cuCtxGetCurrent", DEINITIALIZED)
    plugin.free(address, SEGMENT)
    stats = plugin.stats()
    assert (stats.refusals, stats.free_failures, stats.device_bytes) == (0, 1, SEGMENT)
    assert (stats.last_call, stats.last_error) == ("cuCtxGetCurrent", DEINITIALIZED)
    assert bench.fake.calls("cuMemFree") == calls
    plugin.free(address, SEGMENT)
    assert plugin.stats().device_bytes == 0


@on_fake()
def test_memory_that_could_not_be_freed_can_be_freed_later(bench: FakeBench) -> None:
    plugin = PluginCopy()
    address = plugin.alloc(SEGMENT)
    bench.fake.fault("cuMemFree", 700)
    plugin.free(address, SEGMENT)
    assert plugin.overflow.segment_kind(address) is MemoryKind.DEVICE
    plugin.free(address, SEGMENT)
    stats = plugin.stats()
    assert (stats.device_bytes, stats.device_segments, stats.free_failures, stats.foreign_frees) == (0, 0, 1, 0)
    assert bench.fake.hbm_used() == 0


@on_fake(devices=2)
def test_the_failed_call_is_named(bench: FakeBench) -> None:
    plugin = PluginCopy(device=2)
    assert plugin.alloc(SEGMENT, device=2) is None
    assert plugin.stats(2).last_call == "cuDeviceGet"


@on_fake(devices=2)
def test_a_segment_is_freed_on_its_own_device_whatever_device_is_passed(bench: FakeBench) -> None:
    plugin = PluginCopy(device=1)
    address = plugin.alloc(SEGMENT, device=1)
    plugin.free(address, SEGMENT, device=0)
    assert plugin.stats(1).device_bytes == plugin.stats(1).device_segments == bench.fake.hbm_used(1) == 0
    assert (plugin.stats(0).frees, plugin.stats(1).frees) == (0, 1)


@on_fake()
def test_any_size_above_the_limits_is_refused(bench: FakeBench) -> None:
    plugin = PluginCopy(OverflowLimits(ratio=100.0))
    held = plugin.alloc(SEGMENT)
    largest = ctypes.c_size_t(-1).value // 2
    for nbytes in (largest, largest - 511, 1 << 62, -1, -largest - 1):
        assert plugin.alloc(nbytes) is None
    assert (plugin.stats().stage, plugin.stats().device_bytes) == (1, SEGMENT)
    plugin.free(held, SEGMENT)


@on_fake()
def test_a_reserve_above_gpu_memory_means_all_of_it(bench: FakeBench) -> None:
    for reserve in (65 * MIB, 1 << 63, (1 << 64) - 2, 1 << 64, 1 << 80):
        plugin = PluginCopy(OverflowLimits(gpu_reserve_bytes=reserve))
        address = plugin.alloc(SEGMENT)
        assert plugin.overflow.segment_kind(address) is MemoryKind.MANAGED, reserve
        plugin.free(address, SEGMENT)


@on_fake()
def test_a_floor_above_host_memory_allows_no_managed_memory(bench: FakeBench) -> None:
    for floor in ((1 << 64) - MIB, 1 << 64, 1 << 80):
        plugin = PluginCopy(OverflowLimits(gpu_reserve_bytes=64 * MIB, host_floor_bytes=floor))
        assert plugin.alloc(SEGMENT) is None, floor


@on_fake()
def test_an_invalid_device_number_is_ignored(bench: FakeBench) -> None:
    plugin = PluginCopy()
    for device in (-1, 64, 1 << 20):
        plugin.overflow.count_reclamations(light=1, hard=1, device=device)
    assert plugin.stats().light_reclamations == 0

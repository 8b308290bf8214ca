"""The decisions of overflow, as tables or properties: refusals, limits, routing, and when to reclaim memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from supertuner.config.settings.memory import OverflowSettings as Settings
from supertuner.core.errors import MemoryEngineError
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.core.types import GIB, MIB
from supertuner.memory.driver import AddressRange, DeviceProperties, MemoryKind, NotAvailable
from supertuner.memory.overflow_allocator import admission, pools
from supertuner.memory.overflow_allocator import plugin as overflow
from supertuner.memory.overflow_allocator.admission import (
    HostCapacity,
    TorchAllocatorFacts,
    overflow_limits,
    settings_warning,
    unavailable_reason,
)
from supertuner.memory.overflow_allocator.reclaim import (
    PoolSegment,
    PoolState,
    free_managed_ranges,
    hard_reclaim_reason,
    light_reclaim_reason,
    plugin_segments,
)
from supertuner.memory.overflow_allocator.routing import process_wide_problem
from supertuner.memory.probe import probe_machine
from tests.memory.machine_files import GB10, GH200, H100, FakeProbeDriver, folder_host, gb10_files, gh200_files, meminfo

ON = Settings(enabled=True)
CUDA = torch.device("cuda")
STOCK = TorchAllocatorFacts("2.13.0+cu130", sees_gpu=True)


def facts_of(host: HostFacts, *devices: DeviceProperties):
    return probe_machine(host, FakeProbeDriver(*devices), NotAvailable("not asked"))


@pytest.fixture
def gh200(tmp_path: Path) -> HostFacts:
    return folder_host(tmp_path, gh200_files())


def test_a_superchip_with_stock_torch_is_not_refused(gh200):
    assert unavailable_reason(ON, facts_of(gh200, GH200), CUDA, STOCK, gh200) is None


@pytest.mark.parametrize(
    ("settings", "device", "gpu", "torch_facts", "reason_part"),
    [
        (Settings(), CUDA, GH200, STOCK, "memory.overflow.enabled is false"),
        (ON, torch.device("cpu"), GH200, STOCK, "the device is cpu"),
        (ON, torch.device("cuda", 3), GH200, STOCK, "there is no GPU 3"),
        (ON, CUDA, replace(H100, managed=False), STOCK, "has no managed memory, which overflow requires"),
        (
            ON,
            CUDA,
            replace(H100, concurrent_managed=False),
            STOCK,
            "no managed memory that CPU and GPU can use concurrently",
        ),
        (ON, CUDA, GH200, replace(STOCK, sees_gpu=False), "sees no GPU; install a CUDA build"),
        (
            ON,
            CUDA,
            GH200,
            replace(STOCK, version="2.9.1"),
            "torch 2.9.1 is too old for overflow; install 2.13 or newer",
        ),
        (ON, CUDA, GH200, replace(STOCK, backend="cudaMallocAsync"), "torch uses cudaMallocAsync, which has no pools"),
        (ON, CUDA, GH200, replace(STOCK, memory_fraction=0.9), "a memory fraction of 0.9 is set for torch"),
        (ON, CUDA, GH200, replace(STOCK, has_uvm_statistics=True), "this torch is patched and spills by itself"),
        (Settings(enabled=True, host_floor_gb=9999), CUDA, GH200, STOCK, "host_floor_gb is 9999, and the host has"),
    ],
)
def test_a_reason_against_overflow_has_a_remedy(gh200, settings, device, gpu, torch_facts, reason_part):
    assert reason_part in (unavailable_reason(settings, facts_of(gh200, gpu), device, torch_facts, gh200) or "")


def test_a_reserve_of_the_whole_gpu_is_allowed_with_a_warning():
    assert (
        settings_warning(ON, 96 * GIB) is settings_warning(Settings(enabled=True, gpu_reserve_gb=95), 96 * GIB) is None
    )
    warning = settings_warning(Settings(enabled=True, gpu_reserve_gb=500), 96 * GIB)
    assert warning == "gpu_reserve_gb is 500, and the GPU has 96.0 GiB: all memory will be managed"


def test_one_pool_machines_are_refused_because_spilling_gains_nothing(tmp_path):
    host = folder_host(tmp_path, gb10_files())
    assert "share one memory on NVIDIA GB10" in (unavailable_reason(ON, facts_of(host, GB10), CUDA, STOCK, host) or "")


def test_a_host_without_readable_available_memory_is_refused(tmp_path):
    host = folder_host(tmp_path, {"proc/meminfo": "MemTotal: 1 kB\n"})
    assert "cannot be read" in (unavailable_reason(ON, facts_of(host, GH200), CUDA, STOCK, host) or "")


def test_opening_pools_without_a_gpu_raises_the_reason(gh200):
    facts = probe_machine(
        gh200, NotAvailable("no NVIDIA driver (libcuda.so.1) on this machine"), NotAvailable("not asked")
    )
    with pytest.raises(MemoryEngineError, match=r"memory\.overflow: there is no GPU 0 \(no NVIDIA driver"):
        pools.open_overflow_pools(ON, facts, gh200, NullSink(), driver=NotAvailable("none"))


def test_a_missing_plugin_raises_an_error_with_the_remedy(gh200, monkeypatch, tmp_path):
    monkeypatch.setattr(overflow, "__file__", str(tmp_path / "overflow.py"))
    monkeypatch.setattr(admission, "torch_allocator_facts", lambda device: STOCK)
    with pytest.raises(MemoryEngineError, match=r"was not built: install a C compiler \(gcc\)"):
        pools.open_overflow_pools(ON, facts_of(gh200, GH200), gh200, NullSink(), driver=NotAvailable("none"))


def test_limits_are_the_settings_or_shares_of_the_machine_by_default(tmp_path):
    host = folder_host(tmp_path, {"proc/meminfo": meminfo(MemTotal=480 << 20, MemAvailable=400 << 20)})
    plain = overflow_limits(ON, host, host_capacity=host.memory_available())
    assert (plain.ratio, plain.gpu_reserve_bytes, plain.host_floor_bytes) == (5.0, None, 48 * GIB)
    assert (plain.host_reserve_bytes, plain.host_cap_bytes) == (4 * GIB, 400 * GIB)
    assert plain.meminfo == tmp_path / "proc/meminfo"
    settings = Settings(enabled=True, oversubscription_ratio=2.5, gpu_reserve_gb=1.5, host_floor_gb=0.0)
    limits = overflow_limits(settings, host, host_capacity=340 * GIB)
    assert (limits.ratio, limits.gpu_reserve_bytes, limits.host_floor_bytes) == (2.5, int(1.5 * GIB), 0)
    assert limits.host_cap_bytes == 340 * GIB


def test_allocated_managed_memory_counts_once_in_the_host_capacity():
    room = HostCapacity()
    assert room.update(100, 30) == 130, "where memory of an earlier session resides is unknown"
    assert room.update(90, 0) == 90
    assert room.update(90, 40) == 90, "allocated, and not in the host yet"
    assert room.update(50, 40) == 90, "it is in the host now"
    assert room.update(30, 40) == 70, "others took host memory"
    assert room.update(95, 40) == 95, "others freed host memory"
    assert room.update(60, 0) == 60


def test_a_containers_limit_caps_the_host_capacity(tmp_path):
    files = {
        "proc/meminfo": meminfo(MemTotal=480 << 20, MemAvailable=400 << 20),
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{100 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{40 * GIB}\n",
    }
    host = folder_host(tmp_path, files)
    limits = overflow_limits(ON, host, host_capacity=HostCapacity().update(host.memory_available() or 0, 10 * GIB))
    assert (limits.host_cap_bytes, limits.host_floor_bytes) == (70 * GIB, 10 * GIB)


class DocumentedFunction:
    def __init__(self, doc: str) -> None:
        self.__doc__ = doc


KNOWN = (
    "_cuda_beginAllocateToPool(arg0: typing.SupportsInt | typing.SupportsIndex, "
    "arg1: tuple[typing.SupportsInt, typing.SupportsInt]) -> None\n"
)


@pytest.mark.parametrize(
    ("version", "call", "reason_part"),
    [
        ("2.13.0+cu130", DocumentedFunction(KNOWN), None),
        ("2.15.0", DocumentedFunction("_cuda_beginAllocateToPool(arg0: int, arg1: Tuple[int, int]) -> None"), None),
        ("2.13.0", None, "has no _cuda_beginAllocateToPool"),
        ("2.16.0", DocumentedFunction(KNOWN), "is not among the tested versions (2.13 to 2.15)"),
        ("3.0.0", DocumentedFunction(KNOWN), "is not among the tested versions"),
        ("2.14.0", DocumentedFunction(KNOWN.replace(") ->", ", arg2: bool) ->")), "changed the signature"),
        (
            "2.14.0",
            DocumentedFunction("_cuda_beginAllocateToPool(arg0: tuple[int, int]) -> None"),
            "changed the signature",
        ),
        ("2.14.0", DocumentedFunction(""), "changed the signature"),
    ],
)
def test_the_private_call_is_used_only_with_a_known_version_and_signature(version, call, reason_part):
    reason = process_wide_problem(version, call)
    assert reason is None if reason_part is None else reason_part in (reason or "")


def block(address: int, size: int, state: str) -> dict[str, object]:
    return {"address": address, "size": size, "state": state}


def test_a_snapshot_gives_the_plugins_segments_with_their_free_blocks():
    blocks = [block(4096, 100, "active_allocated"), block(4196, 50, "inactive"), block(4246, 50, "active_pending_free")]
    snapshot = [
        {"address": 4096, "total_size": 200, "blocks": blocks},
        {"address": 9000, "total_size": 10, "blocks": [block(9000, 10, "inactive")]},
    ]
    found = plugin_segments(snapshot, {4096: MemoryKind.MANAGED}.get)
    assert found == (PoolSegment(AddressRange(4096, 200), MemoryKind.MANAGED, (AddressRange(4196, 50),)),)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), min_size=1, max_size=20), st.sampled_from([16, 64]))
def test_free_managed_ranges_are_whole_pages_inside_free_blocks(blocks, page):
    address, free, expected = 1 << 20, [], 0
    for is_free, size in blocks:
        if is_free:
            free.append(AddressRange(address, size))
            expected += max(0, (address + size) // page - -(-address // page))
        address += size
    whole = AddressRange(1 << 20, address - (1 << 20))
    spans = free_managed_ranges(
        [PoolSegment(whole, MemoryKind.MANAGED, tuple(free)), PoolSegment(whole, MemoryKind.DEVICE, tuple(free))], page
    )
    assert sum(span.nbytes for span in spans) == expected * page
    for span in spans:
        assert span.address % page == span.nbytes % page == 0
        assert any(one.address <= span.address and span.end <= one.end for one in free)


CALM = PoolState(
    stage=2,
    total_bytes=100 * GIB,
    gpu_free_bytes=5 * GIB,
    needed_free_bytes=10 * GIB,
    reserved_bytes=120 * GIB,
    cached_bytes=60 * GIB,
    cold_bytes=20 * GIB,
    peak_bytes=110 * GIB,
    refused=False,
    used_since_light=True,
    can_discard=True,
    steps_since_light=None,
    steps_since_hard=None,
)


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, True),
        ({"steps_since_light": 1}, True),
        ({"stage": 1}, False),
        ({"cold_bytes": 0}, False),
        ({"cold_bytes": 500 * MIB}, False),
        ({"used_since_light": False}, False),
        ({"can_discard": False}, True),
        ({"can_discard": False, "steps_since_light": 1}, False),
        ({"can_discard": False, "steps_since_light": 100}, True),
    ],
)
def test_when_a_light_reclaim_happens(changes, due):
    assert (light_reclaim_reason(replace(CALM, **changes)) is not None) is due


@pytest.mark.parametrize(
    ("changes", "reason_part"),
    [
        ({}, None),
        ({"peak_bytes": 70 * GIB}, "120 GiB are reserved, and at most 70.0 GiB were in use at once"),
        ({"peak_bytes": 70 * GIB, "steps_since_hard": 99}, None),
        ({"peak_bytes": 70 * GIB, "steps_since_hard": 100}, "at most"),
        ({"peak_bytes": 70 * GIB, "cached_bytes": 4 * GIB}, None),
        ({"refused": True}, "an allocation was refused while the cache held 60.0 GiB"),
        ({"refused": True, "steps_since_hard": 1}, "an allocation was refused"),
        ({"refused": True, "cached_bytes": 0}, None),
        ({"gpu_free_bytes": 29 * GIB}, None),
        ({"gpu_free_bytes": 31 * GIB}, "the GPU has room again for the 20.0 GiB that spilled"),
        ({"gpu_free_bytes": 31 * GIB, "cold_bytes": GIB}, None),
    ],
)
def test_when_a_hard_reclaim_happens(changes, reason_part):
    reason = hard_reclaim_reason(replace(CALM, **changes))
    assert reason is None if reason_part is None else reason_part in (reason or "")

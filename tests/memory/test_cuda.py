"""Tests of `cuda.py` beyond the contract: why there is no driver; versions of driver and bindings; devices, contexts,
forks.
"""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import time
from ctypes import addressof, c_char
from pathlib import Path
from statistics import median

import pytest

from supertuner.memory.cuda import CudaDriver, kernel_move_pages, open_cuda, start_driver
from supertuner.memory.driver import (
    HOST,
    AddressRange,
    DeviceProperties,
    Driver,
    DriverError,
    GpuLocation,
    HostNumaLocation,
    MemoryAdvice,
    MemoryKind,
    NotAvailable,
)
from tests.fakes.fake_libraries import MIB, ROOT, environment, run_python
from tests.memory.bench import BLOCK, allocated, refuses
from tests.memory.old_bindings import OldBindings
from tests.memory.on_fake import FakeBench, on_fake

OPEN = "from supertuner.memory.cuda import open_cuda; print(open_cuda().reason)"


# ---- why there is no driver


@pytest.mark.requires(not Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA driver")
def test_a_missing_driver_is_reported_quickly() -> None:
    missing = open_cuda()
    assert isinstance(missing, NotAvailable)
    assert missing.reason == "no NVIDIA driver (libcuda.so.1) on this machine"
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        open_cuda()
        seconds.append(time.perf_counter() - began)
    assert median(seconds) < 0.005


def test_without_a_driver_the_bindings_are_not_imported() -> None:
    code = "import sys; from supertuner.memory.cuda import open_cuda; open_cuda(); print('cuda' in sys.modules)"
    if isinstance(open_cuda(), NotAvailable):
        assert run_python(code, os.environ) == "False\n"


def test_a_driver_without_a_gpu_differs_from_no_driver() -> None:
    assert run_python(OPEN, environment(devices=0)) == "the driver found no GPU\n"


def test_a_driver_that_does_not_start_is_reported_with_its_error() -> None:
    reason = run_python(OPEN, environment(faults="cuInit=803"))
    assert "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in reason
    assert "nvidia-smi" in reason


def test_a_driver_too_old_for_locations_is_reported_with_both_versions() -> None:
    assert run_python(OPEN, environment(driver=12010)) == "the driver supports CUDA 12.1; 12.2 or newer is required\n"


def test_without_bindings_the_remedy_is_to_install_them() -> None:
    code = f"import sys; sys.modules['cuda.bindings'] = None; {OPEN}"
    assert "pip install cuda-bindings" in run_python(code, environment())


def test_a_file_that_is_not_a_library_is_not_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library, long enough to be read as the start of one: " + "x" * 64)
    reason = run_python(OPEN, {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert reason.startswith("libcuda.so.1 cannot be loaded:")


# ---- devices


@on_fake("gh200")
def test_a_superchip_is_recognised_by_its_attributes(bench: FakeBench) -> None:
    (found,) = bench.driver.devices()
    assert found == DeviceProperties(
        number=0,
        name="NVIDIA GH200 480GB",
        total_bytes=64 * MIB,
        capability=(9, 0),
        managed=True,
        concurrent_managed=True,
        pageable=True,
        host_page_tables=True,
        direct_host_access=True,
        integrated=False,
        numa_node=1,
        host_node=0,
        uuid=found.uuid,
    )


@on_fake("gb10")
def test_a_one_pool_gpu_is_integrated_and_has_no_numa_node(bench: FakeBench) -> None:
    (found,) = bench.driver.devices()
    assert (found.integrated, found.numa_node, found.capability) == (True, None, (12, 1))


@on_fake("pcie")
def test_a_card_reads_no_system_memory_and_has_no_numa_node(bench: FakeBench) -> None:
    (found,) = bench.driver.devices()
    assert (found.pageable, found.host_page_tables, found.numa_node, found.managed) == (False, False, None, True)


@on_fake("gh200")
def test_an_attribute_that_the_driver_does_not_know_is_none(bench: FakeBench) -> None:
    bench.fake.fault("cuDeviceGetAttribute", 1, times=0)
    (found,) = bench.driver.devices()
    assert (found.managed, found.integrated, found.capability, found.numa_node) == (None, None, None, None)


@on_fake("gh200", devices=2)
def test_two_devices_have_two_memories_and_two_names(bench: FakeBench) -> None:
    first, second = bench.driver.devices()
    assert (first.number, second.number, first.numa_node, second.numa_node) == (0, 1, 1, 2)
    assert first.uuid != second.uuid
    address = bench.driver.allocate(MemoryKind.DEVICE, 4 * MIB, device=1)
    assert (bench.driver.free_bytes(0), bench.driver.free_bytes(1)) == (64 * MIB, 60 * MIB)
    bench.driver.free(address)
    assert bench.driver.free_bytes(1) == 64 * MIB


@on_fake("gh200", devices=2)
def test_managed_memory_migrates_to_the_requested_device(bench: FakeBench) -> None:
    with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
        for home in (GpuLocation(1), GpuLocation(0), HOST, GpuLocation(1)):
            bench.driver.prefetch([span], home)
            assert bench.driver.last_prefetch_location(span) == home
            assert bench.resident(span)[home] == BLOCK // bench.driver.page_bytes
        bench.driver.advise(span, MemoryAdvice.ACCESSED_BY, GpuLocation(0))
        bench.driver.advise(span, MemoryAdvice.ACCESSED_BY, GpuLocation(1))
        assert set(bench.driver.accessed_by(span)) == {GpuLocation(0), GpuLocation(1)}
        bench.driver.fill(span, 1, device=0)
        assert bench.resident(span)[GpuLocation(1)] == BLOCK // bench.driver.page_bytes, (
            "mapped, so it is used where it is"
        )


# ---- versions


def _prefetch_three_ranges(bench: FakeBench, driver: Driver) -> None:
    with allocated(bench, MemoryKind.MANAGED, 3 * BLOCK) as span:
        parts = [AddressRange(span.address + i * BLOCK, BLOCK) for i in range(3)]
        bench.fake.reset()
        driver.prefetch(parts, GpuLocation(0))
        assert bench.resident(span)[GpuLocation(0)] == 3 * BLOCK // bench.driver.page_bytes


@on_fake("gh200", driver=13000)
def test_with_cuda_13_many_ranges_are_prefetched_by_one_call(bench: FakeBench) -> None:
    _prefetch_three_ranges(bench, bench.driver)
    assert (bench.fake.calls("cuMemPrefetchBatchAsync"), bench.fake.calls("cuMemPrefetchAsync")) == (1, 0)


@on_fake("gh200", driver=12020)
def test_before_cuda_13_ranges_are_prefetched_one_by_one(bench: FakeBench) -> None:
    _prefetch_three_ranges(bench, bench.driver)
    assert (bench.fake.calls("cuMemPrefetchBatchAsync"), bench.fake.calls("cuMemPrefetchAsync")) == (0, 3)


@on_fake("gh200", driver=13000)
def test_an_empty_prefetch_or_discard_makes_no_call(bench: FakeBench) -> None:
    bench.driver.prefetch([], GpuLocation(0))
    bench.driver.discard([])
    assert bench.fake.calls("cuMemPrefetchBatchAsync") == bench.fake.calls("cuMemDiscardBatchAsync") == 0


@on_fake("gh200", driver=13000)
def test_bindings_of_cuda_12_have_other_names_and_no_batch_calls(bench: FakeBench) -> None:
    from cuda.bindings import driver as bindings

    old = start_driver(OldBindings(bindings), kernel_move_pages)  # type: ignore[arg-type]
    assert isinstance(old, CudaDriver)
    _prefetch_three_ranges(bench, old)
    assert (bench.fake.calls("cuMemPrefetchBatchAsync"), bench.fake.calls("cuMemPrefetchAsync")) == (0, 3)
    with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
        for home in (HOST, GpuLocation(0), HostNumaLocation(0)):
            old.advise(span, MemoryAdvice.PREFERRED_LOCATION, home)
            assert old.preferred_location(span) == home
        assert refuses("CUDA_ERROR_NOT_FOUND", old.discard, [span]).unsupported


# ---- contexts, threads, forks


@on_fake("gh200", devices=2)
def test_a_call_restores_the_threads_current_context(bench: FakeBench) -> None:
    from cuda.bindings import driver as bindings

    def current() -> int:
        return int(bindings.cuCtxGetCurrent()[1])

    with allocated(bench, MemoryKind.MANAGED, BLOCK) as span:
        for context in (0, int(bindings.cuDevicePrimaryCtxRetain(1)[1])):
            bindings.cuCtxSetCurrent(context)
            for device in (0, 1):
                bench.driver.fill(span, 1, device)
                bench.driver.prefetch([span], GpuLocation(device))
                refuses(None, bench.driver.fill, AddressRange(span.address, 1 << 40), 1, device)
                assert current() == context
        bindings.cuCtxSetCurrent(0)


@on_fake("gh200")
def test_each_device_has_one_context_and_one_stream(bench: FakeBench) -> None:
    driver = open_cuda()
    assert isinstance(driver, CudaDriver)
    bench.fake.reset()
    for _ in range(3):
        driver.synchronize()
    assert (bench.fake.calls("cuDevicePrimaryCtxRetain"), bench.fake.calls("cuStreamCreate")) == (1, 1)


@on_fake("gh200")
def test_after_a_fork_the_child_fails_and_the_parent_continues(bench: FakeBench) -> None:
    before = bench.driver.free_bytes(0)
    child = os.fork()
    if child == 0:
        try:
            bench.driver.free_bytes(0)
        except DriverError as refused:
            os._exit(0 if refused.name == "CUDA_ERROR_NOT_INITIALIZED" else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bench.driver.free_bytes(0) == before


@on_fake("pcie")
def test_pinned_memory_is_recognised(bench: FakeBench) -> None:
    from cuda.bindings import driver as bindings

    bindings.cuCtxSetCurrent(bindings.cuDevicePrimaryCtxRetain(0)[1])
    _, address = bindings.cuMemHostAlloc(4096, 0)
    assert bench.driver.memory_kind_at(int(address)) is MemoryKind.PINNED
    bindings.cuMemFreeHost(address)
    bindings.cuCtxSetCurrent(0)
    refuses("CUDA_ERROR_INVALID_VALUE", bench.driver.allocate, MemoryKind.PINNED, 4096)


# ---- page locations from the kernel, and guarantees of the fake driver


def test_the_kernel_reports_page_nodes_or_enosys() -> None:
    block = mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[0] = 1
    address = addressof(c_char.from_buffer(block))
    touched, untouched = kernel_move_pages([address, address + mmap.PAGESIZE])
    assert touched >= 0 or touched == -errno.ENOSYS
    assert untouched in (-errno.ENOENT, -errno.ENOSYS)
    assert kernel_move_pages([]) == []
    block.close()


def test_a_log_has_one_line_for_each_call(tmp_path: Path) -> None:
    code = "from supertuner.memory.cuda import open_cuda; d = open_cuda(); d.free_bytes(0); d.free_bytes(0)"
    run_python(code, environment(log=str(tmp_path / "log")))
    calls = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert calls.count("cuMemGetInfo") == 2
    assert calls[0] == "cuInit"


def test_faults_can_begin_at_a_later_call_and_repeat() -> None:
    code = """
from supertuner.memory.cuda import open_cuda
from supertuner.memory.driver import DriverError
driver = open_cuda()
for _ in range(5):
    try:
        driver.free_bytes(0)
        print("ok", end=" ")
    except DriverError as refused:
        print(refused.code, end=" ")
"""
    assert run_python(code, environment(faults="cuMemGetInfo=700@2x2")).split() == ["ok", "700", "700", "ok", "ok"]


def test_only_the_intended_process_loads_the_fake_driver() -> None:
    assert not any(
        "supertuner-fakes" in line and "libcuda.so" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )
    command = [sys.executable, "-c", "from supertuner.memory.cuda import open_cuda; print(type(open_cuda()).__name__)"]
    seen = [
        subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for env in (environment(), dict(os.environ))
    ]
    assert seen[0] == "CudaDriver"
    assert seen[1] == type(open_cuda()).__name__


@on_fake("gh200", hbm_bytes=96 << 30)
def test_the_lookup_time_does_not_grow_with_a_hundred_thousand_ranges(bench: FakeBench) -> None:
    def seconds_for_each(addresses: list[int]) -> float:
        some = addresses[:: max(1, len(addresses) // 1000)]
        began = time.perf_counter()
        for address in some:
            bench.driver.memory_kind_at(address + 100)
        return (time.perf_counter() - began) / len(some)

    few = [bench.driver.allocate(MemoryKind.MANAGED, 8192) for _ in range(10)] * 100
    quick = min(seconds_for_each(few) for _ in range(5))
    many = [bench.driver.allocate(MemoryKind.MANAGED, 8192) for _ in range(100_000)]
    slow = min(seconds_for_each(many) for _ in range(5))
    for address in [*few[:10], *many]:
        bench.driver.free(address)
    assert slow < 5 * quick + 5e-6
    refuses("CUDA_ERROR_INVALID_VALUE", bench.driver.free, many[0])


# ---- more than one GPU


@on_fake("gh200", devices=2)
def test_work_on_the_second_gpu_creates_no_context_on_the_first(bench: FakeBench) -> None:
    """A context takes hundreds of megabytes of a GPU that another process may be using."""
    driver = open_cuda()
    assert isinstance(driver, CudaDriver)
    span = AddressRange(driver.allocate(MemoryKind.MANAGED, BLOCK, 1), BLOCK)
    driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
    assert driver.preferred_location(span) is HOST and driver.accessed_by(span) == () and not driver.read_mostly(span)
    driver.prefetch([span], HOST)
    driver.discard([span])
    driver.synchronize(1)
    assert len(driver.read(span)) == BLOCK
    driver.free(span.address)
    assert (bench.fake.calls("cuDevicePrimaryCtxRetain"), bench.fake.calls("cuStreamCreate")) == (1, 1)


@on_fake("gh200", devices=2)
def test_synchronizing_one_gpu_also_waits_for_the_streams_of_others(bench: FakeBench) -> None:
    """The host has no stream: a prefetch to the host, or a discard, may be on any device's stream."""
    driver = open_cuda()
    assert isinstance(driver, CudaDriver)
    span = AddressRange(driver.allocate(MemoryKind.MANAGED, BLOCK, 1), BLOCK)
    driver.free_bytes(0)
    driver.prefetch([span], HOST)
    waited = bench.fake.calls("cuStreamSynchronize")
    driver.synchronize(0)
    assert bench.fake.calls("cuStreamSynchronize") == waited + 2
    driver.free(span.address)

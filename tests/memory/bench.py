"""What the laws of a memory driver are said in: the bench they run on, and words for what a machine can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import pytest

from supertuner.memory.driver import (
    HOST,
    AddressRange,
    DeviceProperties,
    Driver,
    DriverError,
    GpuLocation,
    HostNumaLocation,
    MemoryKind,
    MemoryLocation,
)

BLOCK = 2 << 20
"""What the driver works in. Laws about pressure keep to whole blocks, so a body may evict by page or by block."""
GPU = GpuLocation(0)
CUDA_13 = 13000
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
INVALID_VALUE = "CUDA_ERROR_INVALID_VALUE"
INVALID_DEVICE = "CUDA_ERROR_INVALID_DEVICE"


class DriverBench(Protocol):
    """A driver with nothing allocated, and what only a test double can tell of it."""

    driver: Driver
    hbm_bytes: int
    """The GPU's memory; a few dozen MiB on a double. On a one-pool machine: the pool."""
    resident: Callable[[AddressRange], Mapping[MemoryLocation | None, int]] | None
    """How many pages of `driver.page_bytes` of the range are where; None: not populated. Absent on a real GPU."""
    fail: Callable[[str, str], None] | None
    """`fail(verb, error name)`: the next call below that verb of the seam fails once. `allocate`: of device memory."""


@contextmanager
def allocated(bench: DriverBench, kind: MemoryKind, nbytes: int) -> Iterator[AddressRange]:
    """Memory of whole blocks, aligned to blocks where it may be moved, given back afterwards."""
    slack = 0 if kind is MemoryKind.DEVICE else BLOCK
    address = bench.driver.allocate(kind, nbytes + slack)
    try:
        yield AddressRange(-(-address // BLOCK) * BLOCK if slack else address, nbytes)
    finally:
        bench.driver.free(address)


def refuses(name: str | None, call: Callable[..., object], *arguments: object) -> DriverError:
    """The refusal of what must be refused; with `name`, for that reason."""
    with pytest.raises(DriverError) as refused:
        call(*arguments)
    assert name in (None, refused.value.name)
    return refused.value


def fails_once(bench: DriverBench, verb: str, call: Callable[[], object], spare: list[int]) -> None:
    assert bench.fail is not None
    bench.fail(verb, "CUDA_ERROR_UNKNOWN")
    assert not refuses("CUDA_ERROR_UNKNOWN", call).unsupported
    call()
    for address in spare:
        bench.driver.free(address)


def prefetch_and_wait(bench: DriverBench, spans: list[AddressRange], home: MemoryLocation) -> None:
    bench.driver.prefetch(spans, home)
    bench.driver.synchronize()


def resident(bench: DriverBench, span: AddressRange) -> Mapping[MemoryLocation | None, int]:
    if bench.resident is None:
        pytest.skip("no one can say here where pages are")
    return {home: count for home, count in bench.resident(span).items() if count}


def on_gpu(bench: DriverBench, span: AddressRange) -> int:
    return resident(bench, span).get(GPU, 0)


def on_host(bench: DriverBench, span: AddressRange) -> int:
    return sum(n for home, n in resident(bench, span).items() if home is HOST or isinstance(home, HostNumaLocation))


def pages(bench: DriverBench, span: AddressRange) -> int:
    return span.nbytes // bench.driver.page_bytes


def start(span: AddressRange) -> int:
    return span.address


def device(bench: DriverBench) -> DeviceProperties:
    return bench.driver.devices()[0]


def kinds(bench: DriverBench) -> list[MemoryKind]:
    return [MemoryKind.DEVICE, MemoryKind.SYSTEM, *([MemoryKind.MANAGED] if device(bench).managed else [])]


def gpu_kinds(bench: DriverBench) -> list[MemoryKind]:
    """What the GPU can write."""
    return [k for k in kinds(bench) if k is not MemoryKind.SYSTEM or device(bench).pageable]


def migrates_pages(bench: DriverBench) -> bool:
    return bool(device(bench).managed and device(bench).concurrent_managed)


def needs_prefetch(bench: DriverBench) -> None:
    if not migrates_pages(bench):
        pytest.skip("needs managed memory with concurrent access")


def needs_movement(bench: DriverBench) -> None:
    needs_oversubscription(bench)
    if bench.resident is None:
        pytest.skip("no one can say here where pages are")


def needs_oversubscription(bench: DriverBench) -> None:
    needs_prefetch(bench)
    if device(bench).integrated:
        pytest.skip("one pool: there is nowhere to move to")


def needs_ats(bench: DriverBench) -> None:
    if not device(bench).host_page_tables or device(bench).integrated:
        pytest.skip("needs ATS and two memories")


def needs_discard(bench: DriverBench) -> None:
    if bench.driver.version() < CUDA_13:
        pytest.skip("needs CUDA 13")

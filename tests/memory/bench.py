"""Shared parts of the driver contract tests: the bench that they run on, and the machine abilities that each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

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
"""The driver's migration unit. Tests with memory pressure use whole blocks, because an implementation may evict by page
or by block.
"""
GPU = GpuLocation(0)
CUDA_13 = 13000
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
INVALID_VALUE = "CUDA_ERROR_INVALID_VALUE"
INVALID_DEVICE = "CUDA_ERROR_INVALID_DEVICE"
ContractTest = TypeVar("ContractTest", bound=Callable[..., None])


class DriverBench(Protocol):
    """A driver without allocations, and what only a test double can report or do."""

    driver: Driver
    hbm_bytes: int
    """Size of GPU memory; a few dozen MiB on a double. On a one-pool machine, the pool."""
    resident: Callable[[AddressRange], Mapping[MemoryLocation | None, int]] | None
    """Pages of `driver.page_bytes` of the range by location; key None: not populated. None on a real GPU."""
    fail: Callable[[str, str], None] | None
    """`fail(method, error name)`: the next call of that driver method fails once; `allocate` only for device memory."""


@contextmanager
def allocated(bench: DriverBench, kind: MemoryKind, nbytes: int) -> Iterator[AddressRange]:
    """Memory in whole blocks, block-aligned where it can migrate, freed afterwards."""
    slack = 0 if kind is MemoryKind.DEVICE else BLOCK
    address = bench.driver.allocate(kind, nbytes + slack)
    try:
        yield AddressRange(-(-address // BLOCK) * BLOCK if slack else address, nbytes)
    finally:
        bench.driver.free(address)


def refuses(name: str | None, call: Callable[..., object], *arguments: object) -> DriverError:
    """Return the DriverError that the call must raise; with `name`, check the error's name."""
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
    assert bench.resident is not None, 'the test lacks @needs("page locations")'
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
    """The kinds of memory that the GPU can write."""
    return [k for k in kinds(bench) if k is not MemoryKind.SYSTEM or device(bench).pageable]


def migrates_pages(bench: DriverBench) -> bool:
    return bool(device(bench).managed and device(bench).concurrent_managed)


def bench_abilities(bench: DriverBench) -> list[str]:
    """The abilities of the bench's machine, as `needs` names them, sorted."""
    properties, version = device(bench), bench.driver.version()
    abilities = {
        "prefetch": migrates_pages(bench),
        "oversubscription": migrates_pages(bench) and not properties.integrated,
        "one pool": migrates_pages(bench) and bool(properties.integrated),
        "managed without concurrent access": bool(properties.managed and not properties.concurrent_managed),
        "no managed memory": not properties.managed,
        "host page tables": bool(properties.host_page_tables),
        "ats": bool(properties.host_page_tables and not properties.integrated),
        "no pageable access": not properties.pageable,
        "discard": version >= CUDA_13,
        "no discard": version < CUDA_13,
        "page locations": bench.resident is not None,
        "injected faults": bench.fail is not None,
    }
    return sorted(name for name, present in abilities.items() if present)


def needs(*abilities: str) -> Callable[[ContractTest], ContractTest]:
    """Declare that a contract test applies only to machines with all of these abilities; it is not collected for
    others.
    """

    def mark(test: ContractTest) -> ContractTest:
        test.needs = frozenset(abilities)  # type: ignore[attr-defined]
        return test

    return mark


def needed_abilities(test: Callable[..., None]) -> frozenset[str]:
    return getattr(test, "needs", frozenset())

"""Every driver call of `cuda.py` is tested: each method makes exactly the calls listed here, and each call that fails
raises DriverError with its name.

A driver call that is not listed fails the last test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import supertuner.memory.cuda as product
from supertuner.memory.cuda import CudaDriver, open_cuda
from supertuner.memory.driver import (
    HOST,
    AddressRange,
    Driver,
    DriverError,
    GpuLocation,
    MemoryAdvice,
    MemoryKind,
    NotAvailable,
)
from tests.memory.on_fake import FakeBench, FakeProcessPool

UNKNOWN = 999
PIECE = 64 << 10
PREFER = MemoryAdvice.PREFERRED_LOCATION


class VerbMemory:
    """The memory that the methods are tested with."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.device = AddressRange(driver.allocate(MemoryKind.DEVICE, PIECE), PIECE)
        self.managed = AddressRange(driver.allocate(MemoryKind.MANAGED, PIECE), PIECE)
        self.halves = [
            AddressRange(self.managed.address, PIECE // 2),
            AddressRange(self.managed.address + PIECE // 2, PIECE // 2),
        ]

    def close(self) -> None:
        self._driver.free(self.device.address)
        self._driver.free(self.managed.address)


def _started() -> CudaDriver:
    """A newly opened driver. If opening fails, raises DriverError with the reason."""
    driver = open_cuda()
    if isinstance(driver, NotAvailable):
        raise DriverError(driver.reason, "", UNKNOWN)
    return driver


ON = ("cuCtxPushCurrent", "cuCtxPopCurrent")
ATTRIBUTES = 11
VERBS: dict[str, tuple[Callable[[Driver, VerbMemory], object], list[str]]] = {
    "open_cuda": (lambda d, m: _started(), ["cuInit", "cuDeviceGetCount", "cuDriverGetVersion"]),
    "first use": (
        lambda d, m: _started().synchronize(),
        [
            *("cuInit", "cuDeviceGetCount", "cuDriverGetVersion"),
            *("cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuStreamSynchronize", *ON),
        ],
    ),
    "version": (lambda d, m: d.version(), ["cuDriverGetVersion"]),
    "devices": (
        lambda d, m: d.devices(),
        [
            "cuDeviceGetCount",
            "cuDeviceGetName",
            "cuDeviceGetUuid",
            "cuDeviceTotalMem",
            *["cuDeviceGetAttribute"] * ATTRIBUTES,
        ],
    ),
    "free_bytes": (lambda d, m: d.free_bytes(0), ["cuMemGetInfo", *ON]),
    "allocate device": (lambda d, m: d.free(d.allocate(MemoryKind.DEVICE, 8)), ["cuMemAlloc", "cuMemFree", *ON, *ON]),
    "allocate managed": (
        lambda d, m: d.free(d.allocate(MemoryKind.MANAGED, 8)),
        ["cuMemAllocManaged", "cuMemFree", *ON, *ON],
    ),
    "allocate system": (lambda d, m: d.free(d.allocate(MemoryKind.SYSTEM, 8)), []),
    "memory_kind_at": (lambda d, m: d.memory_kind_at(m.managed.address), ["cuPointerGetAttributes"]),
    "advise": (lambda d, m: d.advise(m.managed, PREFER, HOST), ["cuMemAdvise", *ON]),
    "prefetch": (
        lambda d, m: d.prefetch(m.halves, GpuLocation(0)),
        ["cuDriverGetVersion", "cuMemPrefetchBatchAsync", *ON],
    ),
    "discard": (lambda d, m: d.discard(m.halves), ["cuDriverGetVersion", "cuMemDiscardBatchAsync", *ON]),
    "preferred_location": (lambda d, m: d.preferred_location(m.managed), ["cuMemRangeGetAttributes", *ON]),
    "last_prefetch_location": (lambda d, m: d.last_prefetch_location(m.managed), ["cuMemRangeGetAttributes", *ON]),
    "accessed_by": (lambda d, m: d.accessed_by(m.managed), ["cuDeviceGetCount", "cuMemRangeGetAttribute", *ON]),
    "read_mostly": (lambda d, m: d.read_mostly(m.managed), ["cuMemRangeGetAttribute", *ON]),
    "fill": (lambda d, m: d.fill(m.device, 1), ["cuMemsetD8Async", "cuStreamSynchronize", *ON]),
    "copy": (
        lambda d, m: d.copy(m.device.address, m.managed.address, PIECE),
        ["cuMemcpyAsync", "cuStreamSynchronize", *ON],
    ),
    "read device": (lambda d, m: d.read(m.device), ["cuPointerGetAttributes", "cuMemcpyDtoH", *ON]),
    "read managed": (lambda d, m: d.read(m.managed), ["cuPointerGetAttributes"]),
    "synchronize": (lambda d, m: d.synchronize(), ["cuStreamSynchronize", *ON]),
}
BEFORE_13 = {"prefetch": ["cuDriverGetVersion", "cuMemPrefetchAsync", "cuMemPrefetchAsync", *ON]}
"""The differences without batch calls."""


def expected(verb: str, has_batches: bool) -> dict[str, int]:
    calls = VERBS[verb][1] if has_batches else BEFORE_13.get(verb, VERBS[verb][1])
    return {name: calls.count(name) for name in calls}


def all_calls() -> list[str]:
    """Every driver call in the syntax tree of `cuda.py`, without its version suffix."""
    tree = ast.parse(Path(product.__file__).read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted({re.sub(r"_v\d$", "", name) for name in names if re.fullmatch(r"cu[A-Z]\w+", name)})


def try_verb(bench: FakeBench, verb: str) -> None:
    """Runs in the process on the fake driver: compare a method's calls, then let each of them fail."""
    act, calls = VERBS[verb][0], expected(verb, bench.driver.version() >= 13000)
    memory = VerbMemory(bench.driver)
    bench.fake.reset()
    act(bench.driver, memory)
    assert {name: n for name in all_calls() if (n := bench.fake.calls(name))} == calls
    for call in calls:
        bench.fake.reset()
        bench.fake.fault(call, UNKNOWN)
        with pytest.raises(DriverError, match=call):
            act(bench.driver, memory)
        _leave_all_contexts(bench)
    bench.fake.reset()
    act(bench.driver, memory)
    memory.close()


def _leave_all_contexts(bench: FakeBench) -> None:
    """Pop the contexts that a failed cuCtxPopCurrent left."""
    from cuda.bindings import driver as bindings

    bench.fake.reset()
    while int(bindings.cuCtxGetCurrent()[1]):
        bindings.cuCtxPopCurrent()


@pytest.mark.parametrize("verb", VERBS)
def test_a_method_makes_its_calls_and_raises_for_each_that_fails(fakes: FakeProcessPool, verb: str) -> None:
    fakes.run({"profile": "gh200"}, f"{__name__}:try_verb", {"verb": verb})


@pytest.mark.parametrize("verb", BEFORE_13)
def test_before_cuda_13_a_method_makes_separate_calls_instead_of_batch_calls(fakes: FakeProcessPool, verb: str) -> None:
    fakes.run({"profile": "gh200", "driver": 12020}, f"{__name__}:try_verb", {"verb": verb})


def test_every_driver_call_of_cuda_py_is_listed() -> None:
    tried = {call for verb in VERBS for batches in (True, False) for call in expected(verb, batches)}
    assert len(tried) > 20
    assert sorted(tried) == all_calls()

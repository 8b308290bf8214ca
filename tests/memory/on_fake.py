"""Runs tests on the fake driver, each in a separate process of its machine profile, so that no other test sees a GPU.

A `FakeProcess` is a Python process with the fake libcuda in its LD_LIBRARY_PATH; there is one for each profile, kept
for the session. It runs functions that it receives by name, each with a `FakeBench`, and reports their outcome.
`on_fake` turns a function of a bench into such a test.

    @on_fake("pcie", devices=2)
    def test_something(bench: FakeBench) -> None: ...
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import pytest

from supertuner.memory.cuda import CudaDriver, open_cuda
from supertuner.memory.driver import HOST, AddressRange, GpuLocation, MemoryLocation
from tests.fakes.fake_libraries import MIB, ROOT, FakeCuda, environment, load_fake

DRIVER_CALLS = {
    "allocate": "cuMemAlloc",
    "free": "cuMemFree",
    "free_bytes": "cuMemGetInfo",
    "fill": "cuMemsetD8Async",
    "copy": "cuMemcpyAsync",
    "synchronize": "cuStreamSynchronize",
    "advise": "cuMemAdvise",
    "discard": "cuMemDiscardBatchAsync",
    "preferred_location": "cuMemRangeGetAttributes",
    "last_prefetch_location": "cuMemRangeGetAttributes",
}
"""The driver call behind a method of `Driver`."""


class FakeBench:
    """A driver over the fake libcuda, and the fake itself. Implements `tests.memory.bench.DriverBench`."""

    hbm_bytes = 64 * MIB

    def __init__(self, driver: CudaDriver, fake: FakeCuda) -> None:
        self.driver = driver
        self.fake = fake

    def resident(self, span: AddressRange) -> Mapping[MemoryLocation | None, int]:
        homes: dict[int, MemoryLocation | None] = {
            -2: None,
            -1: HOST,
            **{d: GpuLocation(d) for d in range(self.driver.device_count())},
        }
        page = self.driver.page_bytes
        return {home: self.fake.resident_bytes(span.address, span.nbytes, d) // page for d, home in homes.items()}

    def fail(self, verb: str, error: str) -> None:
        from cuda.bindings import driver as bindings

        batches = self.driver.version() >= 13000
        driver_calls = {**DRIVER_CALLS, "prefetch": "cuMemPrefetchBatchAsync" if batches else "cuMemPrefetchAsync"}
        self.fake.fault(driver_calls[verb], getattr(bindings.CUresult, error).value)


class FakeProcess:
    """One process on one kind of fake machine."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.memory.on_fake"],
            env=environment(**options),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, target: str, parameters: Mapping[str, Any]) -> tuple[str, Any, bool]:
        """(outcome of the function, its result or message, whether it left GPU memory allocated)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([target, dict(parameters)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            return "failed", f"the process on the fake driver ended with {self._process.wait()}", True
        outcome, value, left_memory = json.loads(answer)
        return outcome, value, left_memory

    def close(self) -> None:
        self._process.communicate()


class FakeProcessPool:
    """The session's processes. One that failed or left memory allocated is replaced, so that no other test
    is affected.
    """

    def __init__(self) -> None:
        self._processes: dict[str, FakeProcess] = {}

    def run(self, options: Mapping[str, Any], target: str, parameters: Mapping[str, Any] | None = None) -> Any:
        """The function's result in that process; skips or fails as it did there."""
        key = json.dumps(dict(options), sort_keys=True)
        process = self._processes.pop(key, None) or FakeProcess(options)
        outcome, value, left_memory = process.run(target, parameters or {})
        if outcome == "failed" or left_memory:
            process.close()
        else:
            self._processes[key] = process
        if outcome == "skipped":
            pytest.skip(value)
        if outcome == "failed":
            pytest.fail(value, pytrace=False)
        return value

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def on_fake(
    profile: str = "gh200", **more: str | int
) -> Callable[[Callable[..., None]], Callable[[FakeProcessPool], None]]:
    """Run the test on the fake driver with this profile and these FAKECUDA_* settings."""

    def wrap(body: Callable[..., None]) -> Callable[[FakeProcessPool], None]:
        def test(fakes: FakeProcessPool) -> None:
            fakes.run({"profile": profile, **more}, f"{body.__module__}:{body.__name__}.body")

        test.__name__ = test.__qualname__ = body.__name__
        test.__module__, test.__doc__ = body.__module__, body.__doc__
        test.body = body  # type: ignore[attr-defined]
        return test

    return wrap


def _outcome(bench: FakeBench, target: str, parameters: Mapping[str, Any]) -> tuple[str, Any]:
    module, _, path = target.partition(":")
    owner, _, name = path.rpartition(".")
    imported = importlib.import_module(module)
    target_owner = attrgetter(owner)(imported) if owner else imported
    function = getattr(target_owner() if isinstance(target_owner, type) else target_owner, name)
    try:
        return "passed", function(bench, **parameters)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except BaseException:  # noqa: BLE001 - every exception is this test's outcome, reported to the other process
        return "failed", traceback.format_exc()


def serve() -> None:
    """Until the input closes: read a line with a function's name and arguments, write a line with its outcome."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of tests must not be mistaken for an answer
    fake = load_fake()
    driver = open_cuda(fake.move_pages)
    assert isinstance(driver, CudaDriver), driver
    for line in sys.stdin:
        fake.reset()
        outcome, value = _outcome(FakeBench(driver, fake), *json.loads(line))
        fake.reset()
        left_memory = any(fake.hbm_used(number) for number in range(driver.device_count()))
        answers.write(json.dumps([outcome, value, left_memory]) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()

"""Pools while other threads allocate and other GPUs are current, on the phantom: nothing slips past the plugin, and
nothing that somebody just took is thrown away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from supertuner.core.events import WarningEvent
from supertuner.memory.cuda import CudaDriver
from supertuner.memory.driver import AddressRange, DriverError
from supertuner.memory.overflow_allocator import routing
from supertuner.memory.overflow_allocator.plugin import OverflowPlugin, find_plugin
from tests.phantom.test_overflow_on_torch import (  # noqa: F401 - `bench` is a fixture
    GIB,
    MIB,
    Bench,
    account,
    bench,
    beyond_the_gpu,
    gigabytes,
    kind_of,
    the_driver,
)

ROOT = Path(__file__).parents[2]


class Busy:
    """The driver; while it discards, another thread takes memory of every size that is free."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.taken: list[torch.Tensor] = []
        self.discarded: list[AddressRange] = []

    def discard(self, spans: Sequence[AddressRange]) -> None:
        def take() -> None:
            self.taken += [torch.empty(span.nbytes, dtype=torch.uint8, device="cuda") for span in spans[:2]]

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        self.discarded += spans
        self._driver.discard(spans)

    def __getattr__(self, verb: str) -> object:
        return getattr(self._driver, verb)


def test_memory_that_another_thread_takes_meanwhile_is_not_discarded(bench: Bench) -> None:  # noqa: F811
    driver = Busy(the_driver())
    pools = bench.open(driver=driver)
    tensors = beyond_the_gpu(bench)
    del tensors[-3:]  # what is free in the cache is managed
    assert pools.reclaim_between_steps().light_bytes > 0 and driver.taken and driver.discarded
    for tensor in driver.taken:
        at = tensor.data_ptr()
        assert not any(span.address < at + tensor.nbytes and at < span.end for span in driver.discarded)
        assert kind_of(tensor) is not None, "it came from the plugin all the same"
    del tensor, tensors
    driver.taken.clear()
    gigabytes(1)
    pools.reclaim_between_steps()


class Refuses:
    """The driver, but it discards nothing."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def discard(self, spans: Sequence[AddressRange]) -> None:
        raise DriverError("cuMemDiscardBatchAsync", "CUDA_ERROR_NOT_SUPPORTED", 801)

    def __getattr__(self, verb: str) -> object:
        return getattr(self._driver, verb)


def test_a_driver_that_discards_nothing_says_so_seldom_and_leaves_allocations_routed(bench: Bench) -> None:  # noqa: F811
    pools = bench.open(driver=Refuses(the_driver()))
    tensors = beyond_the_gpu(bench)
    del tensors[-3:]
    for _ in range(20):
        assert pools.reclaim_between_steps().light_bytes == 0
        assert kind_of(gigabytes(1)) is not None
        pools._next_snapshot_s = 0.0  # as if time had passed
    assert len(bench.sink.of(WarningEvent)) == 1


def test_no_allocation_slips_past_the_plugin_while_the_class_changes(bench: Bench) -> None:  # noqa: F811
    pools = bench.open(class_patterns={"weights": "cpu_first"})
    held: list[torch.Tensor] = []
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set() and len(held) < 3000:
            held.append(torch.empty(12 * MIB, dtype=torch.uint8, device="cuda"))  # each a segment of its own

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=take)
    try:
        thread.start()
        while thread.is_alive() and len(held) < 1500:
            with pools.allocating("weights"):
                pass
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
    library = find_plugin()
    assert isinstance(library, Path)
    known = {
        one["address"] for one in torch.cuda.memory_snapshot() if OverflowPlugin(library).segment_kind(one["address"])
    }
    assert len(held) > 1000 and all(tensor.data_ptr() in known for tensor in held)
    held.clear()


def test_a_plugin_that_has_nothing_left_is_a_plugin_that_answers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    first = bench.open(oversubscription_ratio=1.0)
    held: list[torch.Tensor] = []
    for size in (GIB, MIB):
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    first.close()
    monkeypatch.setattr(routing, "torch_begin_function", lambda: None)
    bench.open(oversubscription_ratio=1.0).close()
    assert torch.autograd.is_multithreading_enabled()


def test_a_route_that_fails_leaves_torch_as_it_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def breaks(device: int, arrivals: object) -> bool:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(routing, "other_thread_is_routed", breaks)
    with pytest.raises(RuntimeError, match="new thread"):
        bench.open()
    before = account().device_allocations
    gigabytes(1)
    assert account().device_allocations == before, "torch still asks the plugin"


def test_pools_that_are_closed_inside_a_class_stay_closed(bench: Bench) -> None:  # noqa: F811
    pools = bench.open(class_patterns={"weights": "cpu_first"})
    with pools.allocating("weights"), pools.allocating("state"):
        pools.close()
    before = account().device_allocations
    gigabytes(1)
    assert account().device_allocations == before


SECOND_GPU = """
import tempfile, torch
from pathlib import Path
from supertuner.config.settings.memory import OverflowSettings as Settings
from supertuner.memory.cuda import open_cuda
from supertuner.memory.overflow_allocator.plugin import OverflowPlugin, find_plugin
from supertuner.memory.overflow_allocator.pools import open_overflow_pools
from tests.phantom.test_overflow_on_torch import Bench

bench, GIB = Bench(Path(tempfile.mkdtemp())), 1 << 30
account = lambda device: OverflowPlugin(find_plugin()).stats(device)
def check(device):
    asked = Settings(enabled=True)
    with open_overflow_pools(asked, bench.facts, bench.host, bench.sink, driver=open_cuda(), device=device) as pools:
        many = range(bench.total // (4 * GIB) + 3)
        tensors = [torch.empty(4 * GIB, dtype=torch.uint8, device="cuda:1") for _ in many]
        assert pools.stats().managed_bytes >= 8 * GIB, pools.stats()
        assert (account(0).device_allocations, account(1).stage) == (0, 2)
        del tensors
        assert pools.reclaim_between_steps().light_bytes >= 8 * GIB
        assert pools.rebuild("a test") > 0
    torch.cuda.empty_cache()
    assert account(1).device_bytes == account(1).managed_bytes == 0
check(torch.device("cuda", 1))
torch.cuda.set_device(1)
check(torch.device("cuda"))
"""


def test_the_second_gpu_is_routed_while_the_first_is_current_and_without_a_number_when_it_is() -> None:
    env = {**os.environ, "FAKECUDA_DEVICES": "2"}
    code = [sys.executable, "-c", SECOND_GPU]
    done = subprocess.run(code, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

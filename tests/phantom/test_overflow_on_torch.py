"""The overflow allocator below torch's real caching allocator, on the phantom: routing, limits, and taking back."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from supertuner import memory
from supertuner.config.settings.memory import OverflowSettings as Settings
from supertuner.core.errors import MemoryEngineError
from supertuner.core.events import DecisionEvent, Event, MeasurementEvent, NoteEvent, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.memory.cuda import CudaDriver, open_cuda
from supertuner.memory.driver import HOST, AddressRange, GpuLocation, MemoryKind, NotAvailable
from supertuner.memory.overflow_allocator import routing
from supertuner.memory.overflow_allocator.plugin import OverflowPlugin, find_plugin
from supertuner.memory.overflow_allocator.pools import OverflowPools, open_overflow_pools
from supertuner.memory.probe import MachineFacts, probe_machine
from tests.memory.machine_files import folder_host, meminfo

GIB = 1 << 30
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def gigabytes(count: float) -> torch.Tensor:
    return torch.empty(int(count * GIB), dtype=torch.uint8, device="cuda")


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def the_driver() -> CudaDriver:
    driver = open_cuda()
    assert isinstance(driver, CudaDriver)
    return driver


class Bench:
    """Opens pools on the phantom's GPU and a host of 480 GiB, and closes them after the test."""

    def __init__(self, folder: Path) -> None:
        self.sink = Kept()
        self.host: HostFacts = folder_host(
            folder, {"proc/meminfo": meminfo(MemTotal=480 << 20, MemAvailable=450 << 20)}
        )
        self.total = torch.cuda.mem_get_info()[1]
        self.opened: list[OverflowPools] = []

    @property
    def facts(self) -> MachineFacts:
        return probe_machine(self.host, the_driver(), NotAvailable("not asked"))

    def open(self, driver: object = None, **settings: object) -> OverflowPools:
        asked = Settings.model_validate({"enabled": True, **settings})
        chosen = driver or open_cuda()
        self.opened.append(open_overflow_pools(asked, self.facts, self.host, self.sink, driver=chosen))
        return self.opened[-1]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for pools in made.opened:
        pools.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert account().device_bytes == account().managed_bytes == 0, "a test left memory behind"


def account():
    library = find_plugin()
    assert isinstance(library, Path)
    return OverflowPlugin(library).stats()


def kind_of(tensor: torch.Tensor) -> MemoryKind | None:
    """Whose segment a tensor lies in."""
    library = find_plugin()
    assert isinstance(library, Path)
    for one in torch.cuda.memory_snapshot():
        if one["address"] <= tensor.data_ptr() < one["address"] + one["total_size"]:
            return OverflowPlugin(library).segment_kind(one["address"])
    raise AssertionError("torch does not know this tensor")


def hbm_used() -> int:
    used = ctypes.CDLL("libcuda.so.1").fakecuda_hbm_used
    used.restype = ctypes.c_size_t
    return int(used(0))


def beyond_the_gpu(bench: Bench) -> list[torch.Tensor]:
    """Tensors of 4 GiB: all that the GPU holds, and three more."""
    return [gigabytes(4) for _ in range(bench.total // (4 * GIB) + 3)]


def test_tensors_beyond_gpu_memory_are_managed_and_torchs_statistics_go_on(bench: Bench) -> None:
    pools = bench.open()
    assert isinstance(pools, OverflowPools) and isinstance(bench.sink.of(DecisionEvent)[0], DecisionEvent)
    tensors = beyond_the_gpu(bench)
    assert kind_of(tensors[0]) is MemoryKind.DEVICE and kind_of(tensors[-1]) is MemoryKind.MANAGED
    assert torch.cuda.memory_allocated() >= len(tensors) * 4 * GIB > bench.total
    told = memory.stats()
    assert told["uvm.stage"] == 2 and told["uvm.managed_bytes.current"] >= 8 * GIB
    assert told["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    assert told["uvm.device_bytes.current"] + told["uvm.managed_bytes.current"] == torch.cuda.memory_reserved()


def test_every_statistic_that_is_promised_is_there(bench: Bench) -> None:
    bench.open()
    parts = (
        "stage light_reclamations hard_reclamations transitions_in transitions_out device_bytes.current "
        "device_bytes.peak managed_bytes.current managed_bytes.peak refusals.ratio refusals.host_floor refusals.driver "
        "last_error.code last_error.call advice_failures foreign_frees"
    )
    assert {f"uvm.{part}" for part in parts.split()} <= memory.stats().keys()


def test_other_threads_and_autograds_thread_are_routed(bench: Bench) -> None:
    bench.open()
    found: list[MemoryKind | None] = []
    thread = threading.Thread(target=lambda: found.append(kind_of(gigabytes(1))))
    thread.start()
    thread.join()
    seen: list[tuple[str, MemoryKind | None]] = []
    weight = torch.empty(64 * MIB, device="cuda", requires_grad=True)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            made = torch.empty_like(gradient)
            seen.append((threading.current_thread().name, kind_of(made)))
            return made

    Doubled.apply(weight).sum().backward()
    assert found == [MemoryKind.DEVICE]
    assert seen[0][0] != threading.main_thread().name, "backward ran on the main thread, which proves nothing"
    assert seen[0][1] is MemoryKind.DEVICE and weight.grad is not None and kind_of(weight.grad) is MemoryKind.DEVICE


def test_a_cached_block_is_used_again_without_a_call_of_the_plugin(bench: Bench) -> None:
    bench.open()
    del_me = gigabytes(1)
    del del_me
    before = account()
    for _ in range(100):
        gigabytes(1)
    after = account()
    assert (after.device_allocations, after.frees) == (before.device_allocations, before.frees)


def test_a_block_that_a_second_stream_used_is_used_again_while_allocations_are_routed(bench: Bench) -> None:
    bench.open()
    stream = torch.cuda.Stream()
    before = account().device_allocations
    for _ in range(10):
        held = gigabytes(1)
        held.record_stream(stream)
        del held
    assert account().device_allocations <= before + 2


def test_the_ratio_ends_in_torchs_own_error_and_room_below_it_can_be_had_again(bench: Bench) -> None:
    bench.open(oversubscription_ratio=1.5)
    refused = account().refused_ratio
    tensors: list[torch.Tensor] = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            tensors.append(gigabytes(8))
    assert account().refused_ratio > refused
    assert 1.5 * bench.total - 8 * GIB < account().device_bytes + account().managed_bytes <= 1.5 * bench.total
    tensors.pop()
    tensors.append(gigabytes(8))
    assert tensors[-1].numel() == 8 * GIB


def test_the_floor_of_host_memory_ends_in_torchs_own_error(bench: Bench) -> None:
    bench.open(host_floor_gb=440.0)
    refused = account().refused_host
    tensors: list[torch.Tensor] = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            tensors.append(gigabytes(4))
    assert account().refused_host > refused and account().managed_bytes <= 10 * GIB


def test_emptying_the_cache_gives_nothing_back_while_pools_are_open_and_all_when_they_are_closed(bench: Bench) -> None:
    pools = bench.open()
    tensors = beyond_the_gpu(bench)
    assert account().stage == 2
    del tensors
    torch.cuda.empty_cache()
    assert account().stage == 2 and account().managed_bytes > 0
    pools.close()
    torch.cuda.empty_cache()
    told = account()
    assert (told.stage, told.device_bytes, told.managed_bytes) == (1, 0, 0)
    before = told.device_allocations
    gigabytes(1)
    assert account().device_allocations == before, "torch still asks the plugin"


def test_free_managed_memory_is_discarded_between_steps_and_only_once(bench: Bench) -> None:
    pools = bench.open()
    tensors = beyond_the_gpu(bench)
    the_driver().fill(AddressRange(tensors[-1].data_ptr(), 4 * GIB), 1)  # the phantom's kernels touch nothing
    kept, used = tensors[0], hbm_used()
    del tensors
    light = account().light_reclamations
    assert pools.reclaim_between_steps().light_bytes >= 8 * GIB
    assert hbm_used() <= used - 4 * GIB
    assert account().light_reclamations == light + 1
    assert pools.reclaim_between_steps().light_bytes == 0, "nothing was used in between"
    assert kind_of(kept) is MemoryKind.DEVICE
    assert [
        event.figures["how"] for event in bench.sink.of(MeasurementEvent) if isinstance(event, MeasurementEvent)
    ] == ["light"]


def test_memory_that_is_in_use_is_never_discarded(bench: Bench) -> None:
    pools = bench.open()
    tensors = beyond_the_gpu(bench)
    assert pools.reclaim_between_steps().light_bytes == 0
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert len(set(addresses)) == len(tensors)


class Older:
    """The driver, but of a version that cannot discard."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def version(self) -> int:
        return 12080

    def __getattr__(self, verb: str) -> object:
        return getattr(self._driver, verb)


def test_a_driver_that_cannot_discard_sends_free_managed_memory_home_but_seldom(bench: Bench) -> None:
    driver = the_driver()
    pools = bench.open(driver=Older(driver))
    tensors = beyond_the_gpu(bench)
    spilled = AddressRange(tensors[-1].data_ptr(), 4 * GIB)
    driver.fill(spilled, 1)
    used = hbm_used()
    del tensors
    assert pools.reclaim_between_steps().light_bytes >= 8 * GIB
    assert driver.last_prefetch_location(spilled) is HOST and hbm_used() <= used - 4 * GIB
    gigabytes(1)
    assert pools.reclaim_between_steps().light_bytes == 0


def test_without_a_driver_nothing_can_be_taken_off_the_gpu_and_that_is_no_error(bench: Bench) -> None:
    pools = bench.open(driver=NotAvailable("cuda-bindings is not installed"))
    beyond_the_gpu(bench)
    assert pools.reclaim_between_steps().light_bytes == 0


def test_a_bloated_pool_is_rebuilt_and_what_lives_in_it_stays(bench: Bench) -> None:
    pools = bench.open()
    kept = [gigabytes(4)]
    for size in (16, 17, 18, 19, 20, 21, 22):  # none fits a segment of the one before
        gigabytes(size)
    before, hard = account(), account().hard_reclamations
    given_back = pools.reclaim_between_steps().hard_bytes
    assert given_back > 50 * GIB
    after = account()
    assert after.device_bytes + after.managed_bytes == before.device_bytes + before.managed_bytes - given_back
    assert after.hard_reclamations == hard + 1 and bench.sink.of(NoteEvent)
    assert kind_of(kept[0]) is MemoryKind.DEVICE
    kept.clear()
    pools.reclaim_between_steps()
    assert account().device_bytes <= GIB, "what outlived its pool is given back once it is free"


def test_a_refusal_makes_room_at_the_end_of_the_step(bench: Bench) -> None:
    pools = bench.open(oversubscription_ratio=1.0)
    small = [gigabytes(1) for _ in range(int(bench.total / GIB * 0.8))]
    del small
    with pytest.raises(torch.OutOfMemoryError):
        gigabytes(30)  # none of the cached segments is large enough, and all of them count
    assert pools.reclaim_between_steps().hard_bytes > 0
    assert gigabytes(30).numel() == 30 * GIB


def test_a_class_of_tensors_can_have_a_pattern_of_its_own(bench: Bench) -> None:
    driver = the_driver()
    pools = bench.open(class_patterns={"weights": "cpu_first"})
    held = beyond_the_gpu(bench)
    with pools.allocating("weights"):
        weights = gigabytes(1)
    with pools.allocating("state"):
        state = gigabytes(1)
    others = gigabytes(1)
    homes = [driver.preferred_location(AddressRange(t.data_ptr(), GIB)) for t in (weights, state, others, held[-1])]
    assert homes == [HOST, GpuLocation(0), GpuLocation(0), GpuLocation(0)]


def test_where_the_private_call_is_not_as_expected_this_thread_and_backward_are_routed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "torch_begin_function", lambda: None)
    pools = bench.open()
    assert "_cuda_beginAllocateToPool" in str(bench.sink.of(WarningEvent)[0])
    weight = torch.empty(64 * MIB, device="cuda", requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert kind_of(weight) is MemoryKind.DEVICE and kind_of(weight.grad) is MemoryKind.DEVICE
    pools.close()
    assert torch.autograd.is_multithreading_enabled()


@pytest.mark.parametrize("device", [0, torch.device("cuda"), torch.device("cuda", 0)])
def test_a_device_is_named_in_any_of_torchs_ways(bench: Bench, device: torch.device | int) -> None:
    asked = Settings(enabled=True)
    with open_overflow_pools(asked, bench.facts, bench.host, bench.sink, driver=open_cuda(), device=device):
        assert kind_of(gigabytes(1)) is MemoryKind.DEVICE


def test_a_memory_fraction_is_refused_with_the_reason(bench: Bench) -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        with pytest.raises(MemoryEngineError, match=r"memory fraction of 0\.5 .* remove the fraction"):
            bench.open()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_torch_that_spills_by_itself_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.cuda.memory_stats
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *where: {**real(*where), "uvm.stage": 1})
    with pytest.raises(MemoryEngineError, match="this torch is patched"):
        bench.open()


CONF = "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first,max_split_size_mb:512"


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": CONF}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_stock_torch_refuses_the_seeds_keys_and_starts_when_they_are_kept_from_it() -> None:
    use = "import torch; torch.empty(1, device='cuda')"
    assert "Unrecognized key 'use_uvm'" in run(use).stderr
    kept = f"from supertuner.config.sources.environment import strip_uvm_keys_for_torch as keep; keep(); {use}"
    also = "; import os; assert os.environ['PYTORCH_CUDA_ALLOC_CONF'] == 'max_split_size_mb:512'"
    done = run(kept + also)
    assert done.returncode == 0, done.stderr

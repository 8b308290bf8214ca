"""Telemetry reports the figures that the machine provides, counts differences, and limits its own share of time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supertuner.core.events import Event, MeasurementEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import GIB, KIB
from supertuner.memory.driver import DriverError, NotAvailable
from supertuner.memory.nvml import NvmlGpuFacts
from supertuner.memory.probe import probe_machine
from supertuner.memory.telemetry.sampler import MAX_TIME_SHARE, GpuTelemetry, MemorySampler
from supertuner.sinks.jsonlines import JsonLinesFile, read_records
from tests.memory.machine_files import (
    GB10,
    GH200,
    FakeProbeDriver,
    folder_host,
    gb10_files,
    gh200_files,
    in_gib,
    meminfo,
)

NO_GPU, NO_NVML = NotAvailable("no GPU"), NotAvailable("no NVML")
VMSTAT = "nr_free_pages 100\nnuma_hit 5\nnuma_miss {miss}\npgmigrate_success {moved}\npgmigrate_fail 1\nnuma_pages 7\n"


class RecordingSink:
    """A sink that records events and can be slow."""

    def __init__(self, slow: Callable[[], None] = lambda: None) -> None:
        self.events: list[Event] = []
        self._slow = slow

    def emit(self, event: Event, /) -> None:
        self._slow()
        self.events.append(event)


class ManualClock:
    """A clock that advances when the test decides."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakePowerNvml:
    """NVML of one GPU."""

    def gpus(self) -> tuple[NvmlGpuFacts, ...]:
        return (NvmlGpuFacts(3, GB10.name, "GPU-a", None, None, None),)

    def driver_version(self) -> str | None:
        return None

    def sample(self, index: int) -> dict[str, float]:
        return {"power_w": 30.0 + index}


@pytest.fixture
def make_sampler() -> Iterator[Callable[..., MemorySampler]]:
    """Creates samplers and closes them at the end."""
    samplers: list[MemorySampler] = []

    def make(host: HostFacts, driver: Any = NO_GPU, nvml: Any = NO_NVML, **more: Any) -> MemorySampler:
        samplers.append(MemorySampler(probe_machine(host, driver, nvml), host, GpuTelemetry(driver, nvml), **more))
        return samplers[-1]

    yield make
    for sampler in samplers:
        sampler.close()


def test_a_machine_without_kernel_files_has_only_figures_of_the_process(
    tmp_path: Path, make_sampler: Callable[..., MemorySampler]
) -> None:
    assert set(make_sampler(HostFacts(tmp_path)).sample()) == {"process.minor_faults", "process.major_faults"}


def test_a_gh200_has_figures_for_each_memory(tmp_path: Path, make_sampler: Callable[..., MemorySampler]) -> None:
    files = gh200_files() | {"proc/self/statm": "900 70 3 1 0 5 0\n", "proc/vmstat": VMSTAT.format(miss=0, moved=0)}
    figures = make_sampler(folder_host(tmp_path, files), FakeProbeDriver(GH200, free=60 * GIB)).sample()
    assert figures["host.available_bytes"] == 540 * GIB and figures["host.swap_used_bytes"] == 0
    assert figures["process.resident_bytes"] == 70 * os.sysconf("SC_PAGE_SIZE")
    assert figures["node0.free_bytes"] == 430 * GIB and figures["node1.free_bytes"] == 70 * GIB
    assert figures["gpu.free_bytes"] == 60 * GIB
    assert "node2.free_bytes" not in figures, "a node without memory has no figures"
    assert "node0.anonymous_bytes" not in figures, "not in this kernel's file"


def test_page_migrations_are_counted_from_one_sample_to_the_next(
    tmp_path: Path, make_sampler: Callable[..., MemorySampler]
) -> None:
    vmstat = tmp_path / "proc/vmstat"
    sampler = make_sampler(folder_host(tmp_path, {"proc/vmstat": VMSTAT.format(miss=4, moved=1000)}))
    found = []
    for moved in (1000, 1250, 1251):
        vmstat.write_text(VMSTAT.format(miss=4, moved=moved))
        found.append(sampler.sample())
    assert [figures["system.migrated_pages"] for figures in found] == [0, 250, 1]
    assert [figures["system.misplaced_pages"] for figures in found] == [0, 0, 0]
    assert "system.balanced_pages" not in found[0], "numa_pages is not numa_pages_migrated"


def test_faults_of_this_process_are_counted(make_sampler: Callable[..., MemorySampler]) -> None:
    sampler, pages = make_sampler(HostFacts()), 500
    sampler.sample()
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1
        assert sampler.sample()["process.minor_faults"] >= pages
    assert sampler.sample()["process.minor_faults"] < pages


def test_figures_from_the_real_files_match_the_probe(make_sampler: Callable[..., MemorySampler]) -> None:
    figures, host = make_sampler(HostFacts()).sample(), HostFacts()
    available, total = host.memory_available(), host.memory_total()
    assert available is not None and total is not None
    assert abs(int(figures["host.available_bytes"]) - available) < 0.2 * total
    assert 10 << 20 < int(figures["process.resident_bytes"]) < total


@pytest.mark.parametrize(
    ("mount", "cgroup", "limit", "used", "cache"),
    [
        ("sys/fs/cgroup/job", "0::/job\n", "memory.max", "memory.current", "inactive_file"),
        (
            "sys/fs/cgroup/memory/job",
            "4:memory:/job\n",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_a_containers_limit_is_counted_as_in_the_probe(
    tmp_path: Path,
    make_sampler: Callable[..., MemorySampler],
    mount: str,
    cgroup: str,
    limit: str,
    used: str,
    cache: str,
) -> None:
    files = {
        "proc/meminfo": meminfo(MemTotal=in_gib(256), MemAvailable=in_gib(200)),
        "proc/self/cgroup": cgroup,
        f"{mount}/{limit}": f"{64 * GIB}\n",
        f"{mount}/{used}": f"{24 * GIB}\n",
        f"{mount}/memory.stat": f"anon 1\n{cache} {4 * GIB}\n",
    }
    host = folder_host(tmp_path, files)
    assert make_sampler(host).sample()["host.available_bytes"] == 44 * GIB == host.memory_available()


def test_a_driver_error_removes_only_its_own_figure(tmp_path: Path, make_sampler: Callable[..., MemorySampler]) -> None:
    class FailingDriver(FakeProbeDriver):
        def free_bytes(self, device: int) -> int:
            raise DriverError("cuMemGetInfo", "CUDA_ERROR_UNKNOWN", 999)

    figures = make_sampler(folder_host(tmp_path, gb10_files()), FailingDriver(GB10)).sample()
    assert "gpu.free_bytes" not in figures and figures["host.available_bytes"] == 70 * GIB


def test_figures_of_allocator_hints_and_nvml_have_their_prefixes(
    tmp_path: Path, make_sampler: Callable[..., MemorySampler]
) -> None:
    overflow = {"uvm.stage": "managed", "uvm.managed_bytes": 5, "uvm.last_error": None, "allocated_bytes.all.peak": 7}
    sampler = make_sampler(
        folder_host(tmp_path, gb10_files()),
        FakeProbeDriver(GB10),
        FakePowerNvml(),
        overflow=lambda: overflow,
        hints=lambda: {"applied": 3, "refused": 1},
    )
    figures = sampler.sample()
    chosen = {name: value for name, value in figures.items() if name.startswith(("uvm", "hints", "nvml", "alloc"))}
    assert chosen == {
        "uvm.stage": "managed",
        "uvm.managed_bytes": 5,
        "hints.applied": 3,
        "hints.refused": 1,
        "nvml.power_w": 33.0,
    }


def test_an_event_has_its_step_and_the_first_one_has_the_drivers_parameters(
    tmp_path: Path, make_sampler: Callable[..., MemorySampler]
) -> None:
    clock, run = ManualClock(), tmp_path / "events.jsonl"
    sampler = make_sampler(folder_host(tmp_path, gh200_files()), FakeProbeDriver(GH200), clock=clock)
    with JsonLinesFile(run) as sink:
        for step in (7, 8):
            assert sampler.emit(sink, step)
            clock.advance(2.0)
    first, second = (record["figures"] for record in read_records(run))
    assert (first["step"], second["step"]) == (7, 8)
    assert first["uvm_driver.uvm_perf_access_counter_threshold"] == "256"
    assert not [name for name in second if name.startswith("uvm_driver")]
    assert first["telemetry.sample_s"] >= 0


def test_telemetry_takes_at_most_its_share_of_the_time(
    tmp_path: Path, make_sampler: Callable[..., MemorySampler]
) -> None:
    clock = ManualClock()
    sampler = make_sampler(HostFacts(tmp_path), clock=clock)
    sink, spent, begin = RecordingSink(slow=lambda: clock.advance(0.004)), 0.0, clock.now
    for step in range(2000):
        before = clock.now
        sampler.emit(sink, step)
        spent += clock.now - before
        clock.advance(0.05)
    assert 0.8 * MAX_TIME_SHARE < spent / (clock.now - begin) <= MAX_TIME_SHARE * 1.02
    assert len(sink.events) == pytest.approx(2000 * MAX_TIME_SHARE * 0.05 / 0.004, rel=0.1)


def test_cheap_telemetry_is_emitted_at_every_step(tmp_path: Path, make_sampler: Callable[..., MemorySampler]) -> None:
    clock = ManualClock()
    sampler, sink = make_sampler(HostFacts(tmp_path), clock=clock), RecordingSink(slow=lambda: clock.advance(0.0002))
    for step in range(100):
        assert sampler.emit(sink, step)
        clock.advance(0.05)
    events = [event for event in sink.events if isinstance(event, MeasurementEvent)]
    assert [event.figures["step"] for event in events] == list(range(100))


def test_closing_closes_the_files() -> None:
    host = HostFacts()
    open_before = len(os.listdir("/proc/self/fd"))
    sampler = MemorySampler(probe_machine(host, NO_GPU, NO_NVML), host, GpuTelemetry(NO_GPU, NO_NVML))
    assert len(os.listdir("/proc/self/fd")) > open_before
    sampler.close()
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert "host.available_bytes" not in sampler.sample()


def test_a_node_that_disappears_removes_only_its_figures(
    tmp_path: Path, make_sampler: Callable[..., MemorySampler]
) -> None:
    sampler = make_sampler(folder_host(tmp_path, gh200_files()))
    (tmp_path / "sys/devices/system/node/node1/meminfo").write_text("")
    figures = sampler.sample()
    assert "node1.free_bytes" not in figures and figures["node0.free_bytes"] == 430 * GIB
    assert figures["host.available_bytes"] > 64 * KIB

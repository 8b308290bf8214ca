"""The modelled clock: bytes over the table's bandwidths, faults per batch, concurrent prefetches; and
memory contents.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.memory.driver import HOST, AddressRange, MemoryAdvice, MemoryKind
from supertuner.memory.emulator.configuration import EmulatedMachine, EmulatorParameters
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from tests.memory.bench import BLOCK, GPU

GB = 10**9
PAGE = 65536
ROUND = EmulatedMachine(
    name="round numbers",
    gpu_bytes=64 * BLOCK,
    host_bytes=512 * BLOCK,
    gpu_read_bytes_s=4000 * GB,
    gpu_write_bytes_s=2000 * GB,
    host_bytes_s=500 * GB,
    to_device_bytes_s=400 * GB,
    to_host_bytes_s=200 * GB,
    ats=True,
)
NO_FAULTS = EmulatorParameters(fault_batch_s=0.0)


def model_with_memory(
    kind: MemoryKind, nbytes: int, parameters: EmulatorParameters = NO_FAULTS, figures: EmulatedMachine = ROUND
) -> tuple[EmulatedSuperchip, AddressRange]:
    model = EmulatedSuperchip(figures, parameters=parameters)
    return model, AddressRange(model.allocate(kind, nbytes), nbytes)


def seconds(model: EmulatedSuperchip) -> float:
    assert model.seconds is not None
    return model.seconds


@pytest.mark.parametrize(("write", "bandwidth"), [(False, 4000 * GB), (True, 2000 * GB)])
def test_the_gpu_uses_its_own_memory_at_its_bandwidth(write: bool, bandwidth: float) -> None:
    model, span = model_with_memory(MemoryKind.DEVICE, 8 * BLOCK)
    model.touch(span, GPU, write=write)
    assert seconds(model) == pytest.approx(8 * BLOCK / bandwidth)


def test_the_host_uses_its_own_memory_at_its_bandwidth() -> None:
    model, span = model_with_memory(MemoryKind.SYSTEM, 8 * BLOCK)
    model.touch(span, HOST, write=True)
    assert seconds(model) == pytest.approx(8 * BLOCK / (500 * GB))


def test_a_migration_uses_the_link_in_its_direction() -> None:
    model, span = model_with_memory(MemoryKind.MANAGED, 8 * BLOCK)
    model.prefetch([span], HOST)
    model.synchronize()
    assert seconds(model) == 0, "populating pages transfers nothing"
    model.prefetch([span], GPU)
    model.synchronize()
    assert seconds(model) == pytest.approx(8 * BLOCK / (400 * GB))
    model.prefetch([span], HOST)
    model.synchronize()
    assert seconds(model) == pytest.approx(8 * BLOCK / (400 * GB) + 8 * BLOCK / (200 * GB))


@pytest.mark.parametrize(("pages", "batches"), [(1, 1), (32, 1), (256, 1), (257, 2)])
def test_faults_are_charged_per_batch_and_a_prefetch_avoids_them(pages: int, batches: int) -> None:
    parameters = EmulatorParameters(fault_batch_s=1.0, fault_batch_pages=256)
    model, span = model_with_memory(MemoryKind.MANAGED, pages * PAGE, parameters)
    model.touch(span, GPU)
    assert seconds(model) == pytest.approx(batches, rel=1e-3)
    assert model.traffic.fault_batches == batches
    model.touch(span, GPU)
    assert model.traffic.fault_batches == batches, "a resident page does not fault"
    model, span = model_with_memory(MemoryKind.MANAGED, pages * PAGE, parameters)
    model.prefetch([span], GPU)
    model.touch(span, GPU)
    assert model.traffic.fault_batches == 0


def test_a_prefetch_overlaps_with_computation_and_is_waited_for_otherwise() -> None:
    transfer, use = 8 * BLOCK / (400 * GB), 8 * BLOCK / (4000 * GB)
    for work, expected in ((0.0, transfer + use), (transfer / 2, transfer + use), (3 * transfer, 3 * transfer + use)):
        model, span = model_with_memory(MemoryKind.MANAGED, 8 * BLOCK)
        model.prefetch([span], HOST)
        model.prefetch([span], GPU)
        assert seconds(model) == 0
        model.compute(work)
        model.touch(span, GPU)
        assert seconds(model) == pytest.approx(expected)


def test_a_prefetch_delays_only_uses_of_its_pages_and_of_the_link() -> None:
    model, span = model_with_memory(MemoryKind.MANAGED, 16 * BLOCK)
    other = AddressRange(model.allocate(MemoryKind.DEVICE, BLOCK), BLOCK)
    model.prefetch([span], HOST)
    model.prefetch([span], GPU)
    model.touch(other, GPU)
    assert seconds(model) == pytest.approx(BLOCK / (4000 * GB)), "GPU memory is not busy"
    model.touch(other, HOST)
    assert seconds(model) == pytest.approx(16 * BLOCK / (400 * GB) + BLOCK / (200 * GB)), "the link is busy"


def test_duplex_traffic_is_a_parameter() -> None:
    for duplex, expected in (
        (True, 40 * BLOCK / (200 * GB)),
        (False, 40 * BLOCK / (200 * GB) + 40 * BLOCK / (400 * GB)),
    ):
        model, span = model_with_memory(
            MemoryKind.MANAGED, 104 * BLOCK, EmulatorParameters(fault_batch_s=0.0, duplex=duplex)
        )
        first, second = AddressRange(span.address, 64 * BLOCK), AddressRange(span.address + 64 * BLOCK, 40 * BLOCK)
        model.prefetch([second], HOST)
        model.prefetch([first], GPU)
        model.prefetch([second], GPU)  # 40 blocks are evicted for 40 that arrive
        model.synchronize()
        assert model.traffic.evicted_bytes == 40 * BLOCK
        assert seconds(model) == pytest.approx(expected)


def test_remote_use_is_charged_in_the_direction_of_the_data() -> None:
    for write, bandwidth in ((False, 400 * GB), (True, 200 * GB)):
        model, span = model_with_memory(MemoryKind.MANAGED, 8 * BLOCK)
        model.prefetch([span], HOST)
        model.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
        model.touch(span, GPU, write=write)
        assert seconds(model) == pytest.approx(8 * BLOCK / bandwidth)
        assert model.traffic.remote_bytes == 8 * BLOCK


def test_evictions_for_device_memory_take_link_time() -> None:
    model, span = model_with_memory(MemoryKind.MANAGED, 60 * BLOCK)
    model.touch(span, GPU)
    before = seconds(model)
    model.allocate(MemoryKind.DEVICE, 10 * BLOCK)
    assert seconds(model) - before == pytest.approx(6 * BLOCK / (200 * GB))


def test_a_cost_with_an_unknown_figure_makes_the_time_unknown_and_names_the_figure() -> None:
    model, span = model_with_memory(MemoryKind.MANAGED, BLOCK, figures=replace(ROUND, to_device_bytes_s=None))
    model.prefetch([span], HOST)
    model.touch(AddressRange(model.allocate(MemoryKind.DEVICE, BLOCK), BLOCK), GPU)
    assert model.seconds is not None, "no unknown figure was needed yet"
    model.prefetch([span], GPU)
    assert model.seconds is None
    assert model.clock.unknown_figures == {"to_device_bytes_s"}


def test_a_one_pool_machine_uses_no_link() -> None:
    model = EmulatedSuperchip(MACHINES["gb10"])
    span = AddressRange(model.allocate(MemoryKind.MANAGED, 8 * BLOCK), 8 * BLOCK)
    for by in (HOST, GPU):
        model.prefetch([span], by)
        model.touch(span, by, write=True)
    assert (model.traffic.to_device_bytes, model.traffic.to_host_bytes) == (0, 0)
    assert seconds(model) == pytest.approx(2 * 8 * BLOCK / (273 * GB))


def test_a_gh200_transfers_370_gb_to_the_host_and_back_in_about_2_seconds() -> None:
    """Matches the estimate by hand for offloaded activations: 370 GB at 296 GB/s and back at 375 GB/s."""
    model = EmulatedSuperchip(MACHINES["gh200-96"])
    piece = AddressRange(model.allocate(MemoryKind.MANAGED, 37 * GB // BLOCK * BLOCK), 37 * GB // BLOCK * BLOCK)
    model.prefetch([piece], GPU)
    for _ in range(10):
        model.prefetch([piece], HOST)
        model.prefetch([piece], GPU)
    model.synchronize()
    assert seconds(model) == pytest.approx(370 / 296 + 370 / 375, rel=0.01)


WRITE = st.tuples(
    st.sampled_from(["fill", "copy", "evict"]), st.integers(0, 4 * PAGE), st.integers(0, 4 * PAGE), st.integers(0, 255)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(WRITE, max_size=12))
def test_contents_equal_those_of_plain_memory_under_any_migration(writes: list[tuple[str, int, int, int]]) -> None:
    size = 4 * PAGE
    model = EmulatedSuperchip(replace(ROUND, gpu_bytes=2 * PAGE))
    spans = [AddressRange(model.allocate(kind, size), size) for kind in (MemoryKind.MANAGED, MemoryKind.SYSTEM)]
    plain = [bytearray(size), bytearray(size)]
    for verb, begin, end, value in writes:
        which, begin, end = value % 2, min(begin, end), max(begin, end)
        if verb == "evict":
            model.prefetch(spans, HOST)
        elif begin < end and verb == "fill":
            model.fill(AddressRange(spans[which].address + begin, end - begin), value)
            plain[which][begin:end] = bytes([value]) * (end - begin)
        elif begin < end:  # to a target with the same or another page alignment
            at = min(value * 512, size - (end - begin))
            model.copy(spans[1 - which].address + at, spans[which].address + begin, end - begin)
            plain[1 - which][at : at + end - begin] = plain[which][begin:end]
    assert [model.read(span) for span in spans] == [bytes(p) for p in plain]

"""CUPTI's unified-memory counters over a fake library: summed, for each version, with CUPTI's own text for an error."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from supertuner.memory.driver import NotAvailable
from supertuner.memory.telemetry.cupti import BUFFER_BYTES, CuptiCounters, open_cupti, record_bytes
from tests.fakes.fake_libraries import fake_cupti

TO_DEVICE, TO_HOST, CPU_FAULT, GPU_FAULT, THRASHING = 1, 2, 3, 4, 5
NOTHING = {"to_device_bytes": 0, "to_host_bytes": 0, "cpu_faults": 0, "gpu_fault_groups": 0}


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    fake = ctypes.CDLL(str(fake_cupti()))
    fake.fakecupti_record.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
    yield fake
    fake.fakecupti_kind(25)


def opened() -> CuptiCounters:
    cupti = open_cupti(0, [str(fake_cupti())])
    assert isinstance(cupti, CuptiCounters)
    return cupti


@pytest.mark.parametrize("version", ["20", "26", "130001"])
def test_migrated_bytes_and_faults_are_summed_for_every_record_length(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("FAKECUPTI_VERSION", version)
    cupti = opened()
    for counter, value in ((TO_DEVICE, 65536), (TO_DEVICE, 2 << 20), (TO_HOST, 4096), (GPU_FAULT, 3)):
        assert library.fakecupti_record(counter, value)
    assert library.fakecupti_record(CPU_FAULT, 0x401000), "its value is the program counter, not a count"
    assert cupti.sample() == {
        "to_device_bytes": 65536 + (2 << 20),
        "to_host_bytes": 4096,
        "cpu_faults": 1,
        "gpu_fault_groups": 3,
    }
    assert cupti.sample() == NOTHING, "a sample counts only since the last one"
    cupti.close()


def test_more_records_than_a_buffer_holds_are_all_counted(library: ctypes.CDLL) -> None:
    cupti, events = opened(), 3 * BUFFER_BYTES // 104
    for _ in range(events):
        library.fakecupti_record(TO_HOST, 10)
    assert cupti.sample()["to_host_bytes"] == 10 * events
    cupti.close()


def test_counters_that_were_not_requested_stay_disabled(library: ctypes.CDLL) -> None:
    cupti = opened()
    assert not library.fakecupti_record(THRASHING, 1)
    cupti.close()


def test_records_of_another_client_are_not_counted(library: ctypes.CDLL) -> None:
    cupti = opened()
    library.fakecupti_kind(10)
    library.fakecupti_record(TO_DEVICE, 4096)
    assert cupti.sample() == {**NOTHING, "unread_bytes": 104}
    assert cupti.sample() == NOTHING
    cupti.close()


def test_after_closing_nothing_is_counted_and_the_callbacks_stay_valid(library: ctypes.CDLL) -> None:
    cupti = opened()
    cupti.close()
    del cupti
    gc.collect()
    # Another client enables the same records; CUPTI requests a buffer from the callbacks that it knows.
    assert library.cuptiActivityEnable(25) == 0
    assert not library.fakecupti_record(TO_DEVICE, 4096)
    library.cuptiActivityDisable(25)


def test_a_gpu_without_counters_is_not_available_with_cuptis_error_text(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKECUPTI_CONFIGURE", "29")
    answer = open_cupti(0, [str(fake_cupti())])
    call, word = "cuptiActivityConfigureUnifiedMemoryCounter", "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_ON_DEVICE"
    assert answer == NotAvailable(f"{call}: {word}")


def test_an_unknown_version_is_not_used(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUPTI_VERSION", "140000")
    answer = open_cupti(0, [str(fake_cupti())])
    assert isinstance(answer, NotAvailable) and "140000" in answer.reason
    assert [record_bytes(version) for version in (17, 18, 25, 26, 28, 29, 130000)] == [
        None, 64, 64, 104, 104, None, 104,
    ]  # fmt: skip


def test_a_missing_library_is_reported_by_name(tmp_path: Path) -> None:
    name = str(tmp_path / "libcupti.so.13")
    assert open_cupti(0, [name]) == NotAvailable(f"no CUPTI ({name}) on this machine")

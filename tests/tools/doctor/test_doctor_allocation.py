"""The allocation test: it takes no more than is safe, believes no value it has not read, and gives everything back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.core.events import NullSink
from supertuner.core.types import GIB, MIB
from supertuner.memory.driver import AddressRange, MemoryKind
from supertuner.memory.emulator.configuration import EmulatedMachine, FaultPlan, InjectedFault
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from supertuner.tools.doctor.allocation import (
    MAX_ERRORS_SHOWN,
    AllocationTest,
    AllocationTestResult,
    BandwidthMeasurement,
    fill_value,
    format_bandwidth,
    sample_offsets,
)
from supertuner.tools.doctor.allocation_checks import allocation_checks
from supertuner.tools.doctor.allocation_plan import (
    HOST_FLOOR_BYTES,
    HOST_FLOOR_SHARE,
    AllocationTestPlan,
    AllocationTestSkipped,
    AvailableMemory,
    plan_allocation_test,
)
from supertuner.tools.doctor.check_result import CheckStatus
from supertuner.tools.doctor.examination import measure_available_memory, run_allocation_test
from supertuner.tools.doctor.requirements import DoctorFindings
from tests.memory.machine_files import folder_host, gh200_files
from tests.tools.doctor.doctoring import NO_DRIVER, situation, without_gpu

TINY = EmulatedMachine("tiny", 64 * MIB, host_bytes=GIB, ats=True, gpu_read_bytes_s=4e12, gpu_write_bytes_s=4e12,
               host_bytes_s=4e11, to_device_bytes_s=4e11, to_host_bytes_s=3e11)  # fmt: skip


class WatchedSuperchip(EmulatedSuperchip):
    """A superchip that remembers what it gave out, and can be made to lie or to be interrupted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.held: dict[int, tuple[MemoryKind, int]] = {}
        self.given: list[MemoryKind] = []
        self.spoilt: AddressRange | None = None
        self.interrupted_in = ""
        self.calls_left = 0

    def allocate(self, kind: MemoryKind, nbytes: int, device: int = 0) -> int:
        self._interrupt("allocate")
        address = super().allocate(kind, nbytes, device)
        self.held[address] = kind, nbytes
        self.given.append(kind)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        del self.held[address]

    def fill(self, span: AddressRange, value: int, device: int = 0) -> None:
        self._interrupt("fill")
        super().fill(span, value, device)
        if self.spoilt is not None and span.nbytes > self.spoilt.nbytes and self.spoilt.address < span.nbytes:
            super().fill(AddressRange(span.address + self.spoilt.address, self.spoilt.nbytes), 0xEE, device)

    def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
        self._interrupt("copy")
        super().copy(target, source, nbytes, device)

    def read(self, span: AddressRange) -> bytes:
        self._interrupt("read")
        return super().read(span)

    def prefetch(self, spans: Sequence[AddressRange], home: Any) -> None:
        self._interrupt("prefetch")
        super().prefetch(spans, home)

    def _interrupt(self, verb: str) -> None:
        if verb == self.interrupted_in:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise KeyboardInterrupt


def room(chip: EmulatedSuperchip, host_available: int | None = 40 * GIB) -> AvailableMemory:
    device = chip.devices()[0]
    return AvailableMemory(
        gpu_bytes=device.total_bytes,
        gpu_free=chip.free_bytes(0),
        host_total=64 * GIB,
        host_available=host_available,
        managed=device.managed,
        concurrent=device.concurrent_managed,
        one_pool=device.integrated,
    )


def bench(chip: EmulatedSuperchip, scale: float = 1.5, machine: str | None = None) -> AllocationTest:
    planned = plan_allocation_test(room(chip), scale)
    assert isinstance(planned, AllocationTestPlan)
    row = MACHINES[machine] if machine else None
    return AllocationTest(chip, chip.devices()[0], row, planned, lambda: chip.seconds, NullSink())


def trial(chip: EmulatedSuperchip, scale: float = 1.5, machine: str | None = None) -> AllocationTestResult:
    return bench(chip, scale, machine).run()


# ---- how much is safe

sizes = st.integers(0, 1 << 40)


@given(st.integers(1, 1 << 40), sizes, sizes, sizes, st.floats(0.01, 100), st.booleans())
def test_the_floor_of_host_memory_is_never_touched(
    gpu: int, free: int, total: int, available: int, scale: float, one_pool: bool
) -> None:
    free, available = min(free, gpu), min(available, total)
    planned = plan_allocation_test(AvailableMemory(gpu, free, total, available, True, True, one_pool), scale)
    if isinstance(planned, AllocationTestSkipped):
        return
    left = available - max(HOST_FLOOR_BYTES, int(HOST_FLOOR_SHARE * total))
    if one_pool:
        assert planned.nbytes <= max(0, left) / 2 and planned.link_bytes == 0
    else:
        assert planned.nbytes <= free + max(0, left)
        assert planned.link_bytes <= max(0, left) and planned.link_bytes <= free
    assert planned.nbytes <= planned.requested_bytes
    assert planned.nbytes % planned.block_bytes == 0 and planned.block_bytes % (2 * MIB) == 0
    assert planned.resident_bytes <= free
    assert bool(planned.limit_reason) or planned.requested_bytes - planned.nbytes < planned.block_bytes


def test_a_one_pool_machine_is_never_asked_to_go_beyond_its_pool_and_the_reason_is_said() -> None:
    planned = plan_allocation_test(AvailableMemory(128 * GIB, 100 * GIB, 120 * GIB, 100 * GIB, True, True, True), 1.5)
    assert isinstance(planned, AllocationTestPlan) and planned.nbytes <= 44 * GIB
    assert "one pool" in planned.limit_reason and "wedges" in planned.limit_reason
    assert planned.remedy == "" and "one pool" in planned.no_link_reason


def test_host_memory_that_nobody_knows_is_not_taken() -> None:
    planned = plan_allocation_test(AvailableMemory(64 * GIB, 60 * GIB, None, None, True, True, False), 2.0)
    assert isinstance(planned, AllocationTestPlan) and planned.nbytes <= 54 * GIB and planned.link_bytes == 0


def test_a_stand_in_that_claims_more_memory_than_the_host_has_is_not_believed() -> None:
    planned = plan_allocation_test(
        AvailableMemory(96 * GIB, 96 * GIB, 24 * GIB, 20 * GIB, True, True, False, stand_in=True), 1.5
    )
    assert isinstance(planned, AllocationTestPlan) and planned.nbytes <= 8 * GIB and "stand-in" in planned.limit_reason


def test_without_concurrent_access_the_test_stays_inside_the_gpu() -> None:
    planned = plan_allocation_test(AvailableMemory(64 * GIB, 60 * GIB, 64 * GIB, 50 * GIB, True, False, False), 2.0)
    assert (
        isinstance(planned, AllocationTestPlan) and planned.nbytes <= 54 * GIB and "concurrent" in planned.limit_reason
    )


@pytest.mark.parametrize(
    ("given_room", "why"),
    [
        (AvailableMemory(GIB, GIB, 9 * GIB, 8 * GIB, False, False, False), "no managed memory"),
        (AvailableMemory(GIB, 0, 9 * GIB, 0, True, True, False), "no room"),
        (AvailableMemory(GIB, 0, 9 * GIB, 4 * GIB, True, True, True), "one pool"),
        (AvailableMemory(GIB, GIB, 9 * GIB, 8 * GIB, True, True, False), "too little to try"),
    ],
)
def test_a_test_that_cannot_be_made_is_declined_with_the_reason(given_room: AvailableMemory, why: str) -> None:
    declined = plan_allocation_test(given_room, 0.001)
    assert isinstance(declined, AllocationTestSkipped) and why in declined.reason


# ---- the test itself, on the modelled superchip


@pytest.mark.parametrize("machine", ["gh200-96", "gb200", "gb10", "h100-80-pcie", "rtx-4090"])
def test_every_known_machine_passes_and_gives_everything_back(machine: str) -> None:
    chip = WatchedSuperchip(MACHINES[machine])
    found = trial(chip, machine=machine)
    assert found.passed and found.verified_blocks == found.plan.blocks
    assert found.exceeded_gpu_memory is (machine != "gb10")
    assert chip.held == {}
    names = [rate.name for rate in found.rates]
    link = ["host to GPU", "GPU to host"]
    assert names[0] == "first touch" and "resident, written" in names
    assert ("first touch, full" in names) is found.exceeded_gpu_memory
    assert names[-2:] == link if machine != "gb10" else not set(link) & set(names)


def test_figures_stand_against_the_table_and_eviction_costs() -> None:
    found = trial(WatchedSuperchip(MACHINES["gh200-96"]), machine="gh200-96")
    rates = {rate.name: rate for rate in found.rates}
    ratios = {name: rate.ratio for name, rate in rates.items()}
    assert ratios["first touch"] is None
    for name in ("resident, written", "resident, copied", "host to GPU", "GPU to host"):
        ratio = ratios[name]
        assert ratio is not None and 0.8 < ratio <= 1.01, name
    inside, full = rates["first touch"].bytes_s, rates["first touch, full"].bytes_s
    assert inside is not None and full is not None and full < inside


@pytest.mark.parametrize("at", [0, 2 * MIB - 64])
def test_a_wrong_value_in_a_block_is_found(at: int) -> None:
    chip = WatchedSuperchip(TINY)
    chip.spoilt = AddressRange(at, 64)
    found = trial(chip)
    assert not found.passed and found.verified_blocks == 0
    assert "block 0 of 48: the host reads ee ee ee ee … at byte" in found.wrong_values[0]
    assert 0 < len(found.wrong_values) <= MAX_ERRORS_SHOWN + 3 and chip.held == {}
    check = next(allocation_checks(found, "measured"))
    assert check.status is CheckStatus.BAD and "WRONG VALUES" in check.finding and "`" in check.remedy
    assert check.finding.endswith(f"and {len(found.wrong_values) - 2} more places")


def test_wrong_values_spoil_the_examination_whatever_was_required(tmp_path: Path) -> None:
    chip = WatchedSuperchip(TINY)
    found = situation(tmp_path, *chip.devices())
    assert not DoctorFindings(found, (), trial(chip)).memory_corrupted
    chip.spoilt = AddressRange(0, 64)
    assert DoctorFindings(found, (), trial(chip)).memory_corrupted


def test_a_copy_that_the_gpu_does_not_make_is_found() -> None:
    class Idle(WatchedSuperchip):
        def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
            pass

    found = trial(Idle(TINY))
    assert not found.passed and any("a copy by the GPU holds" in line for line in found.wrong_values)


def test_a_copy_to_the_gpu_that_does_not_arrive_is_found() -> None:
    class OneWay(WatchedSuperchip):
        def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
            if self.memory_kind_at(target) is not MemoryKind.DEVICE:
                super().copy(target, source, nbytes, device)

    found = trial(OneWay(TINY))
    assert (
        found.verified_blocks == found.plan.blocks
        and found.wrong_values
        and "GPU memory holds a5" in found.wrong_values[0]
    )


@pytest.mark.parametrize("verb", ["allocate", "fill", "copy", "read", "synchronize"])
@pytest.mark.parametrize("first", [1, 3])
def test_a_refusal_ends_the_test_with_the_drivers_word_and_nothing_is_kept(verb: str, first: int) -> None:
    chip = WatchedSuperchip(TINY, faults=FaultPlan((InjectedFault(verb, "CUDA_ERROR_UNKNOWN", first=first, times=1),)))
    found = trial(chip)
    assert chip.held == {}
    if found.refusal is None:  # synchronize's third call is after the last one that the test cannot do without
        assert verb == "synchronize"
        return
    assert "CUDA_ERROR_UNKNOWN" in found.refusal and not found.passed
    check = next(allocation_checks(found, "measured"))
    assert check.status is CheckStatus.BAD and "CUDA_ERROR_UNKNOWN" in check.finding and "dmesg" in check.remedy


@pytest.mark.parametrize("verb", ["prefetch", "advise"])
def test_a_refused_hint_costs_a_figure_and_not_the_test(verb: str) -> None:
    found = trial(
        WatchedSuperchip(TINY, faults=FaultPlan((InjectedFault(verb, "CUDA_ERROR_NOT_SUPPORTED", times=99),)))
    )
    assert found.passed and found.notes


def test_memory_that_cannot_be_freed_is_said() -> None:
    found = trial(WatchedSuperchip(TINY, faults=FaultPlan((InjectedFault("free", "CUDA_ERROR_ILLEGAL_ADDRESS"),))))
    assert any("not given back" in note for note in found.notes)


@pytest.mark.parametrize(("verb", "after"), [("fill", 5), ("read", 7), ("copy", 2), ("prefetch", 0), ("allocate", 3)])
def test_ctrl_c_gives_everything_back(verb: str, after: int) -> None:
    chip = WatchedSuperchip(TINY)
    chip.interrupted_in, chip.calls_left = verb, after
    with pytest.raises(KeyboardInterrupt):
        trial(chip)
    assert chip.given, "it was interrupted with memory in its hands"
    assert chip.held == {} and chip.free_bytes(0) == TINY.gpu_bytes


def test_a_link_whose_host_end_strayed_into_gpu_memory_is_not_timed() -> None:
    class Straying(WatchedSuperchip):
        def locate(self, addresses: Sequence[int]) -> list[int | None]:
            return [1 for _ in addresses]

    found = trial(Straying(TINY))
    assert not any(rate.name == "host to GPU" for rate in found.rates)
    assert any("put the host's end into GPU memory" in note for note in found.notes)


def test_values_differ_between_neighbours_and_samples_reach_both_ends() -> None:
    assert all(fill_value(n) != fill_value(n + 1) and 0 < fill_value(n) < 256 for n in range(1000))
    assert sample_offsets(2 * MIB)[0] == 0 and sample_offsets(2 * MIB)[-1] == 2 * MIB - 64


# ---- how it is judged


def test_a_slow_link_is_a_warning_only_where_a_gpu_was_behind_it() -> None:
    row = MACHINES["gh200-96"]
    slow = BandwidthMeasurement("host to GPU", GIB, GIB / 50e9, row.to_device_bytes_s)
    found = AllocationTestResult(trial(WatchedSuperchip(TINY)).plan, 64 * MIB, rates=[slow], verified_blocks=48)
    by_origin = {kind: list(allocation_checks(found, kind))[1] for kind in ("measured", "modelled", "stand-in")}
    assert by_origin["measured"].status is CheckStatus.WARNING
    assert "13% of the table's 375" in by_origin["measured"].finding
    assert by_origin["modelled"].status is CheckStatus.GOOD and by_origin["modelled"].finding.endswith("(modelled)")
    assert "a stand-in's clock" in by_origin["stand-in"].finding


def test_a_figure_that_no_clock_tells_is_not_known() -> None:
    assert (
        format_bandwidth(BandwidthMeasurement("x", GIB, None)).startswith("not known")
        and BandwidthMeasurement("x", GIB, 0.0).bytes_s is None
    )


def test_a_test_that_could_not_go_beyond_gpu_memory_is_a_warning_with_a_remedy() -> None:
    chip = WatchedSuperchip(TINY)
    planned = plan_allocation_test(room(chip, host_available=0), 1.5)
    assert isinstance(planned, AllocationTestPlan)
    found = AllocationTest(chip, chip.devices()[0], None, planned, lambda: chip.seconds, NullSink()).run()
    assert found.passed and not found.exceeded_gpu_memory
    check = next(allocation_checks(found, "measured"))
    assert check.status is CheckStatus.WARNING and "0 B of host memory are available" in check.finding


def test_the_test_takes_its_limits_from_the_machine(tmp_path: Path) -> None:
    """A GH200 by its files with a modelled driver below: MemAvailable counts GPU memory in, and the limit does not."""
    chip = WatchedSuperchip(MACHINES["gh200-96"])
    facts = situation(tmp_path, *chip.devices()).facts
    found = measure_available_memory(facts, chip, folder_host(tmp_path / "host", gh200_files()))
    assert found.host_available == 455 * GIB and found.gpu_bytes == 96 * GIB
    assert facts.memory_available == 540 * GIB
    planned = plan_allocation_test(found, 20.0)
    assert isinstance(planned, AllocationTestPlan) and "455 GiB of host memory are available" in planned.limit_reason


def test_without_a_gpu_nothing_is_tried(tmp_path: Path) -> None:
    declined = run_allocation_test(without_gpu(tmp_path).facts, NO_DRIVER, folder_host(tmp_path, {}), 1.5, NullSink())
    assert declined == AllocationTestSkipped("no GPU")
    assert [check.status for check in allocation_checks(declined, "measured")] == [CheckStatus.ABSENT]

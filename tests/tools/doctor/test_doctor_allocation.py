"""The allocation test uses no more memory than is safe, finds wrong values, and frees everything."""

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
from supertuner.memory.emulator.configuration import EmulatedMachine, InjectedFault
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
from tests.tools.doctor.snapshots import NO_DRIVER, gh200_snapshot, snapshot_without_gpu

TINY = EmulatedMachine("tiny", 64 * MIB, host_bytes=GIB, ats=True, gpu_read_bytes_s=4e12, gpu_write_bytes_s=4e12,
               host_bytes_s=4e11, to_device_bytes_s=4e11, to_host_bytes_s=3e11)  # fmt: skip


class WatchedSuperchip(EmulatedSuperchip):
    """A superchip that records its allocations and can return wrong values or be interrupted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.held: dict[int, tuple[MemoryKind, int]] = {}
        self.allocated_kinds: list[MemoryKind] = []
        self.corrupted: AddressRange | None = None
        self.interrupted_in = ""
        self.calls_left = 0

    def allocate(self, kind: MemoryKind, nbytes: int, device: int = 0) -> int:
        self._interrupt("allocate")
        address = super().allocate(kind, nbytes, device)
        self.held[address] = kind, nbytes
        self.allocated_kinds.append(kind)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        del self.held[address]

    def fill(self, span: AddressRange, value: int, device: int = 0) -> None:
        self._interrupt("fill")
        super().fill(span, value, device)
        if self.corrupted is not None and span.nbytes > self.corrupted.nbytes and self.corrupted.address < span.nbytes:
            super().fill(AddressRange(span.address + self.corrupted.address, self.corrupted.nbytes), 0xEE, device)

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


def available_memory(chip: EmulatedSuperchip, host_available: int | None = 40 * GIB) -> AvailableMemory:
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


def run_test(chip: EmulatedSuperchip, scale: float = 1.5, machine: str | None = None) -> AllocationTestResult:
    planned = plan_allocation_test(available_memory(chip), scale)
    assert isinstance(planned, AllocationTestPlan)
    row = MACHINES[machine] if machine else None
    return AllocationTest(chip, chip.devices()[0], row, planned, lambda: chip.seconds, NullSink()).run()


# ---- the size of the test

sizes = st.integers(0, 1 << 40)


@given(st.integers(1, 1 << 40), sizes, sizes, sizes, st.floats(0.01, 100), st.booleans())
def test_the_reserved_host_memory_is_never_used(
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


def test_a_machine_with_one_pool_is_never_oversubscribed_and_the_plan_has_the_reason() -> None:
    planned = plan_allocation_test(AvailableMemory(128 * GIB, 100 * GIB, 120 * GIB, 100 * GIB, True, True, True), 1.5)
    assert isinstance(planned, AllocationTestPlan) and planned.nbytes <= 44 * GIB
    assert "one pool" in planned.limit_reason and "hangs" in planned.limit_reason
    assert planned.remedy == "" and "one pool" in planned.no_link_reason


def test_host_memory_of_unknown_size_is_not_used() -> None:
    planned = plan_allocation_test(AvailableMemory(64 * GIB, 60 * GIB, None, None, True, True, False), 2.0)
    assert isinstance(planned, AllocationTestPlan) and planned.nbytes <= 54 * GIB and planned.link_bytes == 0


def test_the_test_on_a_stand_in_is_limited_by_host_memory() -> None:
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
    ("memory", "reason"),
    [
        (AvailableMemory(GIB, GIB, 9 * GIB, 8 * GIB, False, False, False), "no managed memory"),
        (AvailableMemory(GIB, 0, 9 * GIB, 0, True, True, False), "too little memory for a test"),
        (AvailableMemory(GIB, 0, 9 * GIB, 4 * GIB, True, True, True), "one pool"),
        (AvailableMemory(GIB, GIB, 9 * GIB, 8 * GIB, True, True, False), "less than two blocks"),
    ],
)
def test_a_test_that_is_impossible_is_skipped_with_the_reason(memory: AvailableMemory, reason: str) -> None:
    skipped = plan_allocation_test(memory, 0.001)
    assert isinstance(skipped, AllocationTestSkipped) and reason in skipped.reason


# ---- the test itself, on the modelled superchip


@pytest.mark.parametrize("machine", ["gh200-96", "gb200", "gb10", "h100-80-pcie", "rtx-4090"])
def test_every_known_machine_passes_and_frees_everything(machine: str) -> None:
    chip = WatchedSuperchip(MACHINES[machine])
    found = run_test(chip, machine=machine)
    assert found.passed and found.verified_blocks == found.plan.blocks
    assert found.exceeded_gpu_memory is (machine != "gb10")
    assert chip.held == {}
    names = [rate.name for rate in found.rates]
    link = ["host to GPU", "GPU to host"]
    assert names[0] == "first touch" and "resident, written" in names
    assert ("first touch, full" in names) is found.exceeded_gpu_memory
    assert names[-2:] == link if machine != "gb10" else not set(link) & set(names)


def test_bandwidths_are_close_to_the_table_and_eviction_is_slower() -> None:
    found = run_test(WatchedSuperchip(MACHINES["gh200-96"]), machine="gh200-96")
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
    chip.corrupted = AddressRange(at, 64)
    found = run_test(chip)
    assert not found.passed and found.verified_blocks == 0
    assert "block 0 of 48: the host reads ee ee ee ee … at byte" in found.wrong_values[0]
    assert 0 < len(found.wrong_values) <= MAX_ERRORS_SHOWN + 3 and chip.held == {}
    check = next(allocation_checks(found, "measured"))
    assert check.status is CheckStatus.BAD and "WRONG VALUES" in check.finding and "`" in check.remedy
    assert check.finding.endswith(f"and {len(found.wrong_values) - 2} more places")


def test_wrong_values_mark_memory_as_corrupted(tmp_path: Path) -> None:
    chip = WatchedSuperchip(TINY)
    found = gh200_snapshot(tmp_path, *chip.devices())
    assert not DoctorFindings(found, (), run_test(chip)).memory_corrupted
    chip.corrupted = AddressRange(0, 64)
    assert DoctorFindings(found, (), run_test(chip)).memory_corrupted


def test_a_copy_by_the_gpu_that_does_not_happen_is_found() -> None:
    class NoCopySuperchip(WatchedSuperchip):
        def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
            pass

    found = run_test(NoCopySuperchip(TINY))
    assert not found.passed and any("a copy by the GPU holds" in line for line in found.wrong_values)


def test_a_copy_to_the_gpu_that_does_not_arrive_is_found() -> None:
    class OneWaySuperchip(WatchedSuperchip):
        def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
            if self.memory_kind_at(target) is not MemoryKind.DEVICE:
                super().copy(target, source, nbytes, device)

    found = run_test(OneWaySuperchip(TINY))
    assert (
        found.verified_blocks == found.plan.blocks
        and found.wrong_values
        and "GPU memory holds a5" in found.wrong_values[0]
    )


@pytest.mark.parametrize("verb", ["allocate", "fill", "copy", "read", "synchronize"])
@pytest.mark.parametrize("first", [1, 3])
def test_a_driver_error_ends_the_test_and_everything_is_freed(verb: str, first: int) -> None:
    chip = WatchedSuperchip(TINY, faults=(InjectedFault(verb, "CUDA_ERROR_UNKNOWN", first=first, times=1),))
    found = run_test(chip)
    assert chip.held == {}
    if found.refusal is None:  # the third call of synchronize belongs to an optional part of the test
        assert verb == "synchronize"
        return
    assert "CUDA_ERROR_UNKNOWN" in found.refusal and not found.passed
    check = next(allocation_checks(found, "measured"))
    assert check.status is CheckStatus.BAD and "CUDA_ERROR_UNKNOWN" in check.finding and "dmesg" in check.remedy


@pytest.mark.parametrize("verb", ["prefetch", "advise"])
def test_a_refused_hint_leaves_out_a_figure_and_the_test_still_passes(verb: str) -> None:
    found = run_test(WatchedSuperchip(TINY, faults=(InjectedFault(verb, "CUDA_ERROR_NOT_SUPPORTED", times=99),)))
    assert found.passed and found.notes


def test_memory_that_cannot_be_freed_is_noted() -> None:
    found = run_test(WatchedSuperchip(TINY, faults=(InjectedFault("free", "CUDA_ERROR_ILLEGAL_ADDRESS"),)))
    assert any("could not be freed" in note for note in found.notes)


@pytest.mark.parametrize(("verb", "after"), [("fill", 5), ("read", 7), ("copy", 2), ("prefetch", 0), ("allocate", 3)])
def test_ctrl_c_frees_everything(verb: str, after: int) -> None:
    chip = WatchedSuperchip(TINY)
    chip.interrupted_in, chip.calls_left = verb, after
    with pytest.raises(KeyboardInterrupt):
        run_test(chip)
    assert chip.allocated_kinds, "the interruption came after an allocation"
    assert chip.held == {} and chip.free_bytes(0) == TINY.gpu_bytes


def test_the_link_is_not_timed_if_the_hosts_buffer_is_in_gpu_memory() -> None:
    class MovingSuperchip(WatchedSuperchip):
        def locate(self, addresses: Sequence[int]) -> list[int | None]:
            return [1 for _ in addresses]

    found = run_test(MovingSuperchip(TINY))
    assert not any(rate.name == "host to GPU" for rate in found.rates)
    assert any("placed the host's buffer in GPU memory" in note for note in found.notes)


def test_neighbouring_blocks_have_different_values_and_samples_reach_both_ends() -> None:
    assert all(fill_value(n) != fill_value(n + 1) and 0 < fill_value(n) < 256 for n in range(1000))
    assert sample_offsets(2 * MIB)[0] == 0 and sample_offsets(2 * MIB)[-1] == 2 * MIB - 64


# ---- checks of the result


def test_a_slow_link_is_a_warning_only_on_a_real_gpu() -> None:
    row = MACHINES["gh200-96"]
    slow = BandwidthMeasurement("host to GPU", GIB, GIB / 50e9, row.to_device_bytes_s)
    found = AllocationTestResult(run_test(WatchedSuperchip(TINY)).plan, 64 * MIB, rates=[slow], verified_blocks=48)
    by_origin = {kind: list(allocation_checks(found, kind))[1] for kind in ("measured", "modelled", "stand-in")}
    assert by_origin["measured"].status is CheckStatus.WARNING
    assert "13% of the table's 375" in by_origin["measured"].finding
    assert by_origin["modelled"].status is CheckStatus.GOOD and by_origin["modelled"].finding.endswith("(modelled)")
    assert "of a stand-in for libcuda" in by_origin["stand-in"].finding


def test_a_bandwidth_without_a_time_is_unknown() -> None:
    assert (
        format_bandwidth(BandwidthMeasurement("x", GIB, None)).startswith("unknown")
        and BandwidthMeasurement("x", GIB, 0.0).bytes_s is None
    )


def test_a_test_that_could_not_exceed_gpu_memory_is_a_warning_with_a_remedy() -> None:
    chip = WatchedSuperchip(TINY)
    planned = plan_allocation_test(available_memory(chip, host_available=0), 1.5)
    assert isinstance(planned, AllocationTestPlan)
    found = AllocationTest(chip, chip.devices()[0], None, planned, lambda: chip.seconds, NullSink()).run()
    assert found.passed and not found.exceeded_gpu_memory
    check = next(allocation_checks(found, "measured"))
    assert check.status is CheckStatus.WARNING and "0 B of host memory are available" in check.finding


def test_the_size_of_the_test_excludes_gpu_memory_from_host_memory(tmp_path: Path) -> None:
    """A GH200 described by its kernel files, with a modelled driver: MemAvailable includes GPU memory."""
    chip = WatchedSuperchip(MACHINES["gh200-96"])
    facts = gh200_snapshot(tmp_path, *chip.devices()).facts
    found = measure_available_memory(facts, chip, folder_host(tmp_path / "host", gh200_files()))
    assert found.host_available == 455 * GIB and found.gpu_bytes == 96 * GIB
    assert facts.memory_available == 540 * GIB
    planned = plan_allocation_test(found, 20.0)
    assert isinstance(planned, AllocationTestPlan) and "455 GiB of host memory are available" in planned.limit_reason


def test_without_a_gpu_the_test_is_skipped(tmp_path: Path) -> None:
    skipped = run_allocation_test(
        snapshot_without_gpu(tmp_path).facts, NO_DRIVER, folder_host(tmp_path, {}), 1.5, NullSink()
    )
    assert skipped == AllocationTestSkipped("no GPU")
    assert [check.status for check in allocation_checks(skipped, "measured")] == [CheckStatus.ABSENT]

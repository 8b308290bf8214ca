"""The allocation test: managed memory beyond the GPU's own, filled by the GPU, verified by value, timed.

Over the seam of `memory/driver.py`, so the same test runs on a GPU, on a stand-in for its library and on the software
superchip; whose clock it was is part of the result. Everything that it took is given back, also after Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final

from supertuner.core.events import Progress
from supertuner.core.types import KIB, bytes_text
from supertuner.memory.driver import (
    HOST,
    AddressRange,
    DeviceProperties,
    Driver,
    DriverError,
    GpuLocation,
    MemoryAdvice,
    MemoryKind,
)
from supertuner.memory.machines import MachineFigure, MachineSpec
from supertuner.tools.doctor.allocation_plan import AllocationTestPlan

SAMPLE_BYTES: Final = 64
SAMPLES_PER_BLOCK: Final = 5
"""Places of a block that the host reads: both ends and between."""
COPIED_BYTES: Final = 4 * KIB
"""Of every block, copied by the GPU into host memory and read there."""
TIMED_ROUNDS: Final = 3
MAX_ERRORS_SHOWN: Final = 8
ClockFunction = Callable[[], float | None]
"""Seconds. None: time is not known, as the model says of a machine whose figures it lacks."""


@dataclass(frozen=True, slots=True)
class BandwidthMeasurement:
    """How fast something was, and what the table of machines says of it."""

    name: str
    nbytes: int
    seconds: float | None
    expected: MachineFigure | None = None

    @property
    def bytes_s(self) -> float | None:
        return self.nbytes / self.seconds if self.seconds else None

    def plus(self, nbytes: int, seconds: float | None) -> BandwidthMeasurement:
        """With more of the same."""
        total = None if seconds is None or self.seconds is None else self.seconds + seconds
        return replace(self, nbytes=self.nbytes + nbytes, seconds=total)

    @property
    def ratio(self) -> float | None:
        """To the table's figure; None where it has none."""
        if self.bytes_s is None or self.expected is None or not self.expected.value:
            return None
        return self.bytes_s / self.expected.value


@dataclass(slots=True)
class AllocationTestResult:
    """What became of the test. It passed if there is no problem, nothing wrong, and every block was verified."""

    plan: AllocationTestPlan
    gpu_bytes: int
    rates: list[BandwidthMeasurement] = field(default_factory=list)
    verified_blocks: int = 0
    """Blocks whose samples all had their value."""
    wrong_values: list[str] = field(default_factory=list)
    """Places with another value than was written, the first few."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""
    refusal: str | None = None
    """The driver's refusal that ended the test early."""

    @property
    def passed(self) -> bool:
        return self.refusal is None and not self.wrong_values and self.verified_blocks == self.plan.blocks

    @property
    def exceeded_gpu_memory(self) -> bool:
        """Whether it went beyond the GPU's own memory."""
        return self.plan.nbytes > self.gpu_bytes


class HeldAllocations:
    """Memory that a step of the test holds; leaving the `with` gives it back, whatever happened."""

    def __init__(self, driver: Driver, device: int, notes: list[str]) -> None:
        self._driver, self._device, self._notes = driver, device, notes
        self._addresses: list[int] = []

    def allocate(self, kind: MemoryKind, nbytes: int) -> AddressRange:
        address = self._driver.allocate(kind, nbytes, self._device)
        self._addresses.append(address)
        return AddressRange(address, nbytes)

    def __enter__(self) -> HeldAllocations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._addresses:
            try:
                self._driver.free(self._addresses.pop())
            except DriverError as refusal:
                self._notes.append(f"memory was not given back before the end of the process: {refusal}")


class AllocationTest:
    """One run of the test."""

    def __init__(
        self,
        driver: Driver,
        device: DeviceProperties,
        machine: MachineSpec | None,
        plan: AllocationTestPlan,
        clock: ClockFunction,
        progress: Progress,
    ) -> None:
        self._driver, self._device, self._machine = driver, device, machine
        self._plan, self._clock, self._progress = plan, clock, progress
        self._result = AllocationTestResult(plan, device.total_bytes)

    def run(self) -> AllocationTestResult:
        """Every step in turn. A refusal of the driver ends the test and is its finding."""
        try:
            with self._hold_allocations() as allocations:
                managed = allocations.allocate(MemoryKind.MANAGED, self._plan.nbytes)
                self._fill_blocks(managed)
                self._verify_blocks(managed, allocations.allocate(MemoryKind.SYSTEM, COPIED_BYTES))
                self._time_resident_memory(AddressRange(managed.address, self._plan.resident_bytes))
            if self._plan.link_bytes:
                with self._hold_allocations() as allocations:
                    self._time_link(allocations)
            else:
                self._result.notes.append(f"the link was not tried: {self._plan.no_link_reason}")
        except DriverError as refusal:
            self._result.refusal = str(refusal)
        return self._result

    def _hold_allocations(self) -> HeldAllocations:
        return HeldAllocations(self._driver, self._device.number, self._result.notes)

    def _fill_blocks(self, managed: AddressRange) -> None:
        """Every block its own value, by the GPU, which touches it for the first time."""
        inside, beyond = BandwidthMeasurement("first touch", 0, 0.0), BandwidthMeasurement("first touch, full", 0, 0.0)
        with self._progress.phase("filling managed memory", nbytes=managed.nbytes) as phase:
            for number, block in enumerate(self._blocks(managed)):
                begin = self._clock()
                self._write(block, fill_value(number))
                seconds = elapsed(begin, self._clock())
                if block.end - managed.address <= self._plan.gpu_free:
                    inside = inside.plus(block.nbytes, seconds)
                else:
                    beyond = beyond.plus(block.nbytes, seconds)
                phase.advance(nbytes=block.nbytes)
        self._result.rates += [rate for rate in (inside, beyond) if rate.nbytes]

    def _verify_blocks(self, managed: AddressRange, bounce: AddressRange) -> None:
        """Samples of every block, read by the host where they lie, and copied out by the GPU.

        The copies go to one place in turn: one that did not happen leaves the value of the block before, which differs.
        """
        with self._progress.phase("verifying by value", items=self._plan.blocks, noun="blocks") as phase:
            for number, block in enumerate(self._blocks(managed)):
                wrong = self._find_difference(block, fill_value(number), bounce)
                self._result.verified_blocks += not wrong
                if wrong and len(self._result.wrong_values) < MAX_ERRORS_SHOWN:
                    self._result.wrong_values.append(f"block {number} of {self._plan.blocks}: {wrong}")
                phase.advance(items=1)

    def _find_difference(self, block: AddressRange, value: int, bounce: AddressRange) -> str:
        """What is wrong with a block; empty: nothing."""
        for offset in sample_offsets(block.nbytes):
            content = self._driver.read(AddressRange(block.address + offset, SAMPLE_BYTES))
            if content != bytes([value]) * SAMPLE_BYTES:
                return f"the host reads {content[:4].hex(' ')} … at byte {offset}, not {value:02x}"
        middle = block.nbytes // 2 - block.nbytes // 2 % COPIED_BYTES
        self._driver.copy(bounce.address, block.address + middle, bounce.nbytes, self._device.number)
        content = self._driver.read(bounce)
        if content != bytes([value]) * bounce.nbytes:
            return f"a copy by the GPU holds {content[:4].hex(' ')} …, not {value:02x}"
        return ""

    def _time_resident_memory(self, span: AddressRange) -> None:
        """Writing and copying managed memory that is on the GPU already."""
        if span.nbytes < 2 * COPIED_BYTES:
            return
        try:
            self._driver.prefetch([span], GpuLocation(self._device.number))
        except DriverError as refusal:
            self._result.notes.append(f"resident memory was not timed: {refusal}")
            return
        self._driver.synchronize(self._device.number)
        machine, half = self._machine, span.nbytes // 2
        seconds = self._best_time(lambda: self._write(span, 1))
        self._result.rates.append(
            BandwidthMeasurement(
                "resident, written", span.nbytes, seconds, None if machine is None else machine.gpu_write_bytes_s
            )
        )
        seconds = self._best_time(
            lambda: self._driver.copy(span.address + half, span.address, half, self._device.number)
        )
        self._result.rates.append(
            BandwidthMeasurement(
                "resident, copied", 2 * half, seconds, None if machine is None else copy_bandwidth(machine)
            )
        )

    def _time_link(self, allocations: HeldAllocations) -> None:
        """Both directions between host memory and the GPU's, by plain copies; the values are verified too."""
        nbytes, number, machine = self._plan.link_bytes, self._device.number, self._machine
        near, far = allocations.allocate(MemoryKind.DEVICE, nbytes), allocations.allocate(MemoryKind.SYSTEM, nbytes)
        bounce = allocations.allocate(MemoryKind.SYSTEM, COPIED_BYTES)
        self._keep_on_host(far)
        with self._progress.phase("copying over the link", nbytes=2 * (TIMED_ROUNDS + 1) * nbytes) as phase:

            def copy(target: AddressRange, source: AddressRange) -> None:
                self._driver.copy(target.address, source.address, nbytes, number)
                phase.advance(nbytes=nbytes)

            self._write(near, 0x5A)
            copy(far, near)  # the pages of `far` come into being here, and are not timed
            to_host = self._best_time(lambda: copy(far, near))
            self._expect_on_host(far, 0x5A, "the host's end of the link")
            self._write(near, 0xA5)
            self._expect_on_gpu(near, 0xA5, bounce)  # so that what follows is not what was there before
            copy(near, far)
            to_device = self._best_time(lambda: copy(near, far))
            self._expect_on_gpu(near, 0x5A, bounce)
        if self._is_in_gpu_memory(far):
            self._result.notes.append("the link was not timed: the kernel put the host's end into GPU memory")
            return
        self._result.rates.append(
            BandwidthMeasurement(
                "host to GPU", nbytes, to_device, None if machine is None else machine.to_device_bytes_s
            )
        )
        self._result.rates.append(
            BandwidthMeasurement("GPU to host", nbytes, to_host, None if machine is None else machine.to_host_bytes_s)
        )

    def _keep_on_host(self, span: AddressRange) -> None:
        """Where the GPU shares the host's page tables, its first touch would put the pages into its own memory."""
        if not self._device.pageable:
            return
        try:
            self._driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
            self._driver.prefetch([span], HOST)
            self._driver.synchronize(self._device.number)
        except DriverError as refusal:
            self._result.notes.append(f"the host's end of the link may have moved: {refusal}")

    def _is_in_gpu_memory(self, span: AddressRange) -> bool:
        """Whether the kernel says that the span lies in GPU memory; where it does not say, it is believed to stay."""
        gpu_node = self._device.numa_node
        if gpu_node is None:
            return False
        places = self._driver.locate([span.address + at for at in sample_offsets(span.nbytes)])
        return gpu_node in places

    def _expect_on_host(self, span: AddressRange, value: int, description: str) -> None:
        for offset in sample_offsets(span.nbytes):
            content = self._driver.read(AddressRange(span.address + offset, SAMPLE_BYTES))
            if content != bytes([value]) * SAMPLE_BYTES:
                self._result.wrong_values.append(
                    f"{description} holds {content[:4].hex(' ')} … at byte {offset}, not {value:02x}"
                )
                return

    def _expect_on_gpu(self, span: AddressRange, value: int, bounce: AddressRange) -> None:
        for offset in sample_offsets(span.nbytes):
            self._driver.copy(bounce.address, span.address + offset, SAMPLE_BYTES, self._device.number)
            content = self._driver.read(AddressRange(bounce.address, SAMPLE_BYTES))
            if content != bytes([value]) * SAMPLE_BYTES:
                self._result.wrong_values.append(
                    f"GPU memory holds {content[:4].hex(' ')} … at byte {offset}, not {value:02x}"
                )
                return

    def _write(self, span: AddressRange, value: int) -> None:
        self._driver.fill(span, value, self._device.number)

    def _best_time(self, action: Callable[[], None]) -> float | None:
        """The quickest of a few: what it takes when nobody else is in the way."""
        times = []
        for _ in range(TIMED_ROUNDS):
            begin = self._clock()
            action()
            times.append(elapsed(begin, self._clock()))
        return min((seconds for seconds in times if seconds is not None), default=None)

    def _blocks(self, span: AddressRange) -> list[AddressRange]:
        size = self._plan.block_bytes
        return [AddressRange(at, size) for at in range(span.address, span.end, size)]


def elapsed(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def fill_value(block: int) -> int:
    """Neighbours differ, and none is zero, which fresh memory is."""
    return 1 + block * 7 % 251


def sample_offsets(nbytes: int) -> list[int]:
    """Where a piece is read: its first bytes, its last, and evenly between."""
    last = nbytes - SAMPLE_BYTES
    return [last * step // (SAMPLES_PER_BLOCK - 1) for step in range(SAMPLES_PER_BLOCK)]


def copy_bandwidth(machine: MachineSpec) -> MachineFigure | None:
    """What a copy inside GPU memory can reach: each byte is read once and written once."""
    read, write = machine.gpu_read_bytes_s, machine.gpu_write_bytes_s
    if not read.value or not write.value:
        return None
    return MachineFigure(
        2 / (1 / read.value + 1 / write.value), f"reads and writes in turn: {read.source}", read.origin
    )


def format_bandwidth(measurement: BandwidthMeasurement) -> str:
    """`3,512 GB/s, 95 % of the table's 3,705`. Decimal units, as bandwidth is sold."""
    if measurement.bytes_s is None:
        return f"not known: {bytes_text(measurement.nbytes)} in a time that the clock does not tell"
    text = f"{measurement.bytes_s / 1e9:,.1f} GB/s"
    if measurement.ratio is not None and measurement.expected is not None and measurement.expected.value:
        text += f", {measurement.ratio:.0%} of the table's {measurement.expected.value / 1e9:,.0f} ({measurement.expected.origin})"
    return text

"""The allocation test: the GPU fills managed memory beyond its own size; the values are verified, the steps timed.

It uses the `Driver` protocol of `memory/driver.py`, so the same test runs on a GPU, on a stand-in for libcuda and on
the software superchip; the report records which of them it was. It frees everything it allocates, also after Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
"""Places of a block that the host reads: both ends, and evenly spaced between them."""
COPIED_BYTES: Final = 4 * KIB
"""Bytes of every block that the GPU copies into host memory to be read there."""
TIMED_ROUNDS: Final = 3
MAX_ERRORS_SHOWN: Final = 8
ClockFunction = Callable[[], float | None]
"""Returns seconds, or None if the time is unknown: the model has no figures for some machines."""


@dataclass(frozen=True, slots=True)
class BandwidthMeasurement:
    """A measured bandwidth and the expected one from the table of machines."""

    name: str
    nbytes: int
    seconds: float | None
    expected: MachineFigure | None = None

    @property
    def bytes_s(self) -> float | None:
        return self.nbytes / self.seconds if self.seconds else None

    def plus(self, nbytes: int, seconds: float | None) -> BandwidthMeasurement:
        """The sum of this measurement and another part of the same transfer."""
        total = None if seconds is None or self.seconds is None else self.seconds + seconds
        return replace(self, nbytes=self.nbytes + nbytes, seconds=total)

    @property
    def ratio(self) -> float | None:
        """Measured divided by expected; None if either is unknown."""
        if self.bytes_s is None or self.expected is None or not self.expected.value:
            return None
        return self.bytes_s / self.expected.value


@dataclass(slots=True)
class AllocationTestResult:
    """The result of the test. It passed if the driver refused nothing and every block was verified."""

    plan: AllocationTestPlan
    gpu_bytes: int
    rates: list[BandwidthMeasurement] = field(default_factory=list)
    verified_blocks: int = 0
    """Blocks whose samples all had the expected value."""
    wrong_values: list[str] = field(default_factory=list)
    """The first few places whose value differs from what was written."""
    notes: list[str] = field(default_factory=list)
    """Parts of the test that were left out, with the reason."""
    refusal: str | None = None
    """The driver error that ended the test early."""

    @property
    def passed(self) -> bool:
        return self.refusal is None and not self.wrong_values and self.verified_blocks == self.plan.blocks

    @property
    def exceeded_gpu_memory(self) -> bool:
        """Whether the test allocated more than the GPU's own memory."""
        return self.plan.nbytes > self.gpu_bytes


class HeldAllocations:
    """The allocations of one step of the test; leaving the context frees them, also after an error."""

    def __init__(self, driver: Driver, device: int, notes: list[str]) -> None:
        self._driver, self._device, self._notes = driver, device, notes
        self._addresses: list[int] = []

    def allocate(self, kind: MemoryKind, nbytes: int) -> AddressRange:
        address = self._driver.allocate(kind, nbytes, self._device)
        self._addresses.append(address)
        return AddressRange(address, nbytes)

    def __enter__(self) -> HeldAllocations:
        return self

    def __exit__(self, *error: object) -> None:
        while self._addresses:
            try:
                self._driver.free(self._addresses.pop())
            except DriverError as refusal:
                self._notes.append(f"memory could not be freed before the end of the process: {refusal}")


class AllocationTest:
    """One execution of the test on one GPU."""

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
        """Run all steps. A driver error ends the test and becomes its result."""
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
                self._result.notes.append(f"the link was not tested: {self._plan.no_link_reason}")
        except DriverError as refusal:
            self._result.refusal = str(refusal)
        return self._result

    def _hold_allocations(self) -> HeldAllocations:
        return HeldAllocations(self._driver, self._device.number, self._result.notes)

    def _fill_blocks(self, managed: AddressRange) -> None:
        """The GPU fills each block with its own value; this is the first access to the pages."""
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
        """Read samples of every block: by the host in place, and through a copy by the GPU.

        All copies go to the same buffer. A copy that did not happen leaves the previous block's value, which differs.
        """
        with self._progress.phase("verifying by value", items=self._plan.blocks, noun="blocks") as phase:
            for number, block in enumerate(self._blocks(managed)):
                wrong = self._find_difference(block, fill_value(number), bounce)
                self._result.verified_blocks += not wrong
                if wrong and len(self._result.wrong_values) < MAX_ERRORS_SHOWN:
                    self._result.wrong_values.append(f"block {number} of {self._plan.blocks}: {wrong}")
                phase.advance(items=1)

    def _find_difference(self, block: AddressRange, value: int, bounce: AddressRange) -> str:
        """Check some values of a block of memory. Returns a description of the first wrong one, or ""."""
        wrong = self._wrong_sample(block, value)
        if wrong:
            return f"the host reads {wrong}"
        middle = block.nbytes // 2 - block.nbytes // 2 % COPIED_BYTES
        self._driver.copy(bounce.address, block.address + middle, bounce.nbytes, self._device.number)
        content = self._driver.read(bounce)
        if content != bytes([value]) * bounce.nbytes:
            return f"a copy by the GPU holds {content[:4].hex(' ')} …, not {value:02x}"
        return ""

    def _wrong_sample(self, span: AddressRange, value: int, bounce: AddressRange | None = None) -> str:
        """The first sample that has another value, as text; empty if there is none. With `bounce` the GPU copies each
        sample there, otherwise the host reads it in place."""
        for offset in sample_offsets(span.nbytes):
            address = span.address + offset
            if bounce is not None:
                self._driver.copy(bounce.address, address, SAMPLE_BYTES, self._device.number)
                address = bounce.address
            content = self._driver.read(AddressRange(address, SAMPLE_BYTES))
            if content != bytes([value]) * SAMPLE_BYTES:
                return f"{content[:4].hex(' ')} … at byte {offset}, not {value:02x}"
        return ""

    def _time_resident_memory(self, span: AddressRange) -> None:
        """Time writes and copies of managed memory that already is on the GPU."""
        if span.nbytes < 2 * COPIED_BYTES:
            return
        try:
            self._driver.prefetch([span], GpuLocation(self._device.number))
        except DriverError as refusal:
            self._result.notes.append(f"resident memory was not timed: {refusal}")
            return
        self._driver.synchronize(self._device.number)
        half, number = span.nbytes // 2, self._device.number
        self._record("resident, written", span.nbytes, self._best_time(lambda: self._write(span, 1)))
        copy_seconds = self._best_time(lambda: self._driver.copy(span.address + half, span.address, half, number))
        self._record("resident, copied", 2 * half, copy_seconds)

    def _record(self, name: str, nbytes: int, seconds: float | None) -> None:
        expected = None if self._machine is None else EXPECTED_BANDWIDTHS[name](self._machine)
        self._result.rates.append(BandwidthMeasurement(name, nbytes, seconds, expected))

    def _time_link(self, allocations: HeldAllocations) -> None:
        """Time copies in both directions between host and GPU memory, and verify the values."""
        nbytes, number = self._plan.link_bytes, self._device.number
        near, far = allocations.allocate(MemoryKind.DEVICE, nbytes), allocations.allocate(MemoryKind.SYSTEM, nbytes)
        bounce = allocations.allocate(MemoryKind.SYSTEM, COPIED_BYTES)
        self._keep_on_host(far)
        with self._progress.phase("copying over the link", nbytes=2 * (TIMED_ROUNDS + 1) * nbytes) as phase:

            def copy(target: AddressRange, source: AddressRange) -> None:
                self._driver.copy(target.address, source.address, nbytes, number)
                phase.advance(nbytes=nbytes)

            self._write(near, 0x5A)
            copy(far, near)  # populates the pages of `far`; not timed
            to_host = self._best_time(lambda: copy(far, near))
            self._expect(far, 0x5A, None)
            self._write(near, 0xA5)
            self._expect(near, 0xA5, bounce)  # so that 0x5A can only come from the next copy
            copy(near, far)
            to_device = self._best_time(lambda: copy(near, far))
            self._expect(near, 0x5A, bounce)
        if self._is_in_gpu_memory(far):
            self._result.notes.append("the link was not timed: the kernel placed the host's buffer in GPU memory")
            return
        self._record("host to GPU", nbytes, to_device)
        self._record("GPU to host", nbytes, to_host)

    def _keep_on_host(self, span: AddressRange) -> None:
        """Keep pages in host memory: a GPU with pageable access would move them to its own memory on first access."""
        if not self._device.pageable:
            return
        try:
            self._driver.advise(span, MemoryAdvice.PREFERRED_LOCATION, HOST)
            self._driver.prefetch([span], HOST)
            self._driver.synchronize(self._device.number)
        except DriverError as refusal:
            self._result.notes.append(f"the host's buffer may have moved to the GPU: {refusal}")

    def _is_in_gpu_memory(self, span: AddressRange) -> bool:
        """Whether the kernel locates the span in GPU memory; False if the kernel cannot tell."""
        gpu_node = self._device.numa_node
        if gpu_node is None:
            return False
        places = self._driver.locate([span.address + at for at in sample_offsets(span.nbytes)])
        return gpu_node in places

    def _expect(self, span: AddressRange, value: int, bounce: AddressRange | None) -> None:
        """Add a wrong value to the result: one that the host reads, or with `bounce` one that the GPU copies."""
        if wrong := self._wrong_sample(span, value, bounce):
            where = "the host's buffer" if bounce is None else "GPU memory"
            self._result.wrong_values.append(f"{where} holds {wrong}")

    def _write(self, span: AddressRange, value: int) -> None:
        self._driver.fill(span, value, self._device.number)

    def _best_time(self, action: Callable[[], None]) -> float | None:
        """The shortest of TIMED_ROUNDS times, which is the least disturbed by other processes."""
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
    """The value of a block: different for neighbours, and never zero, the value of fresh memory."""
    return 1 + block * 7 % 251


def sample_offsets(nbytes: int) -> list[int]:
    """Offsets of the samples: at the beginning, at the end, and evenly spaced between."""
    last = nbytes - SAMPLE_BYTES
    return [last * step // (SAMPLES_PER_BLOCK - 1) for step in range(SAMPLES_PER_BLOCK)]


def copy_bandwidth(machine: MachineSpec) -> MachineFigure | None:
    """What a copy inside GPU memory can reach: each byte is read once and written once."""
    read, write = machine.gpu_read_bytes_s, machine.gpu_write_bytes_s
    if not read.value or not write.value:
        return None
    bandwidth = 2 / (1 / read.value + 1 / write.value)
    return MachineFigure(bandwidth, f"reads and writes in turn: {read.source}", read.origin)


EXPECTED_BANDWIDTHS: Final[Mapping[str, Callable[[MachineSpec], MachineFigure | None]]] = {
    "resident, written": lambda machine: machine.gpu_write_bytes_s,
    "resident, copied": copy_bandwidth,
    "host to GPU": lambda machine: machine.to_device_bytes_s,
    "GPU to host": lambda machine: machine.to_host_bytes_s,
}
"""Name of a measurement → what the table of machines says."""


def format_bandwidth(measurement: BandwidthMeasurement) -> str:
    """`3,512.0 GB/s, 95% of the table's 3,705 (measured)`. Decimal units, as vendors state bandwidth."""
    if measurement.bytes_s is None:
        return f"unknown: {bytes_text(measurement.nbytes)} in an unknown time"
    text = f"{measurement.bytes_s / 1e9:,.1f} GB/s"
    expected = measurement.expected
    if measurement.ratio is not None and expected is not None and expected.value:
        text += f", {measurement.ratio:.0%} of the table's {expected.value / 1e9:,.0f} ({expected.origin})"
    return text

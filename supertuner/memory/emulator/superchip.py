"""A software superchip: a memory driver whose GPU is a model, for tests without a GPU and for forecasts.

Modelled: pages and 2 MiB blocks; GPU and host memory, or one pool; a link with a bandwidth in each direction; device
memory, which never moves; managed memory, moved by faults, prefetches, advice and least-recently-used eviction; system
memory on ATS machines, which follows the GPU's access counters and does not come back; discards; driver errors. Time is
modelled (`seconds`) from the machine's figures and from `EmulatorParameters`, of which the cost of a fault batch, the
bytes of a counted access, duplex traffic and whether hits refresh the eviction order are unconfirmed. Nothing is
measured. There is one GPU, one host node, one stream of work and any number of concurrent copies; kernels, peer GPUs
and HMM are not modelled. See docs/emulator.md.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np

from supertuner.memory.driver import (
    HOST,
    AddressRange,
    DeviceProperties,
    DriverError,
    GpuLocation,
    HostNumaLocation,
    MemoryAdvice,
    MemoryKind,
    MemoryLocation,
)
from supertuner.memory.emulator.clock import EmulatorClock, MemoryTraffic
from supertuner.memory.emulator.configuration import ERROR_CODES, EmulatedMachine, EmulatorParameters, InjectedFault
from supertuner.memory.emulator.movement import PageMovement
from supertuner.memory.emulator.page_table import AT_HOST, GARBAGE, ON_GPU, MemoryRegion, RegionRange, location_code
from supertuner.memory.emulator.page_use_rules import read_common_location, set_advice
from supertuner.memory.emulator.residency import PageResidency
from supertuner.memory.machines import MachineSpec

CUDA_13: Final = 13000
HOST_NODE: Final = 0
GPU_NODE: Final = 1
_FIRST_ADDRESS: Final = 1 << 44
"""Far from the addresses of a process's own memory, which begins well above or well below."""


class EmulatedSuperchip:
    """The `Driver` interface over a modelled machine. May be called from any thread."""

    def __init__(
        self,
        machine: MachineSpec | EmulatedMachine,
        *,
        page_bytes: int = 65536,
        faults: Sequence[InjectedFault] = (),
        parameters: EmulatorParameters = EmulatorParameters(),  # noqa: B008 - frozen
    ) -> None:
        self.machine = machine if isinstance(machine, EmulatedMachine) else EmulatedMachine.from_spec(machine)
        assert self.machine.block_bytes % page_bytes == 0, "a block holds whole pages"
        self.page_bytes = page_bytes
        self.clock = EmulatorClock(self.machine, parameters)
        self._residency = PageResidency(self.machine, parameters, page_bytes)
        self._movement = PageMovement(self.machine, parameters, self._residency, self.clock, page_bytes)
        self._faults = list(faults)
        self._calls: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._next_address = _FIRST_ADDRESS
        self._region_starts: list[int] = []
        self._regions: dict[int, MemoryRegion] = {}
        self._foreign_regions: dict[int, MemoryRegion] = {}
        """System memory that this driver did not allocate, by block, from its first mention on."""

    # ── beyond the Driver interface ──────────────────────────────────────────────────────────────────────────────────

    @property
    def seconds(self) -> float | None:
        """Modelled time; None once a cost with an unknown figure occurred (`clock.unknown_figures` names it)."""
        return self.clock.seconds

    @property
    def traffic(self) -> MemoryTraffic:
        return self.clock.traffic

    def compute(self, seconds: float) -> None:
        """The GPU computes for this long; prefetches in progress continue."""
        with self._lock:
            self.clock.advance(seconds)

    def copy_async(self, nbytes: int, to_gpu: bool, not_before: float = 0.0) -> float:
        """Start a copy between device and pinned host memory on its own stream, not before `not_before`; return its
        arrival time.

        Copies use the link in the order of the calls.
        """
        with self._lock:
            return self.clock.transfer(nbytes if to_gpu else 0, 0 if to_gpu else nbytes, not_before)

    def wait_until(self, time_s: float) -> None:
        """The GPU's main stream waits for an event of another stream."""
        with self._lock:
            self.clock.wait_until(time_s)

    def inject_fault(self, fault: InjectedFault) -> None:
        """Inject a further error; its `first` call counts from now."""
        with self._lock:
            self._faults.append(replace(fault, first=self._calls[fault.verb] + fault.first))

    def touch(self, span: AddressRange, by: MemoryLocation, write: bool = False, accesses: int | None = None) -> None:
        """A processor uses every page of the range once, with `accesses` counted per page; None: every cache line."""
        with self._call("touch"):
            for piece in self._region_ranges("touch", span):
                self._movement.use(piece.region, piece.pages, isinstance(by, GpuLocation), write, accesses)

    def resident_pages(self, span: AddressRange) -> dict[MemoryLocation | None, int]:
        """The number of pages of the range by location; None: not populated. A page with a copy on each side counts
        twice.
        """
        counts: dict[MemoryLocation | None, int] = {}
        with self._lock:
            for piece in self._region_ranges("resident_pages", span):
                state = piece.region.state[piece.pages]
                if piece.region.kind is MemoryKind.DEVICE:
                    state = np.full_like(state, ON_GPU)
                locations = {HOST: state & AT_HOST, GpuLocation(0): state & ON_GPU, None: state == 0}
                for location, at_location in locations.items():
                    counts[location] = counts.get(location, 0) + int(np.count_nonzero(at_location))
        return {home: count for home, count in counts.items() if count}

    # ── the Driver interface ─────────────────────────────────────────────────────────────────────────────────────────

    def version(self) -> int:
        return self.machine.version

    def devices(self) -> tuple[DeviceProperties, ...]:
        figures = self.machine
        return (
            DeviceProperties(
                number=0,
                name=figures.name,
                total_bytes=figures.gpu_bytes,
                managed=figures.managed,
                concurrent_managed=figures.managed and figures.concurrent,
                pageable=figures.gpu_reads_host_memory,
                host_page_tables=figures.ats,
                direct_host_access=figures.gpu_reads_host_memory,
                integrated=figures.one_pool,
                numa_node=GPU_NODE if figures.ats and not figures.one_pool else None,
                host_node=HOST_NODE,
            ),
        )

    def free_bytes(self, device: int) -> int:
        with self._call("free_bytes", device):
            return self._residency.gpu_free

    def allocate(self, kind: MemoryKind, nbytes: int, device: int = 0) -> int:
        with self._call("allocate", device):
            if nbytes <= 0 or kind is MemoryKind.PINNED:
                raise driver_error("allocate", "CUDA_ERROR_INVALID_VALUE")
            if kind is MemoryKind.MANAGED and not self.machine.managed:
                raise driver_error("allocate", "CUDA_ERROR_NOT_SUPPORTED")
            if self._reserves_gpu_memory(kind) and not self._movement.reserve(self._round_to_pages(nbytes)):
                raise driver_error("allocate", "CUDA_ERROR_OUT_OF_MEMORY")
            span = AddressRange(self._next_address, nbytes)
            block = self.machine.block_bytes
            # a gap, so that no range extends from one allocation into the next
            self._next_address += -(-nbytes // block) * block + block
            self._region_starts.append(span.address)
            region = self._regions[span.address] = MemoryRegion(kind, span, self.page_bytes, block)
            if kind is not MemoryKind.DEVICE:
                self._residency.add_region(region)
            return span.address

    def free(self, address: int) -> None:
        with self._call("free"):
            region = self._regions.pop(address, None)
            if region is None:
                raise driver_error("free", "CUDA_ERROR_INVALID_VALUE")
            del self._region_starts[bisect_right(self._region_starts, address) - 1]
            if region.kind is not MemoryKind.DEVICE:
                self._residency.remove_region(region)
            if self._reserves_gpu_memory(region.kind):
                self._residency.gpu_used -= self._round_to_pages(region.span.nbytes)

    def memory_kind_at(self, address: int) -> MemoryKind:
        with self._call("memory_kind_at"):
            region = self._region_at(address)
            return MemoryKind.SYSTEM if region is None else region.kind

    def advise(self, span: AddressRange, advice: MemoryAdvice, location: MemoryLocation) -> None:
        with self._call("advise"):
            for piece in self._advisable_ranges(span, advice, location):
                set_advice(piece.region, piece.pages, advice, location)

    def prefetch(self, spans: Sequence[AddressRange], location: MemoryLocation) -> None:
        with self._call("prefetch"):
            self._check_migrates_pages("prefetch")
            self._check_location("prefetch", location)
            pieces = [piece for span in spans for piece in self._movable_ranges("prefetch", span)]
            for piece in pieces:
                piece.region.prefetched[piece.pages] = location_code(location)
                self._movement.prefetch(piece.region, piece.pages, isinstance(location, GpuLocation))

    def discard(self, spans: Sequence[AddressRange]) -> None:
        with self._call("discard"):
            if self.machine.version < CUDA_13:
                raise driver_error("discard", "CUDA_ERROR_NOT_SUPPORTED")
            self._check_migrates_pages("discard")
            pieces = [piece for span in spans for piece in self._region_ranges("discard", span)]
            if any(piece.region.kind is not MemoryKind.MANAGED for piece in pieces):
                raise driver_error("discard", "CUDA_ERROR_INVALID_VALUE")
            for piece in pieces:  # a page that is only partly inside the range keeps its content
                pages = piece.whole_pages
                self._residency.discard_pages(piece.region, np.arange(pages.start, pages.stop, dtype=np.int64))
                size = self.page_bytes
                piece.region.contents.fill(pages.start * size, (pages.stop - pages.start) * size, GARBAGE)

    def preferred_location(self, span: AddressRange) -> MemoryLocation | None:
        with self._call("preferred_location"):
            return read_common_location(self._managed_range("preferred_location", span), "preferred")

    def last_prefetch_location(self, span: AddressRange) -> MemoryLocation | None:
        with self._call("last_prefetch_location"):
            return read_common_location(self._managed_range("last_prefetch_location", span), "prefetched")

    def accessed_by(self, span: AddressRange) -> tuple[MemoryLocation, ...]:
        with self._call("accessed_by"):
            piece = self._managed_range("accessed_by", span)
            common_bits = int(np.bitwise_and.reduce(piece.region.accessed[piece.pages]))
            return tuple(location for bit, location in ((2, GpuLocation(0)), (1, HOST)) if common_bits & bit)

    def read_mostly(self, span: AddressRange) -> bool:
        with self._call("read_mostly"):
            piece = self._managed_range("read_mostly", span)
            return bool(piece.region.read_mostly[piece.pages].all())

    def locate(self, addresses: Sequence[int]) -> list[int | None]:
        """The nodes of system memory pages. What the kernel reports for managed memory on a superchip is unknown, so it
        is None.
        """
        with self._call("locate"):
            return [self._numa_node(address) for address in addresses]

    def fill(self, span: AddressRange, value: int, device: int = 0) -> None:
        with self._call("fill", device):
            piece = self._allocated_range("fill", span)
            if piece.region.kind is MemoryKind.SYSTEM and not self.machine.gpu_reads_host_memory:
                raise driver_error("fill", "CUDA_ERROR_INVALID_VALUE")
            self._movement.use(piece.region, piece.pages, True, True, None)
            piece.region.contents.fill(piece.offset, span.nbytes, value)

    def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
        with self._call("copy", device):
            origin, goal = (self._allocated_range("copy", AddressRange(a, nbytes)) for a in (source, target))
            for piece, write in ((origin, False), (goal, True)):
                by_gpu = piece.region.kind is not MemoryKind.SYSTEM or self.machine.gpu_reads_host_memory
                self._movement.use(piece.region, piece.pages, by_gpu, write, None)
            goal.region.contents.copy_from(origin.region.contents, goal.offset, origin.offset, nbytes)

    def read(self, span: AddressRange) -> bytes:
        with self._call("read"):
            piece = self._allocated_range("read", span)
            self._movement.use(piece.region, piece.pages, False, False, None)
            return piece.region.contents.read(piece.offset, span.nbytes)

    def synchronize(self, device: int = 0) -> None:
        with self._call("synchronize", device):
            self.clock.wait_for_link()

    # ── checks and lookups ───────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _call(self, name: str, device: int = 0) -> Iterator[None]:
        """Serialise calls, and raise an injected error before anything is done. There is no device but 0."""
        with self._lock:
            self._calls[name] += 1
            for fault in self._faults:
                if fault.verb == name and fault.applies_to(self._calls[name]):
                    raise driver_error(name, fault.name)
            self._check_device(name, device)
            yield

    def _reserves_gpu_memory(self, kind: MemoryKind) -> bool:
        """Whether the memory is reserved on the GPU from the start: device memory, and managed memory without
        concurrent access.
        """
        return kind is MemoryKind.DEVICE or (kind is MemoryKind.MANAGED and not self.machine.concurrent)

    def _round_to_pages(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def _check_device(self, verb: str, device: int) -> None:
        if device != 0:
            raise driver_error(verb, "CUDA_ERROR_INVALID_DEVICE")

    def _check_location(self, verb: str, location: MemoryLocation) -> None:
        if isinstance(location, GpuLocation):
            self._check_device(verb, location.device)
        elif isinstance(location, HostNumaLocation) and location.node != HOST_NODE:
            raise driver_error(verb, "CUDA_ERROR_INVALID_VALUE")

    def _check_migrates_pages(self, verb: str) -> None:
        if not (self.machine.managed and self.machine.concurrent):
            raise driver_error(verb, "CUDA_ERROR_INVALID_DEVICE")

    def _advisable_ranges(self, span: AddressRange, advice: MemoryAdvice, to: MemoryLocation) -> list[RegionRange]:
        """The pieces to which this advice applies; none where it is documented to have no effect."""
        self._check_location("advise", to)
        if isinstance(to, HostNumaLocation) and advice is MemoryAdvice.ACCESSED_BY:
            raise driver_error("advise", "CUDA_ERROR_INVALID_VALUE")
        if isinstance(to, GpuLocation) and advice is not MemoryAdvice.READ_MOSTLY:
            self._check_migrates_pages("advise")
        pieces = self._movable_ranges("advise", span)
        located = advice is MemoryAdvice.PREFERRED_LOCATION or not self.machine.ats
        return [piece for piece in pieces if piece.region.kind is MemoryKind.MANAGED or located]

    def _movable_ranges(self, verb: str, span: AddressRange) -> list[RegionRange]:
        """A range of managed memory, or of system memory where the GPU can read it."""
        pieces = self._region_ranges(verb, span)
        for piece in pieces:
            kind = piece.region.kind
            if kind is MemoryKind.DEVICE or (kind is MemoryKind.SYSTEM and not self.machine.gpu_reads_host_memory):
                raise driver_error(verb, "CUDA_ERROR_INVALID_VALUE")
        return pieces

    def _managed_range(self, verb: str, span: AddressRange) -> RegionRange:
        """A range whose advice can be read back, which the documentation promises only for managed memory."""
        piece = self._allocated_range(verb, span)
        if piece.region.kind is not MemoryKind.MANAGED:
            raise driver_error(verb, "CUDA_ERROR_INVALID_VALUE")
        return piece

    def _allocated_range(self, verb: str, span: AddressRange) -> RegionRange:
        """A range inside one allocation of this driver."""
        region = self._region_at(span.address)
        if span.nbytes <= 0 or region is None or span.end > region.span.end:
            raise driver_error(verb, "CUDA_ERROR_INVALID_VALUE")
        return RegionRange(region, span)

    def _region_ranges(self, verb: str, span: AddressRange) -> list[RegionRange]:
        """A range inside one allocation; or, where the GPU can read it, memory that the process allocated elsewhere."""
        ours = span.address < self._next_address and span.end > _FIRST_ADDRESS
        if ours or span.nbytes <= 0 or not self.machine.gpu_reads_host_memory:
            return [self._allocated_range(verb, span)]
        block, pieces = self.machine.block_bytes, []
        for start in range(span.address // block * block, span.end, block):
            region = self._foreign_regions.get(start)
            if region is None:
                region = MemoryRegion(MemoryKind.SYSTEM, AddressRange(start, block), self.page_bytes, block)
                self._foreign_regions[start] = region
                self._movement.adopt_foreign_region(region)
            begin, end = max(start, span.address), min(start + block, span.end)
            pieces.append(RegionRange(region, AddressRange(begin, end - begin)))
        return pieces

    def _region_at(self, address: int) -> MemoryRegion | None:
        number = bisect_right(self._region_starts, address) - 1
        if number < 0:
            return None
        region = self._regions[self._region_starts[number]]
        return region if address < region.span.end else None

    def _numa_node(self, address: int) -> int | None:
        block = self.machine.block_bytes
        region = self._region_at(address) or self._foreign_regions.get(address // block * block)
        if region is None or region.kind is not MemoryKind.SYSTEM:
            return None
        state = int(region.state[(address - region.span.address) // self.page_bytes])
        return {0: None, AT_HOST: HOST_NODE, ON_GPU: GPU_NODE}[state]


def driver_error(verb: str, name: str) -> DriverError:
    return DriverError(verb, name, ERROR_CODES[name])

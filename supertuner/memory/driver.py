"""The seam to a GPU's memory: the few verbs that hints, telemetry and the doctor need from a driver.

Two bodies: `cuda.py` over NVIDIA's driver API, `model.py` over a software superchip. One contract suite holds for both.
A verb does what it says or raises `Refused`; what cannot be known is None, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, Protocol, TypeAlias


class MemoryKind(StrEnum):
    """Who manages a piece of memory, which decides what can be asked of it."""

    DEVICE = "device"
    """On the GPU, for good: never moved, never evicted."""
    MANAGED = "managed"
    """Moved by the driver on faults, hints and pressure; evicted least recently used."""
    SYSTEM = "system"
    """Ordinary memory of the process. On ATS machines the GPU reads it; what moved to the GPU does not come back."""
    PINNED = "pinned"
    """Host memory that is locked in place."""


@dataclass(frozen=True, slots=True)
class AddressRange:
    """A range of addresses."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class GpuLocation:
    """A GPU's memory as a home."""

    device: int


@dataclass(frozen=True, slots=True)
class HostNumaLocation:
    """One NUMA node of the host as a home."""

    node: int


class HostLocation(Enum):
    """The host's memory as a home, whichever node."""

    HOST = "host"


HOST: Final = HostLocation.HOST
MemoryLocation: TypeAlias = GpuLocation | HostNumaLocation | HostLocation


class MemoryAdvice(StrEnum):
    PREFERRED_LOCATION = "preferred location"
    ACCESSED_BY = "accessed by"
    READ_MOSTLY = "read mostly"


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What the driver says of a GPU. None: it would not say."""

    number: int
    name: str
    total_bytes: int
    capability: tuple[int, int] | None = None
    managed: bool | None = None
    """Managed memory exists."""
    concurrent_managed: bool | None = None
    """CPU and GPU may use managed memory at once: without it there is no prefetch and no oversubscription."""
    pageable: bool | None = None
    """The GPU reads ordinary memory of the process."""
    host_page_tables: bool | None = None
    """… through the host's own page tables: ATS, the mark of a Grace superchip."""
    direct_host_access: bool | None = None
    """The CPU reads managed memory that lies on the GPU without moving it."""
    integrated: bool | None = None
    """CPU and GPU share one pool of memory."""
    numa_node: int | None = None
    """The NUMA node that this GPU's memory is to the kernel."""
    host_node: int | None = None
    """The NUMA node of the CPU next to it."""
    uuid: str | None = None
    """Its identity in NVML's spelling, `GPU-2dee1e25-b3b5-…`: the two count GPUs differently."""


class DriverError(Exception):
    """The driver said no. `name` is its own word for why, such as CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, call: str, name: str, code: int) -> None:
        super().__init__(f"{call}: {name}")
        self.call, self.name, self.code = call, name, code

    @property
    def unsupported(self) -> bool:
        """Whether this machine or this driver cannot do it at all, whatever the range."""
        return self.name in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_DEVICE", "CUDA_ERROR_NOT_FOUND")


@dataclass(frozen=True, slots=True)
class NotAvailable:
    """There is no driver, or no GPU, and why."""

    reason: str


class Driver(Protocol):
    """A driver with at least one GPU. May be called from any thread."""

    page_bytes: int
    """The host's page: hints cover whole pages."""

    def version(self) -> int:
        """Of the driver API, as in 13000 for CUDA 13.0."""

    def devices(self) -> tuple[DeviceProperties, ...]: ...

    def free_bytes(self, device: int) -> int:
        """Free memory of the GPU as the driver sees it. On GB10 and GH200 it ignores cache the kernel would give up."""

    def allocate(self, kind: MemoryKind, nbytes: int, device: int = 0) -> int:
        """The address of new memory: DEVICE, MANAGED or SYSTEM. Contents are undefined."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""

    def memory_kind_at(self, address: int) -> MemoryKind:
        """Memory that the driver does not know is SYSTEM."""

    def advise(self, span: AddressRange, advice: MemoryAdvice, location: MemoryLocation) -> None: ...

    def unadvise(self, span: AddressRange, advice: MemoryAdvice, location: MemoryLocation) -> None: ...

    def prefetch(self, spans: Sequence[AddressRange], location: MemoryLocation) -> None:
        """Begin to move whole pages; `synchronize` waits. In one call where the driver has one (CUDA 13)."""

    def discard(self, spans: Sequence[AddressRange]) -> None:
        """Contents are worthless from here on: pages need not be moved again. MANAGED only; CUDA 13."""

    def preferred_location(self, span: AddressRange) -> MemoryLocation | None:
        """The preferred location that was set for all of the range; None: none, or not one for all of it."""

    def last_prefetch_location(self, span: AddressRange) -> MemoryLocation | None:
        """Where the range was last asked to go. It is what was asked, not where the pages are."""

    def accessed_by(self, span: AddressRange) -> tuple[MemoryLocation, ...]: ...

    def read_mostly(self, span: AddressRange) -> bool: ...

    def locate(self, addresses: Sequence[int]) -> list[int | None]:
        """The NUMA node of the page at each address, asked of the kernel; None: not populated, or not told."""

    def fill(self, span: AddressRange, value: int, device: int = 0) -> None:
        """Write one byte value everywhere, by the GPU; waits."""

    def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
        """Copy, by the GPU; waits."""

    def read(self, span: AddressRange) -> bytes:
        """The bytes, read by the host."""

    def synchronize(self, device: int = 0) -> None:
        """Wait until all that was begun is done."""

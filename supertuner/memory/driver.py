"""The interface to a GPU memory driver: the few calls that hints, telemetry and the doctor need.

There are two implementations: `cuda.py` over NVIDIA's driver API, and `emulator/superchip.py` over a software model.
One contract suite tests both. A call does what its name says or raises DriverError; an unknown value is None, never
zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, Protocol, TypeAlias


class MemoryKind(StrEnum):
    """How a piece of memory is managed, which determines the hints it accepts."""

    DEVICE = "device"
    """GPU memory: never moved, never evicted."""
    MANAGED = "managed"
    """The driver migrates it on faults, hints and memory pressure, and evicts the least recently used pages."""
    SYSTEM = "system"
    """Ordinary memory of the process. On ATS machines the GPU reads it; pages that migrated to the GPU do not come
    back.
    """
    PINNED = "pinned"
    """Page-locked host memory."""


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
    """The memory of one GPU."""

    device: int


@dataclass(frozen=True, slots=True)
class HostNumaLocation:
    """One NUMA node of the host."""

    node: int


class HostLocation(Enum):
    """The host's memory, on any node."""

    HOST = "host"


HOST: Final = HostLocation.HOST
MemoryLocation: TypeAlias = GpuLocation | HostNumaLocation | HostLocation


class MemoryAdvice(StrEnum):
    PREFERRED_LOCATION = "preferred location"
    ACCESSED_BY = "accessed by"
    READ_MOSTLY = "read mostly"


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """The driver's properties of a GPU. None: the driver does not report the value."""

    number: int
    name: str
    total_bytes: int
    capability: tuple[int, int] | None = None
    managed: bool | None = None
    """The GPU supports managed memory."""
    concurrent_managed: bool | None = None
    """CPU and GPU may use managed memory concurrently; without this there is no prefetch and no oversubscription."""
    pageable: bool | None = None
    """The GPU can read ordinary memory of the process."""
    host_page_tables: bool | None = None
    """The GPU reads it through the host's own page tables (ATS), as Grace superchips do."""
    direct_host_access: bool | None = None
    """The CPU reads managed memory on the GPU in place, without migrating it."""
    integrated: bool | None = None
    """CPU and GPU share one pool of memory."""
    numa_node: int | None = None
    """The kernel's NUMA node for this GPU's memory."""
    host_node: int | None = None
    """The NUMA node of the CPU next to the GPU."""
    uuid: str | None = None
    """Its identity as NVML writes it, `GPU-2dee1e25-b3b5-…`. The driver and NVML number GPUs differently."""


class DriverError(Exception):
    """A driver call failed. `name` is the driver's name for the error, such as CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, call: str, name: str, code: int) -> None:
        super().__init__(f"{call}: {name}")
        self.call, self.name, self.code = call, name, code

    @property
    def unsupported(self) -> bool:
        """Whether this machine or driver does not support the call at all, for any range."""
        return self.name in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_DEVICE", "CUDA_ERROR_NOT_FOUND")


@dataclass(frozen=True, slots=True)
class NotAvailable:
    """A driver, library or GPU is not available, and why."""

    reason: str


class Driver(Protocol):
    """A driver with at least one GPU. Its methods may be called from any thread."""

    page_bytes: int
    """Size of a host page. Hints cover whole pages."""

    def version(self) -> int:
        """Version of the driver API, such as 13000 for CUDA 13.0."""

    def devices(self) -> tuple[DeviceProperties, ...]: ...

    def free_bytes(self, device: int) -> int:
        """Free GPU memory as the driver reports it. On GB10 and GH200 this does not count page cache that the kernel
        would free.
        """

    def allocate(self, kind: MemoryKind, nbytes: int, device: int = 0) -> int:
        """Allocate DEVICE, MANAGED or SYSTEM memory and return its address. The content is undefined."""

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned."""

    def memory_kind_at(self, address: int) -> MemoryKind:
        """The kind of memory at an address. Memory that the driver does not know is SYSTEM."""

    def advise(self, span: AddressRange, advice: MemoryAdvice, location: MemoryLocation) -> None: ...

    def prefetch(self, spans: Sequence[AddressRange], location: MemoryLocation) -> None:
        """Start migrating whole pages; `synchronize` waits. Uses one call for all ranges where the driver has one (CUDA
        13).
        """

    def discard(self, spans: Sequence[AddressRange]) -> None:
        """Declare the content worthless, so that the pages need not be migrated. MANAGED memory only; needs CUDA 13."""

    def preferred_location(self, span: AddressRange) -> MemoryLocation | None:
        """The preferred location of the whole range; None if none is set or the range has several."""

    def last_prefetch_location(self, span: AddressRange) -> MemoryLocation | None:
        """The target of the last prefetch. This is the request, not where the pages are."""

    def accessed_by(self, span: AddressRange) -> tuple[MemoryLocation, ...]: ...

    def read_mostly(self, span: AddressRange) -> bool: ...

    def locate(self, addresses: Sequence[int]) -> list[int | None]:
        """The NUMA node of the page at each address according to the kernel; None: not populated, or not reported."""

    def fill(self, span: AddressRange, value: int, device: int = 0) -> None:
        """Set every byte to one value on the GPU, and wait."""

    def copy(self, target: int, source: int, nbytes: int, device: int = 0) -> None:
        """Copy on the GPU, and wait."""

    def read(self, span: AddressRange) -> bytes:
        """The bytes, read by the host."""

    def synchronize(self, device: int = 0) -> None:
        """Wait until all started work is done."""


def find_device(driver: Driver, number: int) -> DeviceProperties | None:
    """The properties of the GPU with this number; None if the driver has no such GPU."""
    return next((device for device in driver.devices() if device.number == number), None)

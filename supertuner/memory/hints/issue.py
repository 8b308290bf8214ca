"""Issues one hint and determines its outcome: predicted where the kind of memory decides it, otherwise sent to the
driver and verified.

| memory  | prefetch or preferred location: the GPU | the same: the host | accessed by, read mostly |
|---|---|---|---|
| device  | no-effect: it never leaves the GPU | unsupported | no-effect |
| managed | sent, read back | sent, read back | sent, read back |
| system, on ATS (the GPU uses the CPU's page tables) | sent; prefetch: pages located | sent; prefetch: pages located |
no-effect, as documented | | system, not readable by the GPU | unsupported | unsupported | unsupported |
| pinned  | no-effect: it is locked in host memory | no-effect | no-effect |

A prefetch to the GPU that would leave too little of its memory free is refused here: system memory that migrated does
not come back, and managed memory would evict memory that is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from supertuner.memory.driver import (
    AddressRange,
    DeviceProperties,
    Driver,
    DriverError,
    GpuLocation,
    HostNumaLocation,
    MemoryAdvice,
    MemoryKind,
    MemoryLocation,
)
from supertuner.memory.hints.outcomes import HintOutcome, HintStatus

MAX_LOCATED_PAGES: Final = 1024
"""Maximum number of pages of one range that are located through the kernel; larger ranges are sampled evenly."""
REQUEST_ERRORS: Final = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_PERMITTED")
"""Driver errors that concern this request. Any other error means that the driver or this program has a fault."""


class HintVerb(StrEnum):
    PREFER = "prefer"
    """Keep the memory there when the driver has a choice. Moves nothing."""
    PREFETCH = "prefetch"
    """Start migrating it there."""
    ACCESSED_BY = "accessed by"
    """Map it for that processor without migrating it."""
    READ_MOSTLY = "read mostly"
    """Let each reading processor have a copy."""


ADVICE_BY_VERB: Final = {
    HintVerb.PREFER: MemoryAdvice.PREFERRED_LOCATION,
    HintVerb.ACCESSED_BY: MemoryAdvice.ACCESSED_BY,
    HintVerb.READ_MOSTLY: MemoryAdvice.READ_MOSTLY,
}


@dataclass(frozen=True, slots=True)
class HintRequest:
    verb: HintVerb
    location: MemoryLocation
    cache_key: str = field(init=False, compare=False)
    """Equal for equal requests, and fast to look up: hashing the request itself takes longer than a
    repeated hint may.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_key", f"{self.verb} {self.location}")


@dataclass(frozen=True, slots=True)
class HintIssuer:
    """Sends hints for one GPU to its driver, keeping `headroom_bytes` of the GPU free."""

    driver: Driver
    device: DeviceProperties
    headroom_bytes: int | None = None
    """None: 5 % of the GPU."""
    free_bytes: Callable[[], int | None] | None = None
    """Returns the free memory of the GPU, None if unknown, where the driver's own value misleads."""

    def issue(
        self, spans: Sequence[AddressRange], request: HintRequest, *, gpu: int | None = None, wait: bool = True
    ) -> HintOutcome:
        """Issue one hint for whole pages of one piece of memory. `gpu` is the GPU of the tensor according to torch.

        With `wait`, waits until the pages have migrated where only that shows whether they did.
        """
        assert spans, "a hint needs at least one page"
        try:
            kind = self.driver.memory_kind_at(spans[0].address)
            predicted = self.predict_outcome(kind, request, gpu)
            if predicted is not None:
                return predicted
            to_gpu = isinstance(request.location, GpuLocation)
            if request.verb is HintVerb.PREFETCH and to_gpu and not self._has_room(spans):
                return HintOutcome(HintStatus.REFUSED, "too little GPU memory would stay free")
        except DriverError as error:
            return _error_outcome(error)
        return self._send(spans, request, kind, wait)

    def predict_outcome(self, kind: MemoryKind, request: HintRequest, gpu: int | None = None) -> HintOutcome | None:
        """The outcome that follows from the kind of memory alone; None if the driver must be called. `gpu` is the
        tensor's.
        """
        location, device = request.location, self.device
        is_access_hint = request.verb in (HintVerb.ACCESSED_BY, HintVerb.READ_MOSTLY)
        if device.integrated:
            return HintOutcome(HintStatus.NO_EFFECT, "CPU and GPU share one pool of memory")
        if kind is MemoryKind.PINNED:
            return HintOutcome(HintStatus.NO_EFFECT, "pinned memory is locked in host memory")
        if kind is MemoryKind.DEVICE:
            reason = "device memory never leaves its GPU"
            if is_access_hint or (isinstance(location, GpuLocation) and gpu in (None, location.device)):
                return HintOutcome(HintStatus.NO_EFFECT, reason)
            where = "another GPU" if isinstance(location, GpuLocation) else "the host"
            return HintOutcome(HintStatus.UNSUPPORTED, f"{reason}, so it cannot move to {where}")
        if kind is MemoryKind.MANAGED and device.concurrent_managed is False:
            return HintOutcome(HintStatus.UNSUPPORTED, "this GPU accepts no hints for managed memory")
        if kind is MemoryKind.SYSTEM and device.pageable is False:
            return HintOutcome(HintStatus.UNSUPPORTED, "ordinary memory, which this GPU cannot read")
        if kind is MemoryKind.SYSTEM and is_access_hint and device.host_page_tables:
            reason = f'"{request.verb}" is documented to do nothing for ordinary memory on ATS'
            return HintOutcome(HintStatus.NO_EFFECT, reason)
        return None

    def _has_room(self, spans: Sequence[AddressRange]) -> bool:
        free = self.driver.free_bytes(self.device.number) if self.free_bytes is None else self.free_bytes()
        headroom = self.device.total_bytes // 20 if self.headroom_bytes is None else self.headroom_bytes
        return free is None or free >= sum(span.nbytes for span in spans) + headroom

    def _send(self, spans: Sequence[AddressRange], request: HintRequest, kind: MemoryKind, wait: bool) -> HintOutcome:
        applied_to: list[AddressRange] = []
        try:
            if request.verb is HintVerb.PREFETCH:
                self.driver.prefetch(spans, request.location)
                applied_to += spans
            else:
                for span in spans:
                    self.driver.advise(span, ADVICE_BY_VERB[request.verb], request.location)
                    applied_to.append(span)
        except DriverError as error:
            return _error_outcome(error, applied_to)
        if kind is MemoryKind.SYSTEM and request.verb is HintVerb.PREFETCH:
            if not wait:
                return HintOutcome(HintStatus.UNVERIFIED, "started, and not waited for", None, tuple(applied_to))
            return self._verify_location(applied_to, request.location)
        return self._read_back(applied_to, request)

    def _read_back(self, spans: Sequence[AddressRange], request: HintRequest) -> HintOutcome:
        """Read the hint back from the driver. For a prefetch this returns the request, not where the pages are."""
        try:
            matches = [self._matches(span, request) for span in spans]
        except DriverError:
            # It accepted the hint and cannot report on this memory: that is "unverified", not a failure of the hint.
            matches = [None]
        status, reason = HintStatus.UNVERIFIED, "accepted by the driver, which does not report it"
        if all(matches):
            status, reason = HintStatus.APPLIED, "read back as requested"
        elif False in matches:
            status, reason = HintStatus.ERROR, "accepted by the driver, which reports something else"
        return HintOutcome(status, reason, None, tuple(spans))

    def _matches(self, span: AddressRange, request: HintRequest) -> bool | None:
        """Whether the driver reports the hint as requested; None if it reports nothing. For a prefetch it reports the
        last request, not where the pages are."""
        if request.verb is HintVerb.READ_MOSTLY:
            return self.driver.read_mostly(span)
        if request.verb is HintVerb.ACCESSED_BY:
            return any(same_location(request.location, location) for location in self.driver.accessed_by(span))
        prefers = request.verb is HintVerb.PREFER
        reported = self.driver.preferred_location(span) if prefers else self.driver.last_prefetch_location(span)
        return None if reported is None else same_location(request.location, reported)

    def _verify_location(self, spans: Sequence[AddressRange], location: MemoryLocation) -> HintOutcome:
        """Locate the pages through the kernel, after they have migrated."""
        try:
            self.driver.synchronize(self.device.number)
            nodes = self.driver.locate(page_addresses(spans, self.driver.page_bytes))
        except DriverError as error:
            return _error_outcome(error, spans)
        arrived = [self._is_at_location(node, location) for node in nodes]
        status, reason = HintStatus.NO_EFFECT, "accepted, but the kernel finds its pages elsewhere"
        if None in arrived:
            status = HintStatus.UNVERIFIED
            reason = "migration started, and the kernel does not report where the pages are"
        elif all(arrived):
            status, reason = HintStatus.APPLIED, "the kernel finds its pages there"
        elif any(arrived):
            status, reason = HintStatus.UNVERIFIED, "the kernel finds a part of its pages there"
        return HintOutcome(status, reason, None, tuple(spans))

    def _is_at_location(self, node: int | None, location: MemoryLocation) -> bool | None:
        """Whether a page on that NUMA node is at the requested location; None if that is unknown."""
        if node is None or self.device.numa_node is None:
            return None
        if isinstance(location, HostNumaLocation):
            return node == location.node
        on_gpu = node == self.device.numa_node
        return on_gpu if isinstance(location, GpuLocation) else not on_gpu


def same_location(requested: MemoryLocation, reported: MemoryLocation) -> bool:
    """Whether a location that was read back is the requested one. "The host" includes each of its nodes."""
    if isinstance(requested, GpuLocation) or isinstance(reported, GpuLocation):
        return requested == reported
    return requested == reported or not isinstance(requested, HostNumaLocation)


def page_addresses(spans: Sequence[AddressRange], page_bytes: int, limit: int = MAX_LOCATED_PAGES) -> list[int]:
    """One address per page, evenly sampled down to at most `limit`."""
    total = sum(span.nbytes // page_bytes for span in spans)
    step = max(1, -(-total // limit))
    pages = [address for span in spans for address in range(span.address, span.end, page_bytes)[::step]]
    return pages[:limit]


def _error_outcome(error: DriverError, applied_to: Sequence[AddressRange] = ()) -> HintOutcome:
    """The outcome of a failed driver call."""
    request_status = HintStatus.REFUSED if error.name in REQUEST_ERRORS else HintStatus.ERROR
    status = HintStatus.UNSUPPORTED if error.unsupported else request_status
    return HintOutcome(status, str(error), None, tuple(applied_to))

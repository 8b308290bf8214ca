"""One hint, from the request to what became of it: foreseen where the rules of the memory decide, else told to the
driver and checked.

| memory  | prefetch, preferred location to the GPU | to the host | accessed by, read mostly |
|---|---|---|---|
| device  | no-effect: it is there for good | unsupported | no-effect |
| managed | told, read back | told, read back | told, read back |
| system, on ATS | told; prefetch: pages located | told; prefetch: pages located | no-effect, as documented |
| system, not readable by the GPU | unsupported | unsupported | unsupported |
| pinned  | no-effect: it is locked in host memory | no-effect | no-effect |

A prefetch to the GPU that would leave too little of it free is refused here: system memory that went does not come
back, and managed memory would push out what is in use.
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
"""Pages of one range whose place is asked of the kernel; more are sampled evenly."""
REQUEST_ERRORS: Final = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_PERMITTED")
"""Answers that are about this request. Any other says that something is wrong with the driver, or with us."""


class HintVerb(StrEnum):
    PREFER = "prefer"
    """Keep it there when there is a choice. Moves nothing."""
    PREFETCH = "prefetch"
    """Begin to move it there."""
    ACCESSED_BY = "accessed by"
    """Map it there without moving it."""
    READ_MOSTLY = "read mostly"
    """Let each reader have a copy."""


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
    """The same for equal requests, and quick to look up: hashing a request itself takes longer than a hint may."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_key", f"{self.verb} {self.location}")


@dataclass(frozen=True, slots=True)
class HintIssuer:
    """Where hints are asked: a driver, one of its GPUs, and how much of that GPU stays free."""

    driver: Driver
    device: DeviceProperties
    headroom_bytes: int
    free_bytes: Callable[[], int | None]
    """Free memory of the GPU; None: unknown."""

    def issue(
        self,
        spans: Sequence[AddressRange],
        request: HintRequest,
        *,
        tensor_device: int | None = None,
        wait: bool = True,
    ) -> HintOutcome:
        """Give one hint for whole pages of one piece of memory. `on`: the GPU that torch says it is on.

        `wait`: stay until pages have moved, where only that tells whether they did.
        """
        assert spans, "no pages, no hint"
        try:
            kind = self.driver.memory_kind_at(spans[0].address)
            predicted = self.predict_outcome(kind, request, tensor_device)
            if predicted is not None:
                return predicted
            if (
                request.verb is HintVerb.PREFETCH
                and isinstance(request.location, GpuLocation)
                and not self._has_room(spans)
            ):
                return HintOutcome(HintStatus.REFUSED, "too little GPU memory would stay free")
        except DriverError as error:
            return _error_outcome(error)
        return self._send_to_driver(spans, request, kind, wait)

    def predict_outcome(
        self, kind: MemoryKind, request: HintRequest, tensor_device: int | None = None
    ) -> HintOutcome | None:
        """What becomes of a hint by the rules of the memory alone; None: it must be tried."""
        to_gpu, is_access_hint = (
            isinstance(request.location, GpuLocation),
            request.verb in (HintVerb.ACCESSED_BY, HintVerb.READ_MOSTLY),
        )
        if self.device.integrated:
            return HintOutcome(HintStatus.NO_EFFECT, "CPU and GPU share one pool of memory")
        if kind is MemoryKind.PINNED:
            return HintOutcome(HintStatus.NO_EFFECT, "pinned memory is locked in host memory")
        if kind is MemoryKind.DEVICE:
            stays = is_access_hint or (
                isinstance(request.location, GpuLocation) and tensor_device in (None, request.location.device)
            )
            if stays:
                return HintOutcome(HintStatus.NO_EFFECT, "device memory is on the GPU for good")
            where = "another GPU" if to_gpu else "the host"
            return HintOutcome(
                HintStatus.UNSUPPORTED, f"device memory is on its GPU for good, and never goes to {where}"
            )
        if kind is MemoryKind.MANAGED and self.device.concurrent_managed is False:
            return HintOutcome(HintStatus.UNSUPPORTED, "this GPU takes no hints for managed memory")
        if kind is MemoryKind.SYSTEM and self.device.pageable is False:
            return HintOutcome(HintStatus.UNSUPPORTED, "ordinary memory, which this GPU cannot read")
        if kind is MemoryKind.SYSTEM and is_access_hint and self.device.host_page_tables:
            return HintOutcome(
                HintStatus.NO_EFFECT, f'"{request.verb}" is documented to do nothing for ordinary memory on ATS'
            )
        return None

    def _has_room(self, spans: Sequence[AddressRange]) -> bool:
        free = self.free_bytes()
        return free is None or free >= sum(span.nbytes for span in spans) + self.headroom_bytes

    def _send_to_driver(
        self, spans: Sequence[AddressRange], request: HintRequest, kind: MemoryKind, wait: bool
    ) -> HintOutcome:
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
                return HintOutcome(HintStatus.UNVERIFIED, "begun, and not waited for", None, tuple(applied_to))
            return self._verify_location(applied_to, request.location)
        return self._read_back(applied_to, request)

    def _read_back(self, spans: Sequence[AddressRange], request: HintRequest) -> HintOutcome:
        """What the driver says afterwards. Of a prefetch it tells what was asked, not where the pages are."""
        applied_to = tuple(spans)
        try:
            matches = [self._matches(span, request) for span in spans]
        except DriverError:
            # It took the hint and has no answer for this memory: that is "unverified", not a failure of the hint.
            return HintOutcome(HintStatus.UNVERIFIED, "the driver took it, and does not read it back", None, applied_to)
        if all(matches):
            return HintOutcome(HintStatus.APPLIED, "read back as asked", None, applied_to)
        if False in matches:
            return HintOutcome(HintStatus.ERROR, "the driver took it, and reads back something else", None, applied_to)
        return HintOutcome(HintStatus.UNVERIFIED, "the driver took it, and does not read it back", None, applied_to)

    def _matches(self, span: AddressRange, request: HintRequest) -> bool | None:
        """Whether the driver reads back what was asked; None: it does not say."""
        if request.verb is HintVerb.READ_MOSTLY:
            return self.driver.read_mostly(span)
        if request.verb is HintVerb.ACCESSED_BY:
            return any(same_location(request.location, location) for location in self.driver.accessed_by(span))
        reported = (
            self.driver.preferred_location(span)
            if request.verb is HintVerb.PREFER
            else self.driver.last_prefetch_location(span)
        )
        return None if reported is None else same_location(request.location, reported)

    def _verify_location(self, spans: Sequence[AddressRange], location: MemoryLocation) -> HintOutcome:
        """Where the kernel says that the pages are, once they have moved."""
        applied_to = tuple(spans)
        try:
            self.driver.synchronize(self.device.number)
            nodes = self.driver.locate(page_addresses(spans, self.driver.page_bytes))
        except DriverError as error:
            return _error_outcome(error, applied_to)
        arrived = [self._is_at_location(node, location) for node in nodes]
        if None in arrived:
            reason = "pages were begun to move, and the kernel does not tell where they are"
            return HintOutcome(HintStatus.UNVERIFIED, reason, None, applied_to)
        if all(arrived):
            return HintOutcome(HintStatus.APPLIED, "the kernel finds its pages there", None, applied_to)
        if any(arrived):
            return HintOutcome(HintStatus.UNVERIFIED, "the kernel finds a part of its pages there", None, applied_to)
        return HintOutcome(HintStatus.NO_EFFECT, "accepted, and the kernel finds its pages elsewhere", None, applied_to)

    def _is_at_location(self, node: int | None, location: MemoryLocation) -> bool | None:
        """Whether a page on that NUMA node is where it was asked to be; None: it cannot be told."""
        if node is None or self.device.numa_node is None:
            return None
        if isinstance(location, HostNumaLocation):
            return node == location.node
        on_gpu = node == self.device.numa_node
        return on_gpu if isinstance(location, GpuLocation) else not on_gpu


def same_location(requested: MemoryLocation, reported: MemoryLocation) -> bool:
    """Whether a home that was read back is the one asked for. "The host" is any of its nodes."""
    if isinstance(requested, GpuLocation) or isinstance(reported, GpuLocation):
        return requested == reported
    return requested == reported or not isinstance(requested, HostNumaLocation)


def page_addresses(spans: Sequence[AddressRange], page_bytes: int, limit: int = MAX_LOCATED_PAGES) -> list[int]:
    """One address per page, evenly thinned out to at most `most`."""
    total = sum(span.nbytes // page_bytes for span in spans)
    step = max(1, -(-total // limit))
    pages = [address for span in spans for address in range(span.address, span.end, page_bytes)[::step]]
    return pages[:limit]


def _error_outcome(error: DriverError, applied_to: Sequence[AddressRange] = ()) -> HintOutcome:
    """The driver's no, by its own name for it."""
    request_status = HintStatus.REFUSED if error.name in REQUEST_ERRORS else HintStatus.ERROR
    status = HintStatus.UNSUPPORTED if error.unsupported else request_status
    return HintOutcome(status, str(error), None, tuple(applied_to))

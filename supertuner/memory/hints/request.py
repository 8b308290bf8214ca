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

from supertuner.memory.driver import Advice, Device, Driver, Gpu, Home, HostNode, Kind, Refused, Span
from supertuner.memory.hints.outcomes import Outcome, Status

MOST_LOCATED: Final = 1024
"""Pages of one range whose place is asked of the kernel; more are sampled evenly."""
REFUSALS: Final = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_PERMITTED")
"""Answers that are about this request. Any other says that something is wrong with the driver, or with us."""


class Verb(StrEnum):
    PREFER = "prefer"
    """Keep it there when there is a choice. Moves nothing."""
    PREFETCH = "prefetch"
    """Begin to move it there."""
    ACCESSED_BY = "accessed by"
    """Map it there without moving it."""
    READ_MOSTLY = "read mostly"
    """Let each reader have a copy."""


ADVICE: Final = {
    Verb.PREFER: Advice.PREFERRED_LOCATION,
    Verb.ACCESSED_BY: Advice.ACCESSED_BY,
    Verb.READ_MOSTLY: Advice.READ_MOSTLY,
}


@dataclass(frozen=True, slots=True)
class Ask:
    verb: Verb
    home: Home
    name: str = field(init=False, compare=False)
    """The same for equal requests, and quick to look up: hashing a request itself takes longer than a hint may."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.verb} {self.home}")


@dataclass(frozen=True, slots=True)
class Desk:
    """Where hints are asked: a driver, one of its GPUs, and how much of that GPU stays free."""

    driver: Driver
    device: Device
    headroom_bytes: int
    free_bytes: Callable[[], int | None]
    """Free memory of the GPU; None: unknown."""

    def ask(self, spans: Sequence[Span], wanted: Ask, *, on: int | None = None, wait: bool = True) -> Outcome:
        """Give one hint for whole pages of one piece of memory. `on`: the GPU that torch says it is on.

        `wait`: stay until pages have moved, where only that tells whether they did.
        """
        assert spans, "no pages, no hint"
        try:
            kind = self.driver.kind_of(spans[0].address)
            foreseen = self.foreseen(kind, wanted, on)
            if foreseen is not None:
                return foreseen
            if wanted.verb is Verb.PREFETCH and isinstance(wanted.home, Gpu) and not self._has_room(spans):
                return Outcome(Status.REFUSED, "too little GPU memory would stay free")
        except Refused as refused:
            return _refusal(refused)
        return self._told(spans, wanted, kind, wait)

    def foreseen(self, kind: Kind, wanted: Ask, on: int | None = None) -> Outcome | None:
        """What becomes of a hint by the rules of the memory alone; None: it must be tried."""
        to_gpu, optional = isinstance(wanted.home, Gpu), wanted.verb in (Verb.ACCESSED_BY, Verb.READ_MOSTLY)
        if self.device.integrated:
            return Outcome(Status.NO_EFFECT, "CPU and GPU share one pool of memory")
        if kind is Kind.PINNED:
            return Outcome(Status.NO_EFFECT, "pinned memory is locked in host memory")
        if kind is Kind.DEVICE:
            stays = optional or (isinstance(wanted.home, Gpu) and on in (None, wanted.home.device))
            if stays:
                return Outcome(Status.NO_EFFECT, "device memory is on the GPU for good")
            where = "another GPU" if to_gpu else "the host"
            return Outcome(Status.UNSUPPORTED, f"device memory is on its GPU for good, and never goes to {where}")
        if kind is Kind.MANAGED and self.device.concurrent_managed is False:
            return Outcome(Status.UNSUPPORTED, "this GPU takes no hints for managed memory")
        if kind is Kind.SYSTEM and self.device.pageable is False:
            return Outcome(Status.UNSUPPORTED, "ordinary memory, which this GPU cannot read")
        if kind is Kind.SYSTEM and optional and self.device.host_page_tables:
            return Outcome(Status.NO_EFFECT, f'"{wanted.verb}" is documented to do nothing for ordinary memory on ATS')
        return None

    def _has_room(self, spans: Sequence[Span]) -> bool:
        free = self.free_bytes()
        return free is None or free >= sum(span.nbytes for span in spans) + self.headroom_bytes

    def _told(self, spans: Sequence[Span], wanted: Ask, kind: Kind, wait: bool) -> Outcome:
        touched: list[Span] = []
        try:
            if wanted.verb is Verb.PREFETCH:
                self.driver.prefetch(spans, wanted.home)
                touched += spans
            else:
                for span in spans:
                    self.driver.advise(span, ADVICE[wanted.verb], wanted.home)
                    touched.append(span)
        except Refused as refused:
            return _refusal(refused, touched)
        if kind is Kind.SYSTEM and wanted.verb is Verb.PREFETCH:
            if not wait:
                return Outcome(Status.UNVERIFIED, "begun, and not waited for", None, tuple(touched))
            return self._located(touched, wanted.home)
        return self._read_back(touched, wanted)

    def _read_back(self, spans: Sequence[Span], wanted: Ask) -> Outcome:
        """What the driver says afterwards. Of a prefetch it tells what was asked, not where the pages are."""
        touched = tuple(spans)
        try:
            answers = [self._same(span, wanted) for span in spans]
        except Refused:
            # It took the hint and has no answer for this memory: that is "unverified", not a failure of the hint.
            return Outcome(Status.UNVERIFIED, "the driver took it, and does not read it back", None, touched)
        if all(answers):
            return Outcome(Status.APPLIED, "read back as asked", None, touched)
        if False in answers:
            return Outcome(Status.ERROR, "the driver took it, and reads back something else", None, touched)
        return Outcome(Status.UNVERIFIED, "the driver took it, and does not read it back", None, touched)

    def _same(self, span: Span, wanted: Ask) -> bool | None:
        """Whether the driver reads back what was asked; None: it does not say."""
        if wanted.verb is Verb.READ_MOSTLY:
            return self.driver.read_mostly(span)
        if wanted.verb is Verb.ACCESSED_BY:
            return any(same_home(wanted.home, home) for home in self.driver.accessed_by(span))
        told = self.driver.preferred(span) if wanted.verb is Verb.PREFER else self.driver.last_prefetch(span)
        return None if told is None else same_home(wanted.home, told)

    def _located(self, spans: Sequence[Span], home: Home) -> Outcome:
        """Where the kernel says that the pages are, once they have moved."""
        touched = tuple(spans)
        try:
            self.driver.synchronize(self.device.number)
            nodes = self.driver.locate(page_addresses(spans, self.driver.page_bytes))
        except Refused as refused:
            return _refusal(refused, touched)
        there = [self._is_home(node, home) for node in nodes]
        if None in there:
            some = "pages were begun to move, and the kernel does not tell where they are"
            return Outcome(Status.UNVERIFIED, some, None, touched)
        if all(there):
            return Outcome(Status.APPLIED, "the kernel finds its pages there", None, touched)
        if any(there):
            return Outcome(Status.UNVERIFIED, "the kernel finds a part of its pages there", None, touched)
        return Outcome(Status.NO_EFFECT, "accepted, and the kernel finds its pages elsewhere", None, touched)

    def _is_home(self, node: int | None, home: Home) -> bool | None:
        """Whether a page on that NUMA node is where it was asked to be; None: it cannot be told."""
        if node is None or self.device.numa_node is None:
            return None
        if isinstance(home, HostNode):
            return node == home.node
        on_gpu = node == self.device.numa_node
        return on_gpu if isinstance(home, Gpu) else not on_gpu


def same_home(asked: Home, told: Home) -> bool:
    """Whether a home that was read back is the one asked for. "The host" is any of its nodes."""
    if isinstance(asked, Gpu) or isinstance(told, Gpu):
        return asked == told
    return asked == told or not isinstance(asked, HostNode)


def page_addresses(spans: Sequence[Span], page_bytes: int, most: int = MOST_LOCATED) -> list[int]:
    """One address per page, evenly thinned out to at most `most`."""
    total = sum(span.nbytes // page_bytes for span in spans)
    step = max(1, -(-total // most))
    pages = [address for span in spans for address in range(span.address, span.end, page_bytes)[::step]]
    return pages[:most]


def _refusal(refused: Refused, touched: Sequence[Span] = ()) -> Outcome:
    """The driver's no, by its own name for it."""
    about_this = Status.REFUSED if refused.name in REFUSALS else Status.ERROR
    status = Status.UNSUPPORTED if refused.unsupported else about_this
    return Outcome(status, str(refused), None, tuple(touched))

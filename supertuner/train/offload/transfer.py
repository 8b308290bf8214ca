"""The seam between a plan and a machine: copies to the device and back, begun in order and awaited by marks.

A copy begins after everything that was asked of the computation so far, so it may overwrite what the computation has
used and read what it has made. `await_` makes the computation wait, not the host; `arrived` makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

Mark: TypeAlias = Any
"""A point in the work of a stream; what it is depends on the carrier."""
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy: contiguous, of the same bytes."""


@dataclass(slots=True)
class Counters:
    """What was moved since they were taken, and what it cost. Seconds are the carrier's own: a clock's or a model's."""

    fetched_bytes: int = 0
    sent_bytes: int = 0
    fetch_s: float = 0.0
    """The way to the device was busy."""
    send_s: float = 0.0
    waited_s: float = 0.0
    """The computation stood still for a copy."""
    fetches: int = 0
    """Blocks that were fetched."""
    late: int = 0
    """Of these, those that were not asked for before they were needed."""


class Carrier(Protocol):
    device: torch.device
    counters: Counters

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Mark] = ()) -> Mark:
        """Begin to copy from host memory to the device."""

    def send(self, pairs: Sequence[Pair]) -> Mark:
        """Begin to copy from the device to host memory."""

    def await_(self, mark: Mark) -> None:
        """What the computation is asked for from here on comes after the mark."""

    def arrived(self, mark: Mark) -> None:
        """Wait until the host may read what was sent."""

    def take(self) -> Counters:
        """What was counted since the last time. Between windows: it may wait for the device."""


class InPlace:
    """A carrier for a device that is the host itself: copies are made at once. Results do not depend on the carrier, so
    what holds with this one holds on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counters = device, Counters()

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Mark] = ()) -> Mark:
        self.counters.fetched_bytes += _copy(pairs)

    def send(self, pairs: Sequence[Pair]) -> Mark:
        self.counters.sent_bytes += _copy(pairs)

    def await_(self, mark: Mark) -> None: ...

    def arrived(self, mark: Mark) -> None: ...

    def take(self) -> Counters:
        taken, self.counters = self.counters, Counters()
        return taken


class SideStreams:
    """A GPU's copy engines beside its computation: one stream each way."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counters = device, Counters()
        self._up, self._down = _stream(device), _stream(device)
        self._timed: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Mark] = ()) -> Mark:
        for mark in after:
            self._up.wait_event(mark)
        self.counters.fetched_bytes += sum(target.nbytes for target, _ in pairs)
        return self._copy(self._up, pairs, "fetch_s")

    def send(self, pairs: Sequence[Pair]) -> Mark:
        self.counters.sent_bytes += sum(target.nbytes for target, _ in pairs)
        return self._copy(self._down, pairs, "send_s")

    def await_(self, mark: Mark) -> None:
        computing = torch.cuda.current_stream(self.device)
        begin = _now(computing)
        computing.wait_event(mark)
        self._timed.setdefault("waited_s", []).append((begin, _now(computing)))

    def arrived(self, mark: Mark) -> None:
        mark.synchronize()

    def take(self) -> Counters:
        taken, self.counters = self.counters, Counters()
        for name, spans in self._timed.items():
            for _, end in spans[-1:]:
                end.synchronize()  # of one stream: the others are before it
            setattr(taken, name, sum(begin.elapsed_time(end) for begin, end in spans) / 1e3)
        self._timed.clear()
        return taken

    def _copy(self, stream: torch.cuda.Stream, pairs: Sequence[Pair], name: str) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begin = _now(stream)
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        end = _now(stream)
        self._timed.setdefault(name, []).append((begin, end))
        return end


def carrier_for(device: torch.device) -> Carrier:
    return SideStreams(device) if device.type == "cuda" else InPlace(device)


def _stream(device: torch.device) -> torch.cuda.Stream:
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made


def _now(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@torch.no_grad()
def _copy(pairs: Sequence[Pair]) -> int:
    for target, source in pairs:
        target.copy_(source)
    return sum(target.nbytes for target, _ in pairs)

"""The seam between a plan and a machine: copies to the device and back, begun in order and awaited by marks.

A copy begins after everything that was asked of the computation so far, so it may overwrite what the computation has
used and read what it has made. `await_` makes the computation wait, not the host; `arrived` makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from supertuner.plan.placement.replan import TransferCounters

TransferEvent: TypeAlias = Any
"""A point in the work of a stream; what it is depends on the carrier."""
CopyPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy: contiguous, of the same bytes."""



class DeviceTransfer(Protocol):
    device: torch.device
    counters: TransferCounters

    def copy_to_device(self, pairs: Sequence[CopyPair], after: Iterable[TransferEvent] = ()) -> TransferEvent:
        """Begin to copy from host memory to the device."""

    def copy_to_host(self, pairs: Sequence[CopyPair]) -> TransferEvent:
        """Begin to copy from the device to host memory."""

    def wait_on_device(self, event: TransferEvent) -> None:
        """What the computation is asked for from here on comes after the mark."""

    def synchronize(self, event: TransferEvent) -> None:
        """Wait until the host may read what was sent."""

    def take_counters(self) -> TransferCounters:
        """What was counted since the last time. Between windows: it may wait for the device."""


class SynchronousTransfer:
    """A carrier for a device that is the host itself: copies are made at once. Results do not depend on the carrier, so
    what holds with this one holds on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counters = device, TransferCounters()

    def copy_to_device(self, pairs: Sequence[CopyPair], after: Iterable[TransferEvent] = ()) -> TransferEvent:
        self.counters.fetched_bytes += _copy(pairs)

    def copy_to_host(self, pairs: Sequence[CopyPair]) -> TransferEvent:
        self.counters.sent_bytes += _copy(pairs)

    def wait_on_device(self, event: TransferEvent) -> None: ...

    def synchronize(self, event: TransferEvent) -> None: ...

    def take_counters(self) -> TransferCounters:
        taken, self.counters = self.counters, TransferCounters()
        return taken


class CudaStreamTransfer:
    """A GPU's copy engines beside its computation: one stream each way."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counters = device, TransferCounters()
        self._to_device_stream, self._to_host_stream = _create_stream(device), _create_stream(device)
        self._timed: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def copy_to_device(self, pairs: Sequence[CopyPair], after: Iterable[TransferEvent] = ()) -> TransferEvent:
        for event in after:
            self._to_device_stream.wait_event(event)
        self.counters.fetched_bytes += sum(target.nbytes for target, _ in pairs)
        return self._copy(self._to_device_stream, pairs, "fetch_s")

    def copy_to_host(self, pairs: Sequence[CopyPair]) -> TransferEvent:
        self.counters.sent_bytes += sum(target.nbytes for target, _ in pairs)
        return self._copy(self._to_host_stream, pairs, "send_s")

    def wait_on_device(self, event: TransferEvent) -> None:
        computing = torch.cuda.current_stream(self.device)
        begin = _record_event(computing)
        computing.wait_event(event)
        self._timed.setdefault("waited_s", []).append((begin, _record_event(computing)))

    def synchronize(self, event: TransferEvent) -> None:
        event.synchronize()

    def take_counters(self) -> TransferCounters:
        taken, self.counters = self.counters, TransferCounters()
        for name, spans in self._timed.items():
            for _, end in spans[-1:]:
                end.synchronize()  # of one stream: the others are before it
            setattr(taken, name, sum(begin.elapsed_time(end) for begin, end in spans) / 1e3)
        self._timed.clear()
        return taken

    def _copy(self, stream: torch.cuda.Stream, pairs: Sequence[CopyPair], name: str) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begin = _record_event(stream)
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        end = _record_event(stream)
        self._timed.setdefault(name, []).append((begin, end))
        return end


def create_transfer(device: torch.device) -> DeviceTransfer:
    return CudaStreamTransfer(device) if device.type == "cuda" else SynchronousTransfer(device)


def _create_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@torch.no_grad()
def _copy(pairs: Sequence[CopyPair]) -> int:
    for target, source in pairs:
        target.copy_(source)
    return sum(target.nbytes for target, _ in pairs)

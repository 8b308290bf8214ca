"""Asynchronous copies to the device and back, with events to wait for.

A copy starts after everything queued on the compute stream so far, so it may overwrite what earlier computation has
read, and may read what it has written. `wait_on_device` makes the compute stream wait for a copy; `synchronize` makes
the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from supertuner.plan.placement.replan import TransferCounters

TransferEvent: TypeAlias = Any
"""A point in the work of a copy stream. Its type depends on the transfer."""
CopyPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""(target, source) of a copy: contiguous tensors of the same size."""


class DeviceTransfer(Protocol):
    device: torch.device
    counters: TransferCounters

    def copy_to_device(self, pairs: Sequence[CopyPair], after: Iterable[TransferEvent] = ()) -> TransferEvent:
        """Start copying from host memory to the device, after these events. Returns the completion event."""

    def copy_to_host(self, pairs: Sequence[CopyPair]) -> TransferEvent:
        """Start copying from the device to host memory. Returns the completion event."""

    def wait_on_device(self, event: TransferEvent) -> None:
        """Computation queued from here on starts after the event."""

    def synchronize(self, event: TransferEvent) -> None:
        """Make the host wait for the event: it may then read what was copied to it."""

    def take_counters(self) -> TransferCounters:
        """The counters since the last call. Only between windows: it may wait for the device."""


class SynchronousTransfer:
    """The transfer for the CPU as device: each copy is complete when its call returns. It cannot show a missing
    wait."""

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
    """The transfer for a GPU: one copy stream per direction, beside the compute stream."""

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
                end.synchronize()  # events of one stream complete in order: the last one is enough
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

"""The modelled clock of the software superchip: bytes divided by bandwidths, and batches of page faults. Nothing is
measured.

The parts of one operation are sequential: it waits for pages in transit, services its faults, transfers over the link,
then accesses memory at its bandwidth. Prefetches are asynchronous: the link continues while the clock stands, and an
operation that needs the pages, or `synchronize`, waits. A cost whose figure is unknown makes the time unknown, not
shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.memory.emulator.configuration import EmulatedMachine, EmulatorParameters


@dataclass(slots=True)
class MemoryTraffic:
    """Traffic in bytes and counts, by which a plan is evaluated."""

    to_device_bytes: int = 0
    """Bytes over the link to the GPU: migrations and remote accesses."""
    to_host_bytes: int = 0
    gpu_bytes: int = 0
    """Bytes that the GPU read or wrote in its own memory."""
    host_bytes: int = 0
    remote_bytes: int = 0
    """Of the link's bytes, those that were accessed in place and not migrated."""
    evicted_bytes: int = 0
    """Of the bytes to the host, those evicted under memory pressure."""
    faulted_pages: int = 0
    fault_batches: int = 0
    counter_migrations: int = 0
    """Blocks that migrated because their access counter reached the threshold."""


class EmulatorClock:
    def __init__(self, machine: EmulatedMachine, parameters: EmulatorParameters) -> None:
        self._machine, self._parameters = machine, parameters
        self.now = 0.0
        """The current modelled time, without costs whose figure is unknown (`unknown_figures`)."""
        self._to_device_free_at = self._to_host_free_at = 0.0
        self.traffic = MemoryTraffic()
        self.unknown_figures: set[str] = set()
        """Figures that were needed and are unknown for this machine."""

    @property
    def seconds(self) -> float | None:
        """Modelled seconds since creation; None once a cost with an unknown figure occurred."""
        return None if self.unknown_figures else self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock for another reason, such as computation; the link works concurrently."""
        self.now += seconds

    def wait_until(self, time_s: float) -> None:
        self.now = max(self.now, time_s)

    def wait_for_link(self) -> None:
        """Wait until the link is idle."""
        self.wait_until(max(self._to_device_free_at, self._to_host_free_at))

    def service_faults(self, pages: int) -> None:
        """Service the faults of this many pages."""
        if pages:
            batches = -(-pages // self._parameters.fault_batch_pages)
            self.traffic.faulted_pages += pages
            self.traffic.fault_batches += batches
            self.now += batches * self._parameters.fault_batch_s

    def transfer(self, to_device_bytes: int, to_host_bytes: int, not_before: float = 0.0) -> float:
        """Start transfers in both directions once the link is free, not before `not_before`; return their
        arrival time.
        """
        self.traffic.to_device_bytes += to_device_bytes
        self.traffic.to_host_bytes += to_host_bytes
        to_device_s = self._seconds_for(to_device_bytes, "to_device_bytes_s")
        to_host_s = self._seconds_for(to_host_bytes, "to_host_bytes_s")
        start_s, arrival_s = max(self.now, not_before), self.now
        # Duplex: each direction is a queue with its own end time, and an empty transfer leaves its queue unchanged.
        # Half duplex: one queue for both directions, so their times add up.
        if self._parameters.duplex:
            if to_device_bytes:
                self._to_device_free_at = max(start_s, self._to_device_free_at) + to_device_s
                arrival_s = max(arrival_s, self._to_device_free_at)
            if to_host_bytes:
                self._to_host_free_at = max(start_s, self._to_host_free_at) + to_host_s
                arrival_s = max(arrival_s, self._to_host_free_at)
        elif to_device_bytes or to_host_bytes:
            arrival_s = max(start_s, self._to_device_free_at) + to_device_s + to_host_s
            self._to_device_free_at = self._to_host_free_at = arrival_s
        return arrival_s

    def use_memory(self, nbytes: int, by_gpu: bool, write: bool) -> None:
        """A processor accesses its own memory."""
        if by_gpu:
            self.traffic.gpu_bytes += nbytes
            self.now += self._seconds_for(nbytes, "gpu_write_bytes_s" if write else "gpu_read_bytes_s")
        else:
            self.traffic.host_bytes += nbytes
            self.now += self._seconds_for(nbytes, "host_bytes_s")

    def _seconds_for(self, nbytes: int, figure: str) -> float:
        if not nbytes:
            return 0.0
        bandwidth: float | None = getattr(self._machine, figure)
        if bandwidth is None:
            self.unknown_figures.add(figure)
            return 0.0
        return nbytes / bandwidth

"""The modelled clock of the software superchip: bytes over bandwidths, and batches of faults. Nothing here is measured.

One operation's parts follow one another: it waits for pages that are still on their way, services its faults, crosses
the link, then uses memory at its own speed. Prefetches are asynchronous: the link works on while the clock stands, and
whoever needs the pages, or synchronizes, waits. A cost whose figure is not known makes the time unknown, not shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.memory.emulator.configuration import EmulatedMachine, EmulatorParameters


@dataclass(slots=True)
class MemoryTraffic:
    """What was moved and used, in bytes and counts: the figures that a plan is judged by."""

    to_device_bytes: int = 0
    """Over the link towards the GPU: migrations and remote accesses."""
    to_host_bytes: int = 0
    gpu_bytes: int = 0
    """Read or written by the GPU in its own memory."""
    host_bytes: int = 0
    remote_bytes: int = 0
    """Of the link's bytes, those that were used in place and not moved."""
    evicted_bytes: int = 0
    """Of the bytes to the host, those that pressure sent there."""
    faulted_pages: int = 0
    fault_batches: int = 0
    counter_migrations: int = 0
    """Blocks that followed their accesses."""


class EmulatorClock:
    def __init__(self, machine: EmulatedMachine, parameters: EmulatorParameters) -> None:
        self._machine, self._parameters = machine, parameters
        self._now = 0.0
        self._to_device_free_at = self._to_host_free_at = 0.0
        self.traffic = MemoryTraffic()
        self.unknown_figures: set[str] = set()
        """Figures that were needed and are not known for this machine."""

    @property
    def seconds(self) -> float | None:
        """Modelled seconds since the machine was made; None once a cost came in whose figure is not known."""
        return None if self.unknown_figures else self._now

    @property
    def now(self) -> float:
        """Where the clock stands; costs whose figure is not known are not in it (`unknown`)."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Time passes for another reason, such as computation; the link works on meanwhile."""
        self._now += seconds

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)

    def wait_for_link(self) -> None:
        """Wait until the link is idle."""
        self.wait_until(max(self._to_device_free_at, self._to_host_free_at))

    def service_faults(self, pages: int) -> None:
        """Service the faults of so many pages."""
        if pages:
            batches = -(-pages // self._parameters.fault_batch_pages)
            self.traffic.faulted_pages += pages
            self.traffic.fault_batches += batches
            self._now += batches * self._parameters.fault_batch_s

    def transfer(self, to_device_bytes: int, to_host_bytes: int, not_before: float = 0.0) -> float:
        """Begin to send bytes to the GPU and to the host as soon as the link is free, and not before `after`; when they
        will have arrived."""
        self.traffic.to_device_bytes += to_device_bytes
        self.traffic.to_host_bytes += to_host_bytes
        to_device_s = self._seconds_for(to_device_bytes, "to_device_bytes_s")
        to_host_s = self._seconds_for(to_host_bytes, "to_host_bytes_s")
        start_s = max(self._now, not_before)
        if self._parameters.duplex:
            self._to_device_free_at = (
                max(start_s, self._to_device_free_at) + to_device_s if to_device_bytes else self._to_device_free_at
            )
            self._to_host_free_at = (
                max(start_s, self._to_host_free_at) + to_host_s if to_host_bytes else self._to_host_free_at
            )
            return max(
                self._now,
                self._to_device_free_at if to_device_bytes else 0.0,
                self._to_host_free_at if to_host_bytes else 0.0,
            )
        if not to_device_bytes and not to_host_bytes:
            return self._now
        self._to_device_free_at = self._to_host_free_at = (
            max(start_s, self._to_device_free_at) + to_device_s + to_host_s
        )
        return self._to_device_free_at

    def use_gpu_memory(self, nbytes: int, write: bool) -> None:
        self.traffic.gpu_bytes += nbytes
        self._now += self._seconds_for(nbytes, "gpu_write_bytes_s" if write else "gpu_read_bytes_s")

    def use_host_memory(self, nbytes: int) -> None:
        self.traffic.host_bytes += nbytes
        self._now += self._seconds_for(nbytes, "host_bytes_s")

    def _seconds_for(self, nbytes: int, figure: str) -> float:
        if not nbytes:
            return 0.0
        bandwidth: float | None = getattr(self._machine, figure)
        if bandwidth is None:
            self.unknown_figures.add(figure)
            return 0.0
        return nbytes / bandwidth

"""The modelled clock of the software superchip: bytes over bandwidths, and batches of faults. Nothing here is measured.

One operation's parts follow one another: it waits for pages that are still on their way, services its faults, crosses
the link, then uses memory at its own speed. Prefetches are asynchronous: the link works on while the clock stands, and
whoever needs the pages, or synchronizes, waits. A cost whose figure is not known makes the time unknown, not shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from supertuner.memory.emulator.figures import Figures, Parameters


@dataclass(slots=True)
class Traffic:
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


class Clock:
    def __init__(self, figures: Figures, parameters: Parameters) -> None:
        self._figures, self._parameters = figures, parameters
        self._now = 0.0
        self._up_until = self._down_until = 0.0
        self.traffic = Traffic()
        self.unknown: set[str] = set()
        """Figures that were needed and are not known for this machine."""

    @property
    def seconds(self) -> float | None:
        """Modelled seconds since the machine was made; None once a cost came in whose figure is not known."""
        return None if self.unknown else self._now

    @property
    def now(self) -> float:
        """Where the clock stands; costs whose figure is not known are not in it (`unknown`)."""
        return self._now

    def spend(self, seconds: float) -> None:
        """Time passes for another reason, such as computation; the link works on meanwhile."""
        self._now += seconds

    def wait(self, until: float) -> None:
        self._now = max(self._now, until)

    def drain(self) -> None:
        """Wait until the link is idle."""
        self.wait(max(self._up_until, self._down_until))

    def fault(self, pages: int) -> None:
        """Service the faults of so many pages."""
        if pages:
            batches = -(-pages // self._parameters.fault_batch_pages)
            self.traffic.faulted_pages += pages
            self.traffic.fault_batches += batches
            self._now += batches * self._parameters.fault_batch_s

    def cross(self, up: int, down: int, after: float = 0.0) -> float:
        """Begin to send bytes to the GPU and to the host as soon as the link is free, and not before `after`; when they
        will have arrived."""
        self.traffic.to_device_bytes += up
        self.traffic.to_host_bytes += down
        up_s = self._cost(up, "to_device_bytes_s")
        down_s = self._cost(down, "to_host_bytes_s")
        begin = max(self._now, after)
        if self._parameters.duplex:
            self._up_until = max(begin, self._up_until) + up_s if up else self._up_until
            self._down_until = max(begin, self._down_until) + down_s if down else self._down_until
            return max(self._now, self._up_until if up else 0.0, self._down_until if down else 0.0)
        if not up and not down:
            return self._now
        self._up_until = self._down_until = max(begin, self._up_until) + up_s + down_s
        return self._up_until

    def use_gpu_memory(self, nbytes: int, write: bool) -> None:
        self.traffic.gpu_bytes += nbytes
        self._now += self._cost(nbytes, "gpu_write_bytes_s" if write else "gpu_read_bytes_s")

    def use_host_memory(self, nbytes: int) -> None:
        self.traffic.host_bytes += nbytes
        self._now += self._cost(nbytes, "host_bytes_s")

    def _cost(self, nbytes: int, figure: str) -> float:
        if not nbytes:
            return 0.0
        bandwidth: float | None = getattr(self._figures, figure)
        if bandwidth is None:
            self.unknown.add(figure)
            return 0.0
        return nbytes / bandwidth

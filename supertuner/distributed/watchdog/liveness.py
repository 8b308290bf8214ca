"""How the main thread of this process is: since when it gave no sign of life."""

from __future__ import annotations

import time

from supertuner.core import processes
from supertuner.distributed.watchdog.heartbeat import Heartbeat
from supertuner.distributed.watchdog.stack_location import StackLocation, current_location

MAX_BEAT_S = 1.0
"""More time between two beats was not spent here: this process was stopped itself, or its machine slept."""
BUSY_CPU_SHARE = 0.05
"""Of a CPU: a process that waits for ever takes less, with all that goes on beside it; one that works takes more."""
BUSY_BYTES_PER_S = 1 << 14
"""Read or written: a slow download is no hang."""


class LivenessMonitor:
    """Since when the main thread gave no sign of life. Time that this process was stopped itself does not count."""

    def __init__(self, heartbeat: Heartbeat, *, chunk_s: float) -> None:
        self._heartbeat, self._chunk_s = heartbeat, chunk_s
        self._last_beat_s, self._marks = time.monotonic(), -1
        self._chunk_elapsed_s = 0.0
        self._cpu, self._bytes = _cpu_seconds(), processes.process_io_bytes()
        self.idle_s = 0.0
        self.location = StackLocation()
        """At the last beat."""
        self.elapsed_s = 0.0
        """Of the last beat."""

    def beat(self) -> None:
        now = time.monotonic()
        self.elapsed_s, self._last_beat_s = min(now - self._last_beat_s, MAX_BEAT_S), now
        before, self.location = self.location, current_location()
        self._chunk_elapsed_s += self.elapsed_s
        self.idle_s += self.elapsed_s
        if (
            before.waits_for_ranks and not self.location.waits_for_ranks
        ):  # what it waited for has come, however long that took
            self.idle_s = 0.0
        if self._heartbeat.marks != self._marks:
            self._marks, self.idle_s = self._heartbeat.marks, 0.0
        if self._chunk_elapsed_s >= self._chunk_s:
            if self._used_machine() and (self.location.outside_window or not self._heartbeat.in_window):
                self.idle_s = 0.0
            self._chunk_elapsed_s = 0.0

    def _used_machine(self) -> bool:
        """Whether this process took anything of the machine since this was last asked."""
        cpu, total_bytes = _cpu_seconds(), processes.process_io_bytes()
        used_cpu_s, moved_bytes = cpu - self._cpu, total_bytes - self._bytes
        self._cpu, self._bytes = cpu, total_bytes
        return (
            used_cpu_s > BUSY_CPU_SHARE * self._chunk_elapsed_s
            or moved_bytes > BUSY_BYTES_PER_S * self._chunk_elapsed_s
        )


def _cpu_seconds() -> float:
    return time.process_time() - time.thread_time()

"""How the main thread of this process is: since when it gave no sign of life."""

from __future__ import annotations

import time

from supertuner.core import processes
from supertuner.distributed.watchdog.heartbeat import Pulse
from supertuner.distributed.watchdog.stack_location import Whereabouts, whereabouts

LONGEST_BEAT_S = 1.0
"""More time between two beats was not spent here: this process was stopped itself, or its machine slept."""
BUSY_SHARE = 0.05
"""Of a CPU: a process that waits for ever takes less, with all that goes on beside it; one that works takes more."""
BUSY_BYTES_PER_S = 1 << 14
"""Read or written: a slow download is no hang."""


class Life:
    """Since when the main thread gave no sign of life. Time that this process was stopped itself does not count."""

    def __init__(self, pulse: Pulse, *, chunk_s: float) -> None:
        self._pulse, self._chunk_s = pulse, chunk_s
        self._beaten, self._marks = time.monotonic(), -1
        self._chunk = 0.0
        self._cpu, self._bytes = _cpu_seconds(), processes.bytes_moved()
        self.idle_s = 0.0
        self.at = Whereabouts()
        """At the last beat."""
        self.elapsed_s = 0.0
        """Of the last beat."""

    def beat(self) -> None:
        now = time.monotonic()
        self.elapsed_s, self._beaten = min(now - self._beaten, LONGEST_BEAT_S), now
        before, self.at = self.at, whereabouts()
        self._chunk += self.elapsed_s
        self.idle_s += self.elapsed_s
        if before.waits and not self.at.waits:  # what it waited for has come, however long that took
            self.idle_s = 0.0
        if self._pulse.marks != self._marks:
            self._marks, self.idle_s = self._pulse.marks, 0.0
        if self._chunk >= self._chunk_s:
            if self._works() and (self.at.apart or not self._pulse.in_pass):
                self.idle_s = 0.0
            self._chunk = 0.0

    def _works(self) -> bool:
        """Whether this process took anything of the machine since this was last asked."""
        cpu, moved = _cpu_seconds(), processes.bytes_moved()
        took, read = cpu - self._cpu, moved - self._bytes
        self._cpu, self._bytes = cpu, moved
        return took > BUSY_SHARE * self._chunk or read > BUSY_BYTES_PER_S * self._chunk


def _cpu_seconds() -> float:
    return time.process_time() - time.thread_time()

"""How the main thread of this process is: since when it gave no sign of life, where it is, and whether it waits."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from supertuner.core import processes
from supertuner.train.many.broken import COLLECTIVES
from supertuner.train.many.pulse import Pulse

LONGEST_BEAT_S = 1.0
"""More time between two beats was not spent here: this process was stopped itself, or its machine slept."""
BUSY_SHARE = 0.05
"""Of a CPU: a process that waits for ever takes less, with all that goes on beside it; one that works takes more."""
BUSY_BYTES_PER_S = 1 << 14
"""Read or written: a slow download is no hang."""
OURS = str(Path(__file__).parents[2]) + os.sep


class Life:
    """Since when the main thread gave no sign of life. Time that this process was stopped itself does not count."""

    def __init__(self, pulse: Pulse, *, chunk_s: float) -> None:
        self._pulse, self._chunk_s = pulse, chunk_s
        self._at, self._marks = time.monotonic(), -1
        self._chunk = 0.0
        self._cpu, self._bytes = _cpu_seconds(), processes.bytes_moved()
        self.idle_s = 0.0
        self.elapsed_s = 0.0
        """Of the last beat."""

    def beat(self) -> None:
        now = time.monotonic()
        self.elapsed_s, self._at = min(now - self._at, LONGEST_BEAT_S), now
        self._chunk += self.elapsed_s
        self.idle_s += self.elapsed_s
        if self._pulse.marks != self._marks:
            self._marks, self.idle_s = self._pulse.marks, 0.0
        if self._chunk >= self._chunk_s:
            if self._works() and not self._pulse.in_pass:
                self.idle_s = 0.0
            self._chunk = 0.0

    def _works(self) -> bool:
        """Whether this process took anything of the machine since this was last asked."""
        cpu, moved = _cpu_seconds(), processes.bytes_moved()
        took, read = cpu - self._cpu, moved - self._bytes
        self._cpu, self._bytes = cpu, moved
        return took > BUSY_SHARE * self._chunk or read > BUSY_BYTES_PER_S * self._chunk


def main_thread() -> tuple[str, bool]:
    """Where in our code the main thread is, and whether it is inside a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where, waits = "", False
    while frame is not None and not where:
        name = frame.f_code.co_filename
        waits = waits or name.startswith(COLLECTIVES)
        if name.startswith(OURS):
            where = f"supertuner/{name.removeprefix(OURS)}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back
    return where, waits


def _cpu_seconds() -> float:
    return time.process_time() - time.thread_time()

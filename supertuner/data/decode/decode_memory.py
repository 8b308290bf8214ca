"""DecodeMemory: bounds the memory of samples that threads decode at the same time, by estimates made before decoding.

Large files decode to gigabytes: a 16-bit grey PNG of 169 megapixels needs 4 GiB for a moment, whatever the bucket's
size. One thread per CPU would need that many times as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock

from supertuner.core.host import HostFacts
from supertuner.core.types import GIB

AVAILABLE_SHARE = 4
"""One in this many bytes of the available memory may be used for decoding."""
UNKNOWN_HOST_BYTES = 4 * GIB
"""The limit if the available memory is unknown."""

RENDERED_BYTES_PER_PIXEL = 32
"""Of the bucket's size: the resized image, and its float32 copies while colours are changed."""
VIDEO_BYTES_PER_PIXEL = 96
"""Of one frame: 16 frames of 10-bit 4:2:0 that the codec may refer to, and copies of the current one."""
AUDIO_COPIES = 8
"""Of the bucket's size: the segment before and after mixing, resampling and padding."""


def decode_memory_limit(host: HostFacts, processes: int = 1, kept_bytes: int = 0) -> int:
    """Bytes that samples in decoding may use in each of `processes` processes of this host.

    `kept_bytes` are available now and will be used for something else.
    """
    available = host.memory_available()
    limit_bytes = UNKNOWN_HOST_BYTES if available is None else max(0, available - kept_bytes) // AVAILABLE_SHARE
    return limit_bytes // processes


@dataclass(eq=False, slots=True)
class _Waiter:
    nbytes: int
    admitted: Event = field(default_factory=Event)


class DecodeMemory:
    """Admits samples to decoding in the order of their requests, as long as their estimates fit into the limit.

    A sample that alone exceeds the limit is decoded alone. A thread holds at most one reservation, and waits for
    nothing else while it holds one, so every waiting thread is admitted in the end.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = Lock()
        self._used_bytes = 0
        self._waiters: deque[_Waiter] = deque()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` may be used, and hold them for the duration of the `with` block."""
        waiter = _Waiter(nbytes)
        with self._lock:
            self._waiters.append(waiter)
            self._admit_waiters()
        try:
            waiter.admitted.wait()
            yield
        finally:
            with self._lock:
                if waiter.admitted.is_set():
                    self._used_bytes -= nbytes
                else:  # an exception ended the wait
                    self._waiters.remove(waiter)
                self._admit_waiters()

    def _admit_waiters(self) -> None:
        """Admit the first waiters that fit. A later one does not overtake: a large sample would wait forever."""
        while self._waiters and self._fits(self._waiters[0].nbytes):
            waiter = self._waiters.popleft()
            self._used_bytes += waiter.nbytes
            waiter.admitted.set()

    def _fits(self, nbytes: int) -> bool:
        return self._used_bytes == 0 or self._used_bytes + nbytes <= self.limit_bytes

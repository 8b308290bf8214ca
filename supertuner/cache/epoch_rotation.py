"""Entries that each epoch has of its own: the next epoch's are made by a thread while this one's are used.

Which entries an epoch has is decided by whoever makes them; here is only when. Asking for an epoch waits until it is
there, so what comes out does not depend on how fast the thread is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from supertuner.core.events import Measured, Sink


class Closing(Protocol):
    def close(self) -> None: ...


Made = TypeVar("Made", bound=Closing)


class Rotation(Generic[Made]):
    """For one thread at a time; the maker's thread is its own."""

    def __init__(self, make: Callable[[int, Callable[[], bool]], Made], *, epochs: int | None, sink: Sink) -> None:
        """`make(epoch, stop)` makes an epoch's entries, and raises Stopped soon after `stop()` became true.

        `epochs` is how many there will be; None: no end is known.
        """
        self._make, self._epochs, self._sink = make, epochs, sink
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cache-epoch")
        self._begun: dict[int, Future[Made]] = {}
        self._floor = 0

    def at(self, epoch: int) -> Made | None:
        """An epoch's entries, waited for, and those of the next begun; None if the epoch was said to be over."""
        if epoch < self._floor:
            return None
        wanted = self._begin(epoch)
        if self._epochs is None or epoch + 1 < self._epochs:
            self._begin(epoch + 1)
        if not wanted.done():
            began = time.monotonic()
            wanted.exception()
            figures = {"epoch": epoch, "seconds": round(time.monotonic() - began, 3)}
            self._sink.emit(Measured("cache.waited_for_epoch", figures))
        return wanted.result()

    def over(self, epoch: int) -> None:
        """Epochs up to this one are not needed any more: their entries go."""
        self._floor = max(self._floor, epoch + 1)
        for old in [one for one in self._begun if one <= epoch and self._begun[one].done()]:
            self._drop(self._begun.pop(old))

    def close(self) -> None:
        """Stop making, and give up everything."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        while self._begun:
            self._drop(self._begun.popitem()[1])

    def _begin(self, epoch: int) -> Future[Made]:
        if epoch not in self._begun:
            self._begun[epoch] = self._pool.submit(self._make, epoch, self._stop.is_set)
        return self._begun[epoch]

    def _drop(self, future: Future[Made]) -> None:
        if not future.cancelled() and future.exception() is None:
            future.result().close()

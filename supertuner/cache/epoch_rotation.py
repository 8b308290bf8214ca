"""EpochRotation: builds the next epoch's entries on a background thread while the current epoch's are used.

It decides only when entries are built and released; the `make` function decides which entries an epoch has. `get_epoch`
waits until an epoch is complete, so results do not depend on the thread's speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from supertuner.core.events import MeasurementEvent, Sink
from supertuner.core.waiting import waiting_for_thread, working_on

EPOCH_TASK = "cache entries of an epoch"


class Closeable(Protocol):
    def close(self) -> None: ...


EpochT = TypeVar("EpochT", bound=Closeable)


class EpochRotation(Generic[EpochT]):
    """Use it from one thread at a time; `make` runs on the background thread."""

    def __init__(self, make: Callable[[int, Callable[[], bool]], EpochT], *, epochs: int | None, sink: Sink) -> None:
        """`make(epoch, stop)` builds an epoch's entries, and raises FillStopped soon after `stop()` is true.

        `epochs` is the number of epochs; None if it is unknown.
        """
        self._make, self._epochs, self._sink = make, epochs, sink
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cache-epoch")
        self._futures: dict[int, Future[EpochT]] = {}
        self._first_live_epoch = 0

    def get_epoch(self, epoch: int) -> EpochT | None:
        """Wait for an epoch's entries, and start to build the next epoch's. None if the epoch was released."""
        if epoch < self._first_live_epoch:
            return None
        future = self._submit_epoch(epoch)
        if self._epochs is None or epoch + 1 < self._epochs:
            self._submit_epoch(epoch + 1)
        if not future.done():
            began = time.monotonic()
            with waiting_for_thread(EPOCH_TASK):
                future.exception()
            figures = {"epoch": epoch, "seconds": round(time.monotonic() - began, 3)}
            self._sink.emit(MeasurementEvent("cache.waited_for_epoch", figures))
        return future.result()

    def release_through(self, epoch: int) -> None:
        """Close the entries of all epochs up to this one."""
        self._first_live_epoch = max(self._first_live_epoch, epoch + 1)
        for released in [key for key, future in self._futures.items() if key <= epoch and future.done()]:
            self._close_result(self._futures.pop(released))

    def close(self) -> None:
        """Stop the background build and close all entries."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        while self._futures:
            self._close_result(self._futures.popitem()[1])

    def _submit_epoch(self, epoch: int) -> Future[EpochT]:
        if epoch not in self._futures:
            self._futures[epoch] = self._pool.submit(self._make_epoch, epoch)
        return self._futures[epoch]

    def _make_epoch(self, epoch: int) -> EpochT:
        with working_on(EPOCH_TASK, for_other_ranks=True):  # ranks of a node make one epoch's entries together
            return self._make(epoch, self._stop.is_set)

    def _close_result(self, future: Future[EpochT]) -> None:
        if not future.cancelled() and future.exception() is None:
            future.result().close()

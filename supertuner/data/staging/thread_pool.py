"""Threads that share a list of chunks. The first error stops all of them and is raised where the crew was started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Generic, Protocol, TypeVar


class Worker(Protocol):
    def work(self, chunk: range) -> None: ...

    def finish(self) -> None:
        """Called once per worker, in its own thread, whatever happened."""


W = TypeVar("W", bound=Worker)


class Crew(Generic[W]):
    """`threads` workers, each made and used in a thread of its own."""

    def __init__(self, make: Callable[[], W], chunks: Sequence[range], threads: int) -> None:
        self._make = make
        self._chunks: Iterator[range] = iter(chunks)
        self._threads = max(1, min(threads, len(chunks)))
        self._lock = threading.Lock()
        self._stopped = False

    def run(self) -> list[W]:
        """All chunks done, or the first error. No thread is left either way."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="stage") as pool:
            try:
                futures = [pool.submit(self._run) for _ in range(self._threads)]
                return [future.result() for future in as_completed(futures)]
            finally:  # after an error or Ctrl-C: the pool's exit waits for threads that now end soon
                self._stopped = True

    def _next(self) -> range | None:
        with self._lock:
            return None if self._stopped else next(self._chunks, None)

    def _run(self) -> W:
        worker = self._make()
        try:
            while (chunk := self._next()) is not None:
                worker.work(chunk)
        finally:
            worker.finish()
        return worker


def chunked(sizes: Sequence[int], *, files: int, nbytes: int) -> list[range]:
    """Neighbouring items in chunks of at most `files` items and about `nbytes` bytes."""
    chunks: list[range] = []
    begin = total = 0
    for at, size in enumerate(sizes):
        if at > begin and (at - begin >= files or total + size > nbytes):
            chunks.append(range(begin, at))
            begin, total = at, 0
        total += size
    if begin < len(sizes):
        chunks.append(range(begin, len(sizes)))
    return chunks

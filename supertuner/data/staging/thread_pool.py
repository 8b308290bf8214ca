"""Threads that process a shared list of chunks. The first error stops all of them and is raised by `run`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Generic, Protocol, TypeVar


class ChunkWorker(Protocol):
    def process_chunk(self, chunk: range) -> None: ...

    def finish(self) -> None:
        """Called once per worker, in its thread, also after an error."""


WorkerT = TypeVar("WorkerT", bound=ChunkWorker)


class ChunkThreadPool(Generic[WorkerT]):
    """Runs `threads` workers, each created and used in a separate thread."""

    def __init__(self, create_worker: Callable[[], WorkerT], chunks: Sequence[range], threads: int) -> None:
        self._create_worker = create_worker
        self._chunks: Iterator[range] = iter(chunks)
        self._threads = max(1, min(threads, len(chunks)))
        self._lock = threading.Lock()
        self._stopped = False

    def run(self) -> list[WorkerT]:
        """Process all chunks and return the workers, or raise the first error. All threads have ended then."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="stage") as pool:
            try:
                futures = [pool.submit(self._run_worker) for _ in range(self._threads)]
                return [future.result() for future in as_completed(futures)]
            finally:  # after an error or Ctrl-C, threads end after their current chunk
                self._stopped = True

    def _next_chunk(self) -> range | None:
        with self._lock:
            return None if self._stopped else next(self._chunks, None)

    def _run_worker(self) -> WorkerT:
        worker = self._create_worker()
        try:
            while (chunk := self._next_chunk()) is not None:
                worker.process_chunk(chunk)
        finally:
            worker.finish()
        return worker


def split_chunks(sizes: Sequence[int], *, files: int, nbytes: int) -> list[range]:
    """Split items into consecutive chunks of at most `files` items and about `nbytes` bytes."""
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

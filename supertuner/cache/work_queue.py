"""EntryQueue: the missing entries of an arena as a shared queue; each entry is made by one process of the node.

The queue is a file. The process that builds the arena writes it, and every process that joins claims the next few
entries under the file's lock. No process waits for one that never joins. If a process that claimed entries fails or
dies, all others fail, too.
"""

from __future__ import annotations

import math
import os
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from supertuner.arena import locks
from supertuner.arena.folder import translate_os_errors
from supertuner.arena.node_peers import NodePeers
from supertuner.cache.entries import EntryIndices
from supertuner.core.bulk_io import write_all
from supertuner.core.closing import CloseOnExit, close_on_error
from supertuner.core.errors import CacheError
from supertuner.core.events import ProgressPhase
from supertuner.core.waiting import waiting_for_other_ranks

_HEADER = struct.Struct("<7q")
_PEER_CHECK_S = 1.0
"""Seconds between two checks of the peers while this process makes entries."""
_MAX_CHUNK = 32
_MIN_CHUNKS_PER_WORKER = 4
"""Each process could claim at least this many chunks from the remaining entries."""


@dataclass(slots=True)
class QueueState:
    """The file's header. Entries follow it as int64 indices."""

    total: int
    max_workers: int
    """How many processes may claim entries."""
    claimed: int = 0
    """How many entries are claimed."""
    active_workers: int = 0
    """Processes that may still claim or write entries. A process that is not counted has closed its writer."""
    was_abandoned: int = 0
    """1 once a process left before it had made all entries that it claimed."""
    entries_made: int = 0
    nbytes: int = 0
    """Bytes of the entries made."""


class EntryQueue(CloseOnExit):
    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name

    @classmethod
    def publish(cls, peers: NodePeers, arena: Path, to_make: EntryIndices) -> EntryQueue:
        """Create and publish the queue of the arena at this path, which this process builds."""
        assert peers.folder is not None
        name = f"queue-{uuid.uuid4().hex}"
        state = QueueState(len(to_make), peers.local_world_size)
        with translate_os_errors(peers.folder / name):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with close_on_error(cls(os.open(peers.folder / name, flags, 0o600), name)) as queue:
                write_all(queue._fd, _HEADER.pack(*astuple(state)) + to_make.astype("<i8").tobytes(), 0)
                peers.publish(_message_name(arena), name.encode())
        return queue

    @classmethod
    def join(cls, peers: NodePeers, arena: Path) -> EntryQueue | None:
        """Open the queue of the arena that another process of the node builds; None if there is none."""
        name = peers.read_published(_message_name(arena))
        if name is None or peers.folder is None:
            return None
        file = peers.folder / name.decode()
        with translate_os_errors(file):
            return cls(os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), name.decode())

    def claim_chunks(self) -> Iterator[EntryIndices]:
        """Claim chunks of entries for this process until all are claimed."""
        while True:
            with self._updating_state() as state:
                begin = state.claimed
                count = chunk_size(state.total - begin, state.max_workers)
                state.claimed += count
            if not count:
                return
            yield self._read_indices(begin, count)

    def add_progress(self, items: int, nbytes: int) -> None:
        with self._updating_state() as state:
            state.entries_made += items
            state.nbytes += nbytes

    def start_working(self) -> None:
        """Count this process as active. Call it before claiming."""
        with self._updating_state() as state:
            state.active_workers += 1

    def finish_working(self) -> None:
        """Call it when all claimed entries are committed and the writer is closed."""
        with self._updating_state() as state:
            state.active_workers -= 1

    def abandon(self, *, is_working: bool) -> None:
        """Leave before all claimed entries are made: no more can be claimed, and the builder publishes a new queue."""
        with self._updating_state() as state:
            state.active_workers -= is_working
            state.was_abandoned, state.claimed = 1, state.total

    def state(self) -> QueueState:
        with self._locked():
            return self._read_state()

    def unclaimed(self) -> EntryIndices:
        """Entries that no process has claimed yet."""
        state = self.state()
        return self._read_indices(state.claimed, state.total - state.claimed)

    def report_failure(self, peers: NodePeers, reason: str) -> None:
        """Make all processes that wait for entries of this one fail with `reason`."""
        peers.publish(f"{self._name} failed", reason.encode())

    def require_no_failure(self, peers: NodePeers) -> None:
        """Raise CacheError with the reason if another process failed, or PeerError if one has died."""
        reason = peers.read_published(f"{self._name} failed")
        if reason is not None:
            raise CacheError(reason.decode(errors="replace"))
        peers.check_peers()

    def close(self) -> None:
        os.close(self._fd)

    def _read_indices(self, begin: int, count: int) -> EntryIndices:
        content = os.pread(self._fd, 8 * count, _HEADER.size + 8 * begin)
        return np.frombuffer(content, "<i8").astype(np.intp)

    def _read_state(self) -> QueueState:
        return QueueState(*_HEADER.unpack(os.pread(self._fd, _HEADER.size, 0)))

    @contextmanager
    def _updating_state(self) -> Iterator[QueueState]:
        with self._locked():
            state = self._read_state()
            yield state
            write_all(self._fd, _HEADER.pack(*astuple(state)), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Without a limit: the kernel releases the lock of a process that has ended, and the watchdog ends a job of
        # which one rank is stopped, and names it.
        with waiting_for_other_ranks("the queue of cache entries"):
            locks.lock(self._fd, exclusive=True, wait_s=math.inf)
        try:
            yield
        finally:
            locks.unlock(self._fd)


class SharedPhase:
    """A progress phase that shows the entries of all processes of the node, and raises if one of them fails."""

    def __init__(self, queue: EntryQueue, phase: ProgressPhase, peers: NodePeers) -> None:
        self._queue, self._phase, self.peers = queue, phase, peers
        self._shown_items = self._shown_bytes = 0
        self._checked_at = time.monotonic()

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        if items:
            self._queue.add_progress(items, nbytes)
        state = self._queue.state()
        self._phase.advance(items=state.entries_made - self._shown_items, nbytes=state.nbytes - self._shown_bytes)
        self._shown_items, self._shown_bytes = state.entries_made, state.nbytes
        if state.was_abandoned or time.monotonic() - self._checked_at > _PEER_CHECK_S:
            self._queue.require_no_failure(self.peers)
            self._checked_at = time.monotonic()

    def check_and_advance(self) -> None:
        """Raise if a process failed or died; else update the display."""
        self._queue.require_no_failure(self.peers)
        self.advance()

    def __enter__(self) -> ProgressPhase:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def chunk_size(remaining: int, max_workers: int) -> int:
    """How many entries a process claims at once.

    Decoding ahead restarts with each chunk, so chunks should be large. Towards the end they shrink to one entry, so
    that no process waits for more than the one entry that another is making.
    """
    return min(remaining, _MAX_CHUNK, max(1, remaining // (_MIN_CHUNKS_PER_WORKER * max_workers)))


def _message_name(arena: Path) -> str:
    return f"queue of {arena}"

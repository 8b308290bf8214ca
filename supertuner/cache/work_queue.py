"""Entries that are missing, as a list from which the processes of a node take: each entry is made by one of them.

The list is a file: whoever builds the arena writes it, and everybody who comes takes the next few places under its
lock. Nobody waits for a process that does not come; one that took places and failed or is gone ends the others too.
"""

from __future__ import annotations

import os
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from supertuner.arena import locks
from supertuner.arena.build import BuildParticipant
from supertuner.arena.folder import translate_os_errors
from supertuner.arena.node_peers import POLL_S, NodePeers
from supertuner.cache.fill import CacheFiller, EntryIndices, FillStopped
from supertuner.core.bulk_io import write_all
from supertuner.core.errors import CacheError, PeerError
from supertuner.core.events import ProgressPhase

_HEADER = struct.Struct("<7q")
_PEER_CHECK_S = 1.0
"""Between two looks at the others while entries are made."""
_LOCK_TIMEOUT_S = 60.0
_MAX_CHUNK = 32
_MIN_CHUNKS_PER_WORKER = 4
"""How often each process takes from what is left, at least."""


@dataclass(slots=True)
class QueueState:
    total: int
    max_workers: int
    """How many processes may take."""
    taken: int = 0
    active_workers: int = 0
    """Processes that take and make; one that is none of them has closed its writer."""
    was_abandoned: int = 0
    """1 once a process left before it had made what it took."""
    entries_made: int = 0
    nbytes: int = 0
    """Of those that are made."""


class EntryQueue:
    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name

    @classmethod
    def publish(cls, peers: NodePeers, arena: Path, to_make: EntryIndices) -> EntryQueue:
        """Publish the list for the arena at that place, which this process builds."""
        assert peers.folder is not None
        name = f"queue-{uuid.uuid4().hex}"
        state = QueueState(len(to_make), peers.local_world_size)
        with translate_os_errors(peers.folder / name):
            fd = os.open(peers.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            queue = cls(fd, name)
            try:
                write_all(fd, _HEADER.pack(*astuple(state)) + to_make.astype("<i8").tobytes(), 0)
                peers.publish(_message_name(arena), name.encode())
            except BaseException:
                queue.close()
                raise
        return queue

    @classmethod
    def join(cls, peers: NodePeers, arena: Path) -> EntryQueue | None:
        """The list of the arena that another process of the node builds; None if there is none."""
        name = peers.read_published(_message_name(arena))
        if name is None or peers.folder is None:
            return None
        file = peers.folder / name.decode()
        with translate_os_errors(file):
            return cls(os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), name.decode())

    def claim_chunks(self) -> Iterator[EntryIndices]:
        """Places that are ours alone, until all are taken."""
        while len(indices := self._claim_chunk()):
            yield indices

    def add_progress(self, items: int, nbytes: int) -> None:
        with self._updating_state() as state:
            state.entries_made += items
            state.nbytes += nbytes

    def start_working(self) -> None:
        """From here on we may take."""
        with self._updating_state() as state:
            state.active_workers += 1

    def finish_working(self) -> None:
        """What we took is in the arena, and our writer is closed."""
        with self._updating_state() as state:
            state.active_workers -= 1

    def abandon(self, *, is_working: bool) -> None:
        """We leave before all is made. Nothing more is to be taken: who builds lists anew what is missing then."""
        with self._updating_state() as state:
            state.active_workers -= is_working
            state.was_abandoned, state.taken = 1, state.total

    def state(self) -> QueueState:
        with self._locked():
            return self._read_state()

    def unclaimed(self) -> EntryIndices:
        """What nobody has taken yet."""
        state = self.state()
        content = os.pread(self._fd, 8 * (state.total - state.taken), _HEADER.size + 8 * state.taken)
        return np.frombuffer(content, "<i8").astype(np.intp)

    def report_failure(self, peers: NodePeers, reason: str) -> None:
        """Tell all that wait for entries which we took that they will not come."""
        peers.publish(f"{self._name} failed", reason.encode())

    def require_no_failure(self, peers: NodePeers) -> None:
        """Raise what ended another process's making; PeerError if one is gone."""
        reason = peers.read_published(f"{self._name} failed")
        if reason is not None:
            raise CacheError(reason.decode(errors="replace"))
        peers.check_peers()

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> EntryQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _claim_chunk(self) -> EntryIndices:
        with self._updating_state() as state:
            begin = state.taken
            count = chunk_size(state.total - begin, state.max_workers)
            state.taken += count
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
        if not locks.lock(self._fd, exclusive=True, wait_s=_LOCK_TIMEOUT_S):
            raise CacheError(
                f"another process of this node holds {self._name} for {_LOCK_TIMEOUT_S:g} s; it may be stopped"
            )
        try:
            yield
        finally:
            locks.unlock(self._fd)


class SharedPhase:
    """A phase that shows what all processes of the node made, and ends with the error of one that failed."""

    def __init__(self, queue: EntryQueue, phase: ProgressPhase, peers: NodePeers) -> None:
        self._queue, self._phase, self._peers = queue, phase, peers
        self._shown_items = self._shown_bytes = 0
        self._checked_at = time.monotonic()

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        if items:
            self._queue.add_progress(items, nbytes)
        state = self._queue.state()
        self._phase.advance(items=state.entries_made - self._shown_items, nbytes=state.nbytes - self._shown_bytes)
        self._shown_items, self._shown_bytes = state.entries_made, state.nbytes
        if state.was_abandoned or time.monotonic() - self._checked_at > _PEER_CHECK_S:
            self._queue.require_no_failure(self._peers)
            self._checked_at = time.monotonic()

    def __enter__(self) -> ProgressPhase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def fill_from_queue(
    queue: EntryQueue,
    filler: CacheFiller,
    build: BuildParticipant,
    phase: ProgressPhase,
    stop: Callable[[], bool],
    peers: NodePeers,
) -> bool:
    """Make entries until all are taken, and wait for those that others took; whether all are in the arena now."""
    shared_phase = SharedPhase(queue, phase, peers)
    is_working = True
    queue.start_working()
    try:
        filler.write_entries(build, queue.claim_chunks(), shared_phase, stop)
        queue.finish_working()
        is_working = False
        return _wait_for_others(queue, shared_phase, stop, peers)
    except BaseException as error:
        if not isinstance(error, FillStopped | PeerError):
            queue.report_failure(peers, str(error) or type(error).__name__)
        queue.abandon(is_working=is_working)
        raise


def _wait_for_others(queue: EntryQueue, phase: ProgressPhase, stop: Callable[[], bool], peers: NodePeers) -> bool:
    while (state := queue.state()).active_workers:
        if stop():
            raise FillStopped
        queue.require_no_failure(peers)
        phase.advance()
        time.sleep(POLL_S)
    queue.require_no_failure(peers)
    phase.advance()
    return not state.was_abandoned


def chunk_size(remaining: int, max_workers: int) -> int:
    """How many are taken together. Decoding begins anew with each chunk, so there are not too few; towards the end
    there is one: nobody waits for more than what another is just making."""
    return min(remaining, _MAX_CHUNK, max(1, remaining // (_MIN_CHUNKS_PER_WORKER * max_workers)))


def _message_name(arena: Path) -> str:
    return f"queue of {arena}"

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
from supertuner.arena.build import Joined
from supertuner.arena.files import naming
from supertuner.arena.peers import POLL_S, Peers
from supertuner.cache.fill import Filling, Places, Stopped
from supertuner.core.bulk_io import write_all
from supertuner.core.errors import CacheError, PeerError
from supertuner.core.events import Phase

_HEAD = struct.Struct("<7q")
_LOOK_S = 1.0
"""Between two looks at the others while entries are made."""
_LOCK_S = 60.0
_MOST_AT_ONCE = 32
_TURNS = 4
"""How often each process takes from what is left, at least."""


@dataclass(slots=True)
class State:
    total: int
    sharers: int
    """How many processes may take."""
    taken: int = 0
    working: int = 0
    """Processes that take and make; one that is none of them has closed its writer."""
    left: int = 0
    """1 once a process left before it had made what it took."""
    made: int = 0
    nbytes: int = 0
    """Of those that are made."""


class Queue:
    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name

    @classmethod
    def begin(cls, peers: Peers, arena: Path, fresh: Places) -> Queue:
        """Publish the list for the arena at that place, which this process builds."""
        assert peers.folder is not None
        name = f"queue-{uuid.uuid4().hex}"
        state = State(len(fresh), peers.count)
        with naming(peers.folder / name):
            fd = os.open(peers.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            queue = cls(fd, name)
            try:
                write_all(fd, _HEAD.pack(*astuple(state)) + fresh.astype("<i8").tobytes(), 0)
                peers.tell(_word(arena), name.encode())
            except BaseException:
                queue.close()
                raise
        return queue

    @classmethod
    def join(cls, peers: Peers, arena: Path) -> Queue | None:
        """The list of the arena that another process of the node builds; None if there is none."""
        name = peers.told(_word(arena))
        if name is None or peers.folder is None:
            return None
        file = peers.folder / name.decode()
        with naming(file):
            return cls(os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), name.decode())

    def chunks(self) -> Iterator[Places]:
        """Places that are ours alone, until all are taken."""
        while len(places := self._take()):
            yield places

    def add_made(self, items: int, nbytes: int) -> None:
        with self._changing() as state:
            state.made += items
            state.nbytes += nbytes

    def enter(self) -> None:
        """From here on we may take."""
        with self._changing() as state:
            state.working += 1

    def leave(self) -> None:
        """What we took is in the arena, and our writer is closed."""
        with self._changing() as state:
            state.working -= 1

    def give_up(self, *, working: bool) -> None:
        """We leave before all is made. Nothing more is to be taken: who builds lists anew what is missing then."""
        with self._changing() as state:
            state.working -= working
            state.left, state.taken = 1, state.total

    def state(self) -> State:
        with self._locked():
            return self._read()

    def rest(self) -> Places:
        """What nobody has taken yet."""
        state = self.state()
        content = os.pread(self._fd, 8 * (state.total - state.taken), _HEAD.size + 8 * state.taken)
        return np.frombuffer(content, "<i8").astype(np.intp)

    def fail(self, peers: Peers, why: str) -> None:
        """Tell all that wait for entries which we took that they will not come."""
        peers.tell(f"{self._name} failed", why.encode())

    def require_no_failure(self, peers: Peers) -> None:
        """Raise what ended another process's making; PeerError if one is gone."""
        why = peers.told(f"{self._name} failed")
        if why is not None:
            raise CacheError(why.decode(errors="replace"))
        peers.look()

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> Places:
        with self._changing() as state:
            begin = state.taken
            count = at_once(state.total - begin, state.sharers)
            state.taken += count
        content = os.pread(self._fd, 8 * count, _HEAD.size + 8 * begin)
        return np.frombuffer(content, "<i8").astype(np.intp)

    def _read(self) -> State:
        return State(*_HEAD.unpack(os.pread(self._fd, _HEAD.size, 0)))

    @contextmanager
    def _changing(self) -> Iterator[State]:
        with self._locked():
            state = self._read()
            yield state
            write_all(self._fd, _HEAD.pack(*astuple(state)), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not locks.lock(self._fd, exclusive=True, wait_s=_LOCK_S):
            raise CacheError(f"another process of this node holds {self._name} for {_LOCK_S:g} s; it may be stopped")
        try:
            yield
        finally:
            locks.unlock(self._fd)


class Counted:
    """A phase that shows what all processes of the node made, and ends with the error of one that failed."""

    def __init__(self, queue: Queue, phase: Phase, peers: Peers) -> None:
        self._queue, self._phase, self._peers = queue, phase, peers
        self._items = self._nbytes = 0
        self._looked = time.monotonic()

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        if items:
            self._queue.add_made(items, nbytes)
        state = self._queue.state()
        self._phase.advance(items=state.made - self._items, nbytes=state.nbytes - self._nbytes)
        self._items, self._nbytes = state.made, state.nbytes
        if state.left or time.monotonic() - self._looked > _LOOK_S:
            self._queue.require_no_failure(self._peers)
            self._looked = time.monotonic()

    def __enter__(self) -> Phase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def work(queue: Queue, filling: Filling, build: Joined, phase: Phase, stop: Callable[[], bool], peers: Peers) -> bool:
    """Make entries until all are taken, and wait for those that others took; whether all are in the arena now."""
    shown = Counted(queue, phase, peers)
    working = True
    queue.enter()
    try:
        filling.write(build, queue.chunks(), shown, stop)
        queue.leave()
        working = False
        return _wait_for_others(queue, shown, stop, peers)
    except BaseException as error:
        if not isinstance(error, Stopped | PeerError):
            queue.fail(peers, str(error) or type(error).__name__)
        queue.give_up(working=working)
        raise


def _wait_for_others(queue: Queue, shown: Phase, stop: Callable[[], bool], peers: Peers) -> bool:
    while (state := queue.state()).working:
        if stop():
            raise Stopped
        queue.require_no_failure(peers)
        shown.advance()
        time.sleep(POLL_S)
    queue.require_no_failure(peers)
    shown.advance()
    return not state.left


def at_once(left: int, sharers: int) -> int:
    """How many are taken together. Decoding begins anew with each chunk, so there are not too few; towards the end
    there is one: nobody waits for more than what another is just making."""
    return min(left, _MOST_AT_ONCE, max(1, left // (_TURNS * sharers)))


def _word(arena: Path) -> str:
    return f"queue of {arena}"

"""The entries of one encoder in one folder: sealed arenas, one more whenever something is missing.

Arenas are named `latents-3f2a91c0-0`, `-1` … and are never changed. An arena in the making survives its builder:
whoever comes next goes on with what was committed. Several processes may fill one store: one builds, the others of its
run make entries too, each its own, and those of other runs wait.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.build import Build, Joined
from supertuner.arena.peers import ALONE, Peers
from supertuner.arena.reader import Reader
from supertuner.cache.capacity import Place
from supertuner.cache.entries import MISSING, Entries, Refs
from supertuner.cache.fill import Filling, Places, Stopped, Wanted, never
from supertuner.cache.keys import FORMAT, Keys, Space, text, unique
from supertuner.cache.work_queue import Queue, work
from supertuner.core.errors import ArenaBusy, ArenaDamaged, ArenaExists, ArenaMissing
from supertuner.core.events import Progress, Sink, Warned
from supertuner.core.host import Host

_WAIT_S = 0.5


class Store:
    def __init__(
        self,
        place: Place,
        space: Space,
        sink: Sink,
        *,
        name: str | None = None,
        arenas: Sequence[str] | None = None,
    ) -> None:
        """Open what is there. `name` is what its arenas are called, if not as the space says; `arenas` opens just
        these, in that order: what another process found in them is where it was."""
        self.place, self.space, self._sink = place, space, sink
        self.name = name or space.name
        self.entries = Entries(remedy=place.remedy)
        self._numbers: dict[int, bool] = {}
        """Arenas that were looked at: whether they are shown, or are damaged."""
        self.made = 0
        """Entries that were made here since it was opened."""
        if arenas is None:
            place.home.sweep()
            self.refresh()
        else:
            with ExitStack() as opened:
                opened.callback(self.close)
                for one in arenas:
                    self._show(_number(one), place.home.attach(one, verify=place.verify))
                opened.pop_all()

    @property
    def arenas(self) -> list[str]:
        """Those that are shown, in the order that refs count them in."""
        return [self._arena(number) for number, shown in self._numbers.items() if shown]

    def refresh(self) -> None:
        """Show arenas that were sealed since. A damaged one is left out, which is told; its entries are missing."""
        for number in self._listed():
            if number not in self._numbers:
                self._attach(number)

    def find(self, keys: Keys) -> Refs:
        return self.entries.find(keys)

    def missing(self, keys: Keys) -> NDArray[np.intp]:
        """Places of keys that have no entry; of equal keys the first."""
        each, places = unique(keys)
        absent: NDArray[np.intp] = places[self.find(each) == MISSING]
        return absent

    def fill(
        self,
        wanted: Wanted,
        *,
        host: Host,
        progress: Progress,
        stop: Callable[[], bool] = never,
        peers: Peers = ALONE,
    ) -> int:
        """Make what is missing; how many entries were made, by this process and its peers.

        Ends with all of them there, with CacheError where they cannot be, or with Stopped. What was committed before an
        error, a kill or a stop is never made again. Peers that fill the same store at the same time share the work: a
        failure of one ends all of them.
        """
        made = 0
        while len(self.missing(wanted.keys)):
            build = self._build(progress, stop, peers)
            if build is None:
                continue
            with build:
                if isinstance(build, Build):
                    self.refresh()  # others may have sealed something while we came here
                    made += self._make(build, wanted, host, progress, stop, peers)
                else:
                    made += self._help(build, wanted, host, progress, stop, peers)
        self.made += made
        return made

    def help(self, wanted: Callable[[], Wanted], *, host: Host, progress: Progress, peers: Peers) -> bool:
        """Make some of what a peer is filling this store with now; False: there is nothing to be taken.

        `wanted` is called only if there is: it may be large.
        """
        joined = self._join(peers)
        if joined is None:
            return False
        with joined:
            self.made += self._help(joined, wanted(), host, progress, never, peers)
        return True

    def remove_unfinished(self) -> None:
        """Remove what a stopped `fill` left behind; nothing if another process goes on with it."""
        for number in self._listed():
            if number not in self._numbers:
                try:
                    self.place.home.remove(self._arena(number))
                except (ArenaBusy, ArenaMissing):
                    continue  # in use, or gone already

    def close(self) -> None:
        self.entries.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _arena(self, number: int) -> str:
        return f"{self.name}-{number}"

    def _listed(self) -> list[int]:
        pattern = re.compile(rf"{re.escape(self.name)}-([0-9]{{1,9}})")
        found = (pattern.fullmatch(name) for name in os.listdir(self.place.home.path))
        return sorted(int(match[1]) for match in found if match)

    def _attach(self, number: int) -> None:
        try:
            self._show(number, self.place.home.attach(self._arena(number), verify=self.place.verify))
        except (ArenaMissing, ArenaBusy):
            return  # not sealed yet, or just being removed
        except ArenaDamaged as error:
            self._numbers[number] = False
            message = f"{error.file}: {error.what}; its entries are made again, and `supertuner cache prune` removes it"
            self._sink.emit(Warned(f"cache of {self.space.what}", message))

    def _show(self, number: int, reader: Reader) -> None:
        self.entries.add(reader)
        self._numbers[number] = True
        if self.place.attached is not None:
            self.place.attached(*reader.memory)

    def _build(self, progress: Progress, stop: Callable[[], bool], peers: Peers) -> Build | Joined | None:
        """A build of the next arena, or of the one that a dead builder left, or a part in that of a peer; None: look
        again what is missing."""
        try:
            return self._try_build(0.0)
        except ArenaBusy:
            waiting = f"waiting for another process: encoding {self.space.what}"
        if (joined := self._join(peers)) is not None:
            return joined
        with progress.phase(waiting) as phase:
            while not stop():
                phase.advance()
                peers.look()
                try:
                    return self._try_build(_WAIT_S)
                except ArenaBusy:
                    if (joined := self._join(peers)) is not None:
                        return joined
        raise Stopped

    def _join(self, peers: Peers) -> Joined | None:
        """A part in what a peer builds; None: nobody of this run does, or nothing is left to be taken."""
        name = self._arena(max(self._listed(), default=-1))
        queue = Queue.join(peers, self.place.home.path / name)
        if queue is None:
            return None
        with queue:
            queue.require_no_failure(peers)
            state = queue.state()
        if state.taken >= state.total:
            return None
        try:
            return self.place.home.join(name)
        except (ArenaMissing, ArenaBusy):
            return None  # sealed, or left by its builder, since we looked

    def _try_build(self, wait_s: float) -> Build | None:
        last = max(self._listed(), default=-1)
        number = last if last >= 0 and last not in self._numbers else last + 1
        try:
            return self.place.home.build(self._arena(number), life=self.place.life, wait_s=wait_s, resume=True)
        except ArenaExists:
            self.refresh()
        return None

    def _make(
        self,
        build: Build,
        wanted: Wanted,
        host: Host,
        progress: Progress,
        stop: Callable[[], bool],
        peers: Peers,
    ) -> int:
        committed, places = build.committed(), self.missing(wanted.keys)
        fresh = np.array([place for place in places if text(wanted.keys[place]) not in committed], np.intp)
        if not len(fresh) and not committed:
            build.abandon()
            return 0
        with progress.phase(self._title(wanted), items=len(places), noun="entries") as phase:
            phase.advance(items=len(places) - len(fresh))
            filling = self._filling(wanted, fresh, host)
            if peers.count == 1:
                filling.write(build, [fresh] if len(fresh) else [], phase, stop)
            else:
                with Queue.begin(peers, self.place.home.path / build.name, fresh) as queue:
                    if not work(queue, filling, build, phase, stop, peers):
                        return filling.made  # a peer left; the build is kept, and gone on with
        build.seal(self._meta())
        self._attach(_number(build.name))
        return len(fresh)

    def _help(
        self,
        build: Joined,
        wanted: Wanted,
        host: Host,
        progress: Progress,
        stop: Callable[[], bool],
        peers: Peers,
    ) -> int:
        """Make some of what a peer's build is missing; who builds waits for the last and seals."""
        queue = Queue.join(peers, self.place.home.path / build.name)
        assert queue is not None, "who joined a build has seen its list"
        with queue, progress.phase(self._title(wanted), items=queue.state().total, noun="entries") as phase:
            work(queue, self._filling(wanted, queue.rest(), host), build, phase, stop, peers)
            return queue.state().made

    def _filling(self, wanted: Wanted, fresh: Places, host: Host) -> Filling:
        return Filling(self.space.what, wanted, wanted.size(fresh), len(fresh), self.place, host)

    def _title(self, wanted: Wanted) -> str:
        return wanted.title or f"encoding {self.space.what}"

    def _meta(self) -> dict[str, str | int]:
        space = self.space
        return {
            "holds": "cache",
            "version": FORMAT,
            "what": space.what,
            "identity": space.identity,
            "dtype": space.dtype,
        }


def _number(arena: str) -> int:
    return int(arena.rpartition("-")[2])

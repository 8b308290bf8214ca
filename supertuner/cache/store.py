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

from supertuner.arena.build import ArenaBuild, BuildParticipant
from supertuner.arena.node_peers import NO_PEERS, NodePeers
from supertuner.arena.reader import ArenaReader
from supertuner.cache.capacity import CacheLocation
from supertuner.cache.entries import MISSING_REF, CacheEntries, EntryRefs
from supertuner.cache.fill import CacheFiller, EntryIndices, EntryRequest, FillStopped, never_stop
from supertuner.cache.keys import CACHE_FORMAT_VERSION, CacheNamespace, EntryKeys, key_text, unique_keys
from supertuner.cache.work_queue import EntryQueue, fill_from_queue
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError, ArenaExistsError, ArenaMissingError
from supertuner.core.events import Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts

_WAIT_S = 0.5


class CacheStore:
    def __init__(
        self,
        location: CacheLocation,
        namespace: CacheNamespace,
        sink: Sink,
        *,
        name: str | None = None,
        arenas: Sequence[str] | None = None,
    ) -> None:
        """Open what is there. `name` is what its arenas are called, if not as the space says; `arenas` opens just
        these, in that order: what another process found in them is where it was."""
        self.location, self.namespace, self._sink = location, namespace, sink
        self.name = name or namespace.name
        self.entries = CacheEntries(remedy=location.damage_remedy)
        self._known_arenas: dict[int, bool] = {}
        """Arenas that were looked at: whether they are shown, or are damaged."""
        self.entries_made = 0
        """Entries that were made here since it was opened."""
        if arenas is None:
            location.home.sweep()
            self.refresh()
        else:
            with ExitStack() as stack:
                stack.callback(self.close)
                for arena in arenas:
                    self._add_arena(_arena_number(arena), location.home.attach(arena, verify=location.verify))
                stack.pop_all()

    @property
    def arenas(self) -> list[str]:
        """Those that are shown, in the order that refs count them in."""
        return [self._arena_name(number) for number, is_open in self._known_arenas.items() if is_open]

    def refresh(self) -> None:
        """Show arenas that were sealed since. A damaged one is left out, which is told; its entries are missing."""
        for number in self._arena_numbers():
            if number not in self._known_arenas:
                self._try_attach(number)

    def find(self, keys: EntryKeys) -> EntryRefs:
        return self.entries.find(keys)

    def missing_indices(self, keys: EntryKeys) -> NDArray[np.intp]:
        """Places of keys that have no entry; of equal keys the first."""
        distinct_keys, first_indices = unique_keys(keys)
        absent: NDArray[np.intp] = first_indices[self.find(distinct_keys) == MISSING_REF]
        return absent

    def fill(
        self,
        request: EntryRequest,
        *,
        host: HostFacts,
        progress: Progress,
        stop: Callable[[], bool] = never_stop,
        peers: NodePeers = NO_PEERS,
    ) -> int:
        """Make what is missing; how many entries were made, by this process and its peers.

        Ends with all of them there, with CacheError where they cannot be, or with Stopped. What was committed before an
        error, a kill or a stop is never made again. Peers that fill the same store at the same time share the work: a
        failure of one ends all of them.
        """
        entries_made = 0
        while len(self.missing_indices(request.keys)):
            build = self._acquire_build(progress, stop, peers)
            if build is None:
                continue
            with build:
                if isinstance(build, ArenaBuild):
                    self.refresh()  # others may have sealed something while we came here
                    entries_made += self._build_missing(build, request, host, progress, stop, peers)
                else:
                    entries_made += self._fill_joined(build, request, host, progress, stop, peers)
        self.entries_made += entries_made
        return entries_made

    def help_fill(
        self, create_request: Callable[[], EntryRequest], *, host: HostFacts, progress: Progress, peers: NodePeers
    ) -> bool:
        """Make some of what a peer is filling this store with now; False: there is nothing to be taken.

        `wanted` is called only if there is: it may be large.
        """
        joined = self._join_peer_build(peers)
        if joined is None:
            return False
        with joined:
            self.entries_made += self._fill_joined(joined, create_request(), host, progress, never_stop, peers)
        return True

    def remove_unfinished(self) -> None:
        """Remove what a stopped `fill` left behind; nothing if another process goes on with it."""
        for number in self._arena_numbers():
            if number not in self._known_arenas:
                try:
                    self.location.home.remove(self._arena_name(number))
                except (ArenaBusyError, ArenaMissingError):
                    continue  # in use, or gone already

    def close(self) -> None:
        self.entries.close()

    def __enter__(self) -> CacheStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _arena_name(self, number: int) -> str:
        return f"{self.name}-{number}"

    def _arena_numbers(self) -> list[int]:
        pattern = re.compile(rf"{re.escape(self.name)}-([0-9]{{1,9}})")
        matches = (pattern.fullmatch(name) for name in os.listdir(self.location.home.path))
        return sorted(int(match[1]) for match in matches if match)

    def _try_attach(self, number: int) -> None:
        try:
            self._add_arena(number, self.location.home.attach(self._arena_name(number), verify=self.location.verify))
        except (ArenaMissingError, ArenaBusyError):
            return  # not sealed yet, or just being removed
        except ArenaDamagedError as error:
            self._known_arenas[number] = False
            message = f"{error.file}: {error.description}; its entries are made again, and `supertuner cache prune` removes it"
            self._sink.emit(WarningEvent(f"cache of {self.namespace.kind}", message))

    def _add_arena(self, number: int, reader: ArenaReader) -> None:
        self.entries.add_reader(reader)
        self._known_arenas[number] = True
        if self.location.on_attach is not None:
            self.location.on_attach(*reader.memory_range)

    def _acquire_build(
        self, progress: Progress, stop: Callable[[], bool], peers: NodePeers
    ) -> ArenaBuild | BuildParticipant | None:
        """A build of the next arena, or of the one that a dead builder left, or a part in that of a peer; None: look
        again what is missing."""
        try:
            return self._try_build(0.0)
        except ArenaBusyError:
            waiting = f"waiting for another process: encoding {self.namespace.kind}"
        if (joined := self._join_peer_build(peers)) is not None:
            return joined
        with progress.phase(waiting) as phase:
            while not stop():
                phase.advance()
                peers.check_peers()
                try:
                    return self._try_build(_WAIT_S)
                except ArenaBusyError:
                    if (joined := self._join_peer_build(peers)) is not None:
                        return joined
        raise FillStopped

    def _join_peer_build(self, peers: NodePeers) -> BuildParticipant | None:
        """A part in what a peer builds; None: nobody of this run does, or nothing is left to be taken."""
        name = self._arena_name(max(self._arena_numbers(), default=-1))
        queue = EntryQueue.join(peers, self.location.home.path / name)
        if queue is None:
            return None
        with queue:
            queue.require_no_failure(peers)
            state = queue.state()
        if state.taken >= state.total:
            return None
        try:
            return self.location.home.join(name)
        except (ArenaMissingError, ArenaBusyError):
            return None  # sealed, or left by its builder, since we looked

    def _try_build(self, wait_s: float) -> ArenaBuild | None:
        last = max(self._arena_numbers(), default=-1)
        number = last if last >= 0 and last not in self._known_arenas else last + 1
        try:
            return self.location.home.build(
                self._arena_name(number), life=self.location.life, wait_s=wait_s, resume=True
            )
        except ArenaExistsError:
            self.refresh()
        return None

    def _build_missing(
        self,
        build: ArenaBuild,
        request: EntryRequest,
        host: HostFacts,
        progress: Progress,
        stop: Callable[[], bool],
        peers: NodePeers,
    ) -> int:
        committed, missing = build.committed_keys(), self.missing_indices(request.keys)
        to_make = np.array([index for index in missing if key_text(request.keys[index]) not in committed], np.intp)
        if not len(to_make) and not committed:
            build.abandon()
            return 0
        with progress.phase(self._title(request), items=len(missing), noun="entries") as phase:
            phase.advance(items=len(missing) - len(to_make))
            filler = self._create_filler(request, to_make, host)
            if peers.local_world_size == 1:
                filler.write_entries(build, [to_make] if len(to_make) else [], phase, stop)
            else:
                with EntryQueue.publish(peers, self.location.home.path / build.name, to_make) as queue:
                    if not fill_from_queue(queue, filler, build, phase, stop, peers):
                        return filler.entries_made  # a peer left; the build is kept, and gone on with
        build.seal(self._meta())
        self._try_attach(_arena_number(build.name))
        return len(to_make)

    def _fill_joined(
        self,
        build: BuildParticipant,
        request: EntryRequest,
        host: HostFacts,
        progress: Progress,
        stop: Callable[[], bool],
        peers: NodePeers,
    ) -> int:
        """Make some of what a peer's build is missing; who builds waits for the last and seals."""
        queue = EntryQueue.join(peers, self.location.home.path / build.name)
        assert queue is not None, "who joined a build has seen its list"
        with queue, progress.phase(self._title(request), items=queue.state().total, noun="entries") as phase:
            fill_from_queue(queue, self._create_filler(request, queue.unclaimed(), host), build, phase, stop, peers)
            return queue.state().entries_made

    def _create_filler(self, request: EntryRequest, to_make: EntryIndices, host: HostFacts) -> CacheFiller:
        return CacheFiller(
            self.namespace.kind, request, request.relative_size(to_make), len(to_make), self.location, host
        )

    def _title(self, request: EntryRequest) -> str:
        return request.title or f"encoding {self.namespace.kind}"

    def _meta(self) -> dict[str, str | int]:
        space = self.namespace
        return {
            "holds": "cache",
            "version": CACHE_FORMAT_VERSION,
            "what": space.kind,
            "identity": space.encoder_fingerprint,
            "dtype": space.dtype,
        }


def _arena_number(arena: str) -> int:
    return int(arena.rpartition("-")[2])

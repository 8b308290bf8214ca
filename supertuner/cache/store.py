"""CacheStore: one encoder's entries in one folder, in sealed arenas; missing entries are made and sealed in a new one.

Arenas are named `latents-3f2a91c0-0`, `-1` … and never change once sealed. If the process that builds an arena dies,
the next one continues with the entries that were committed. Several processes may fill the same store: one builds the
arena, the other processes of its run make entries for it, each a different part, and processes of other runs wait.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.build import ArenaBuild, BuildParticipant
from supertuner.arena.node_peers import NO_PEERS, POLL_S, NodePeers
from supertuner.arena.reader import ArenaReader
from supertuner.arena.run_context import RunContext
from supertuner.arena.writer import SegmentWriter
from supertuner.cache.entries import MISSING_REF, CacheEntries, EntryIndices, EntryRefs, EntryRequest, NamedTensors
from supertuner.cache.keys import CACHE_FORMAT_VERSION, CacheNamespace, EntryKeys, key_text, unique_keys
from supertuner.cache.location import CacheLocation, entry_bytes, free_bytes, no_room_message
from supertuner.cache.work_queue import EntryQueue, SharedPhase
from supertuner.core.closing import CloseOnExit, close_on_error
from supertuner.core.errors import (
    ArenaBusyError,
    ArenaDamagedError,
    ArenaExistsError,
    ArenaFullError,
    ArenaMissingError,
    CacheError,
    PeerError,
)
from supertuner.core.events import ProgressPhase, WarningEvent
from supertuner.core.waiting import waiting_for_other_ranks

_WAIT_S = 0.5


class FillStopped(Exception):
    """`fill` ended early because `stop()` became true. Committed entries remain for the next call."""


StopCheck: TypeAlias = Callable[[], bool]


def never_stop() -> bool:
    return False


class CacheStore(CloseOnExit):
    def __init__(
        self,
        location: CacheLocation,
        namespace: CacheNamespace,
        context: RunContext,
        *,
        name: str | None = None,
        arenas: Sequence[str] | None = None,
    ) -> None:
        """Open all sealed arenas of the namespace at `location`.

        `name` replaces the namespace's name as prefix of the arenas' names. `arenas` opens exactly these arenas, in
        this order, so that refs of another process that opened the same ones are valid here.
        """
        self.location, self.namespace, self.context = location, namespace, context
        self.name = name or namespace.name
        self.entries = CacheEntries(remedy=location.damage_remedy)
        self._known_arenas: dict[int, bool] = {}
        """Number of every arena that was examined → whether it is open (False: damaged)."""
        self.entries_made = 0
        """Entries that this store has made since it was opened."""
        if arenas is None:
            location.home.sweep()
            self.refresh()
        else:
            with close_on_error(self):
                for arena in arenas:
                    self._add_arena(_arena_number(arena), location.home.attach(arena, verify=location.verify))

    @property
    def arenas(self) -> list[str]:
        """Names of the open arenas, in the order of their reader indices in refs."""
        return [self._arena_name(number) for number, is_open in self._known_arenas.items() if is_open]

    def refresh(self) -> None:
        """Open arenas that were sealed since the last call. A damaged one is skipped with a warning; its entries count
        as missing."""
        for number in self._arena_numbers():
            if number not in self._known_arenas:
                self._try_attach(number)

    def find(self, keys: EntryKeys) -> EntryRefs:
        """The ref of each key's entry, or MISSING_REF."""
        return self.entries.find(keys)

    def missing_indices(self, keys: EntryKeys) -> NDArray[np.intp]:
        """Indices of keys that have no entry; for equal keys only the first index."""
        distinct_keys, first_indices = unique_keys(keys)
        absent: NDArray[np.intp] = first_indices[self.find(distinct_keys) == MISSING_REF]
        return absent

    def fill(self, request: EntryRequest, *, stop: StopCheck = never_stop, share_with_peers: bool = True) -> int:
        """Make all missing entries; returns how many were made by this process and its peers.

        Raises CacheError if they cannot be made, and FillStopped soon after `stop()` is true. Entries that were
        committed before an error, a kill or a stop are never made again. Peers that fill the same store at the same
        time share the work, and if one fails, all fail. Without `share_with_peers`, peers wait instead.
        """
        peers = self.context.peers if share_with_peers else NO_PEERS
        entries_made = 0
        while len(self.missing_indices(request.keys)):
            with waiting_for_other_ranks(f"another process that encodes {self.namespace.kind}"):
                build = self._acquire_build(stop, peers)
            if build is None:
                continue
            with build:
                if isinstance(build, ArenaBuild):
                    self.refresh()  # others may have sealed an arena while this process acquired the build
                    entries_made += self._build_missing(build, request, stop, peers)
                else:
                    entries_made += self._fill_joined(build, request, stop, peers)
        self.entries_made += entries_made
        return entries_made

    def help_fill(self, create_request: Callable[[], EntryRequest]) -> bool:
        """Make some of the entries that a peer is filling this store with; False if there is nothing to make now.

        `create_request` is called only if there is, because the request may be large.
        """
        peers = self.context.peers
        joined = self._join_peer_build(peers)
        if joined is None:
            return False
        with joined:
            self.entries_made += self._fill_joined(joined, create_request(), never_stop, peers)
        return True

    def remove_unfinished(self) -> None:
        """Remove the arena that a stopped `fill` left unfinished, unless another process continues it."""
        for number in self._arena_numbers():
            if number not in self._known_arenas:
                with suppress(ArenaBusyError, ArenaMissingError):  # in use, or removed already
                    self.location.home.remove(self._arena_name(number))

    def close(self) -> None:
        self.entries.close()

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
            return  # not sealed yet, or being removed
        except ArenaDamagedError as error:
            self._known_arenas[number] = False
            outcome = "the entries of this arena are made again, and `supertuner cache prune` removes it"
            message = f"{error.file}: {error.description}; {outcome}"
            self.context.sink.emit(WarningEvent(f"cache of {self.namespace.kind}", message))

    def _add_arena(self, number: int, reader: ArenaReader) -> None:
        self.entries.add_reader(reader)
        self._known_arenas[number] = True
        if self.location.on_attach is not None:
            self.location.on_attach(*reader.memory_range)

    def _acquire_build(self, stop: StopCheck, peers: NodePeers) -> ArenaBuild | BuildParticipant | None:
        """A build of the next arena or of one that a dead process left unfinished, or participation in a peer's build.

        None if an arena was sealed meanwhile: the caller checks again which entries are missing.
        """
        with suppress(ArenaBusyError):  # then wait for the other process
            return self._build_or_join(0.0, peers)
        with self.context.progress.phase(f"waiting for another process: encoding {self.namespace.kind}") as phase:
            while not stop():
                phase.advance()
                peers.check_peers()
                with suppress(ArenaBusyError):  # it is still building
                    return self._build_or_join(_WAIT_S, peers)
        raise FillStopped

    def _join_peer_build(self, peers: NodePeers) -> BuildParticipant | None:
        """Participation in a peer's build; None if no peer builds, or if all its entries are claimed already."""
        name = self._arena_name(max(self._arena_numbers(), default=-1))
        queue = EntryQueue.join(peers, self.location.home.path / name)
        if queue is None:
            return None
        with queue:
            queue.require_no_failure(peers)
            state = queue.state()
        if state.claimed >= state.total:
            return None
        try:
            return self.location.home.join(name)
        except (ArenaMissingError, ArenaBusyError):
            return None  # sealed or abandoned in the meantime

    def _build_or_join(self, wait_s: float, peers: NodePeers) -> ArenaBuild | BuildParticipant | None:
        """`_acquire_build` without waiting for its end. Raises ArenaBusyError if a process that is no peer builds."""
        last = max(self._arena_numbers(), default=-1)
        name = self._arena_name(last if last >= 0 and last not in self._known_arenas else last + 1)
        try:
            return self.location.home.build(name, life=self.location.life, wait_s=wait_s, resume=True)
        except ArenaExistsError:
            self.refresh()
            return None
        except ArenaBusyError:
            if (joined := self._join_peer_build(peers)) is None:
                raise
            return joined

    def _build_missing(self, build: ArenaBuild, request: EntryRequest, stop: StopCheck, peers: NodePeers) -> int:
        """Fill this process's own build and seal it; returns how many entries were made."""
        committed, missing = build.committed_keys(), self.missing_indices(request.keys)
        to_make = np.array([index for index in missing if key_text(request.keys[index]) not in committed], np.intp)
        if not len(to_make) and not committed:
            build.abandon()
            return 0
        with self._encoding_phase(request, len(missing)) as phase:
            phase.advance(items=len(missing) - len(to_make))
            writer = _EntryWriter(self, request, to_make)
            if peers.local_world_size == 1:
                writer.write_entries(build, [to_make] if len(to_make) else [], phase, stop)
            else:
                with EntryQueue.publish(peers, self.location.home.path / build.name, to_make) as queue:
                    if not _fill_from_queue(queue, writer, build, SharedPhase(queue, phase, peers), stop):
                        return writer.entries_made  # a peer stopped early; the next iteration continues this build
        build.seal(self._meta())
        self._try_attach(_arena_number(build.name))
        return len(to_make)

    def _fill_joined(self, build: BuildParticipant, request: EntryRequest, stop: StopCheck, peers: NodePeers) -> int:
        """Make entries for a peer's build. The peer waits for all participants and seals the arena."""
        queue = EntryQueue.join(peers, self.location.home.path / build.name)
        assert queue is not None, "a build can only be joined after its queue was published"
        with queue, self._encoding_phase(request, queue.state().total) as phase:
            writer = _EntryWriter(self, request, queue.unclaimed())
            _fill_from_queue(queue, writer, build, SharedPhase(queue, phase, peers), stop)
            return queue.state().entries_made

    def _encoding_phase(self, request: EntryRequest, entry_count: int) -> ProgressPhase:
        title = request.title or f"encoding {self.namespace.kind}"
        return self.context.progress.phase(title, items=entry_count, noun="entries")

    def _meta(self) -> dict[str, str | int]:
        namespace = self.namespace
        meta: dict[str, str | int] = {"holds": "cache", "version": CACHE_FORMAT_VERSION, "what": namespace.kind}
        return meta | {"identity": namespace.encoder_fingerprint, "dtype": namespace.dtype}


class _EntryWriter:
    """Makes entries of a request and commits each as one unit of the arena.

    After the first entry it knows about how large all are, and raises CacheError if they will not fit.
    """

    def __init__(self, store: CacheStore, request: EntryRequest, to_make: EntryIndices) -> None:
        """`to_make` are all entries that are still missing, including those that peers will make."""
        self._store, self._request = store, request
        self._remaining_size, self._entry_count = request.relative_size(to_make), len(to_make)
        self.entries_made = 0

    def write_entries(
        self, build: BuildParticipant, chunks: Iterable[EntryIndices], phase: ProgressPhase, stop: StopCheck
    ) -> None:
        """Make and commit all entries of all chunks. Opens a segment only if there is at least one chunk."""
        writer: SegmentWriter | None = None
        try:
            for indices in chunks:
                writer = writer or build.open_writer()
                made_before = self.entries_made
                with closing(self._request.make(indices)) as entries:
                    for index, entry in entries:
                        if stop():
                            raise FillStopped
                        phase.advance(items=1, nbytes=self._write_entry(writer, index, entry))
                made = self.entries_made - made_before
                assert made == len(indices), f"{made} of {len(indices)} entries were made"
        finally:
            if writer is not None:
                writer.close()

    def _write_entry(self, writer: SegmentWriter, index: int, entry: NamedTensors) -> int:
        location, host = self._store.location, self._store.context.host
        nbytes, size = entry_bytes(entry), self._request.relative_size(np.array([index], np.intp))
        needed_bytes = int(nbytes * self._remaining_size / size)
        if self.entries_made == 0 and needed_bytes > (free := free_bytes(location, host)):
            raise self._no_room(needed_bytes, free)
        try:
            with writer.begin(key_text(self._request.keys[index])) as unit:
                for field, tensor in entry.items():
                    unit.put(field, tensor.detach().contiguous())
        except ArenaFullError as error:
            raise self._no_room(needed_bytes, min(free_bytes(location, host), needed_bytes)) from error
        self._remaining_size -= size
        self.entries_made += 1
        return nbytes

    def _no_room(self, needed_bytes: int, available_bytes: int) -> CacheError:
        kind, remaining = self._store.namespace.kind, self._entry_count - self.entries_made
        return CacheError(no_room_message(kind, remaining, needed_bytes, available_bytes, self._store.location))


def _fill_from_queue(
    queue: EntryQueue, writer: _EntryWriter, build: BuildParticipant, phase: SharedPhase, stop: StopCheck
) -> bool:
    """Make entries until all are claimed, then wait for peers to finish theirs; whether all are committed now."""
    is_working = True
    queue.start_working()
    try:
        writer.write_entries(build, queue.claim_chunks(), phase, stop)
        queue.finish_working()
        is_working = False
        with waiting_for_other_ranks("cache entries that other processes are making"):
            while (state := queue.state()).active_workers:
                if stop():
                    raise FillStopped
                phase.check_and_advance()
                time.sleep(POLL_S)
        phase.check_and_advance()
        return not state.was_abandoned
    except BaseException as error:
        if not isinstance(error, FillStopped | PeerError):
            queue.report_failure(phase.peers, str(error) or type(error).__name__)
        queue.abandon(is_working=is_working)
        raise


def _arena_number(arena: str) -> int:
    return int(arena.rpartition("-")[2])

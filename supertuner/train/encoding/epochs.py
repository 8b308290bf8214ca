"""Entries of datasets that get new ones each epoch (`refresh_each_epoch`): which an epoch has, in arenas of its own."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.peers import ALONE, Peers
from supertuner.cache.capacity import Place
from supertuner.cache.entries import MISSING, Entries, Refs
from supertuner.cache.fill import Stopped, Wanted
from supertuner.cache.keys import Space
from supertuner.cache.store import Store
from supertuner.core.errors import ArenaBusy, ArenaMissing
from supertuner.core.events import Measured, Progress, Silence, Sink
from supertuner.core.host import Host
from supertuner.data.cache_policy import How
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.order import Draws
from supertuner.train.encoding.cache_plan import Needs
from supertuner.train.encoding.encoders import Encoders, LazyDecoders, media_maker, text_maker
from supertuner.train.encoding.media import draw_keys, job_sizes
from supertuner.train.encoding.text_inputs import told_of


@dataclass(frozen=True, eq=False, slots=True)
class Own:
    """Entries of one kind that an epoch has of its own."""

    store: Store
    begin: int
    refs: Refs
    """By position, from `begin` on; MISSING where a sample has its entry elsewhere."""

    def at(self, positions: NDArray[np.int64]) -> tuple[Entries, Refs]:
        """Where the entries of positions are; MISSING for those that were not foreseen."""
        places = positions - self.begin
        inside = (places >= 0) & (places < len(self.refs))
        return self.store.entries, np.where(inside, self.refs[np.where(inside, places, 0)], MISSING)


@dataclass(frozen=True, eq=False, slots=True)
class Epoch:
    media: Own | None
    text: Own | None

    def close(self) -> None:
        """Give the entries up; the last process to do so thereby removes them."""
        for own in (self.media, self.text):
            if own is not None:
                own.store.close()


@dataclass(frozen=True, eq=False, slots=True)
class EpochMaker:
    """Makes an epoch's own entries; called by a thread of its own."""

    needs: Needs
    media_place: Place | None
    text_place: Place | None
    """Where they are made; None if that kind is not cached."""
    decoders: LazyDecoders
    encoders: Encoders
    begin: int
    """The position at which the run begins or goes on."""
    until: int | None
    host: Host
    sink: Sink
    progress: Progress
    """For the epoch that the run waits for before it begins."""
    peers: Peers = ALONE
    """Those of this node that come to the same epoch at the same time make a part of it each."""

    def make(self, epoch: int, stop: Callable[[], bool]) -> Epoch:
        began = time.monotonic()
        order = self.needs.corpus.order
        first, end = order.epoch_begin(epoch), order.epoch_begin(epoch + 1)
        begin = max(first, self.begin)
        draws = order.slice(begin, max(begin, end if self.until is None else min(end, self.until)))
        progress = self.progress if first <= self.begin else Silence()
        media = self._media(epoch, begin, draws, stop, progress)
        try:
            text = self._text(epoch, begin, draws, stop, progress)
        except BaseException:
            Epoch(media, None).close()
            raise
        figures = {"epoch": epoch, "samples": len(draws), "seconds": round(time.monotonic() - began, 3)}
        self.sink.emit(Measured("cache.epoch", figures))
        return Epoch(media, text)

    def remove_leftovers(self, keep: Sequence[int]) -> None:
        """Remove what a killed run of the same settings began for epochs that are not needed now."""
        for place, space in ((self.media_place, self.needs.media_space), (self.text_place, self.needs.text_space)):
            if place is None:
                continue
            prefix = self._name(space, "")
            kept = tuple(f"{self._name(space, epoch)}-" for epoch in keep)
            for name in os.listdir(place.home.path):
                if name.startswith(prefix) and not name.startswith(kept):
                    try:
                        place.home.remove(name)
                    except (ArenaBusy, ArenaMissing):
                        continue  # another process uses it, or was faster

    def _media(self, epoch: int, begin: int, draws: Draws, stop: Callable[[], bool], progress: Progress) -> Own | None:
        corpus, space, place = self.needs.corpus, self.needs.media_space, self.media_place
        rows = self._rows(draws, [one.media for one in self.needs.treatments])
        if place is None or not len(rows):
            return None
        jobs = draws.take(rows)
        make = media_maker(corpus, jobs, self.decoders, self.encoders)
        title = f"encoding samples of epoch {epoch}"
        wanted = Wanted(draw_keys(corpus, jobs, space), make, job_sizes(corpus, jobs), title)
        return self._own(place, space, epoch, wanted, rows, begin, len(draws), stop, progress)

    def _text(self, epoch: int, begin: int, draws: Draws, stop: Callable[[], bool], progress: Progress) -> Own | None:
        corpus, space, place = self.needs.corpus, self.needs.text_space, self.text_place
        rows = self._rows(draws, [one.text for one in self.needs.treatments])
        if place is None or not len(rows):
            return None
        texts = told_of(corpus, draws.take(rows))
        keys = space.keys(text.content() for text in texts)
        wanted = Wanted(keys, text_maker(texts, self.encoders), title=f"encoding captions of epoch {epoch}")
        return self._own(place, space, epoch, wanted, rows, begin, len(draws), stop, progress)

    def _own(
        self,
        place: Place,
        space: Space,
        epoch: int,
        wanted: Wanted,
        rows: NDArray[np.intp],
        begin: int,
        count: int,
        stop: Callable[[], bool],
        progress: Progress,
    ) -> Own:
        store = Store(place, space, self.sink, name=self._name(space, epoch))
        try:
            store.fill(wanted, host=self.host, progress=progress, stop=stop, peers=self.peers)
        except BaseException as error:
            store.close()
            if isinstance(error, Stopped):
                store.remove_unfinished()
            raise
        refs = np.full(count, MISSING, np.int64)
        refs[rows] = store.find(wanted.keys)
        return Own(store, begin, refs)

    def _rows(self, draws: Draws, hows: Sequence[How]) -> NDArray[np.intp]:
        fresh = np.array([hows[group.dataset] is How.EACH_EPOCH for group in self.needs.corpus.order.groups])
        return np.flatnonzero(fresh[draws.group])

    def _name(self, space: Space, epoch: int | str) -> str:
        return f"{space.name}-{run_digest(self.needs.corpus)}-epoch{epoch}"


def run_digest(corpus: Corpus) -> str:
    """Eight digits that tell runs with other data, settings or seeds apart: their epochs are not each other's."""
    digest = hashlib.blake2b(str(corpus.seed).encode(), digest_size=4)
    for part in corpus.parts:
        digest.update(f"{part.samples.fingerprint} {part.settings.model_dump_json()}\n".encode())
    return digest.hexdigest()

"""Entries of datasets that get new ones each epoch (`refresh_each_epoch`): which an epoch has, in arenas of its own."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.node_peers import NO_PEERS, NodePeers
from supertuner.cache.capacity import CacheLocation
from supertuner.cache.entries import MISSING_REF, CacheEntries, EntryRefs
from supertuner.cache.fill import EntryRequest, FillStopped
from supertuner.cache.keys import CacheNamespace
from supertuner.cache.store import CacheStore
from supertuner.core.errors import ArenaBusyError, ArenaMissingError
from supertuner.core.events import MeasurementEvent, NullSink, Progress, Sink
from supertuner.core.host import HostFacts
from supertuner.data.cache_policy import CacheMode
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.train.encoding.cache_plan import CacheRequirements
from supertuner.train.encoding.encoders import LazyDecoderPool, LazyEncoders, media_entry_maker, text_entry_maker
from supertuner.train.encoding.media import media_keys, relative_job_sizes
from supertuner.train.encoding.text_inputs import text_inputs_for


@dataclass(frozen=True, eq=False, slots=True)
class EpochEntries:
    """Entries of one kind that an epoch has of its own."""

    store: CacheStore
    begin: int
    refs: EntryRefs
    """By position, from `begin` on; MISSING where a sample has its entry elsewhere."""

    def find(self, positions: NDArray[np.int64]) -> tuple[CacheEntries, EntryRefs]:
        """Where the entries of positions are; MISSING for those that were not foreseen."""
        offsets = positions - self.begin
        is_inside = (offsets >= 0) & (offsets < len(self.refs))
        return self.store.entries, np.where(is_inside, self.refs[np.where(is_inside, offsets, 0)], MISSING_REF)


@dataclass(frozen=True, eq=False, slots=True)
class EpochCaches:
    media: EpochEntries | None
    text: EpochEntries | None

    def close(self) -> None:
        """Give the entries up; the last process to do so thereby removes them."""
        for entries in (self.media, self.text):
            if entries is not None:
                entries.store.close()


@dataclass(frozen=True, eq=False, slots=True)
class EpochCacheBuilder:
    """Makes an epoch's own entries; called by a thread of its own."""

    requirements: CacheRequirements
    media_location: CacheLocation | None
    text_location: CacheLocation | None
    """Where they are made; None if that kind is not cached."""
    decoders: LazyDecoderPool
    encoders: LazyEncoders
    begin: int
    """The position at which the run begins or goes on."""
    until: int | None
    host: HostFacts
    sink: Sink
    progress: Progress
    """For the epoch that the run waits for before it begins."""
    peers: NodePeers = NO_PEERS
    """Those of this node that come to the same epoch at the same time make a part of it each."""

    def build(self, epoch: int, stop: Callable[[], bool]) -> EpochCaches:
        began = time.monotonic()
        order = self.requirements.corpus.order
        first, end = order.epoch_begin(epoch), order.epoch_begin(epoch + 1)
        begin = max(first, self.begin)
        draws = order.slice(begin, max(begin, end if self.until is None else min(end, self.until)))
        progress = self.progress if first <= self.begin else NullSink()
        media = self._build_media(epoch, begin, draws, stop, progress)
        try:
            text = self._build_text(epoch, begin, draws, stop, progress)
        except BaseException:
            EpochCaches(media, None).close()
            raise
        figures = {"epoch": epoch, "samples": len(draws), "seconds": round(time.monotonic() - began, 3)}
        self.sink.emit(MeasurementEvent("cache.epoch", figures))
        return EpochCaches(media, text)

    def remove_leftovers(self, keep: Sequence[int]) -> None:
        """Remove what a killed run of the same settings began for epochs that are not needed now."""
        for location, namespace in (
            (self.media_location, self.requirements.media_namespace),
            (self.text_location, self.requirements.text_namespace),
        ):
            if location is None:
                continue
            prefix = self._arena_name(namespace, "")
            kept_prefixes = tuple(f"{self._arena_name(namespace, epoch)}-" for epoch in keep)
            for name in os.listdir(location.home.path):
                if name.startswith(prefix) and not name.startswith(kept_prefixes):
                    try:
                        location.home.remove(name)
                    except (ArenaBusyError, ArenaMissingError):
                        continue  # another process uses it, or was faster

    def _build_media(
        self, epoch: int, begin: int, draws: SampleDraws, stop: Callable[[], bool], progress: Progress
    ) -> EpochEntries | None:
        corpus, namespace, location = self.requirements.corpus, self.requirements.media_namespace, self.media_location
        rows = self._refreshed_rows(draws, [policy.media_mode for policy in self.requirements.policies])
        if location is None or not len(rows):
            return None
        jobs = draws.take(rows)
        make = media_entry_maker(corpus, jobs, self.decoders, self.encoders)
        title = f"encoding samples of epoch {epoch}"
        request = EntryRequest(media_keys(corpus, jobs, namespace), make, relative_job_sizes(corpus, jobs), title)
        return self._build_entries(location, namespace, epoch, request, rows, begin, len(draws), stop, progress)

    def _build_text(
        self, epoch: int, begin: int, draws: SampleDraws, stop: Callable[[], bool], progress: Progress
    ) -> EpochEntries | None:
        corpus, namespace, location = self.requirements.corpus, self.requirements.text_namespace, self.text_location
        rows = self._refreshed_rows(draws, [policy.text_mode for policy in self.requirements.policies])
        if location is None or not len(rows):
            return None
        texts = text_inputs_for(corpus, draws.take(rows))
        keys = namespace.entry_keys(text.cache_key_bytes() for text in texts)
        request = EntryRequest(
            keys, text_entry_maker(texts, self.encoders), title=f"encoding captions of epoch {epoch}"
        )
        return self._build_entries(location, namespace, epoch, request, rows, begin, len(draws), stop, progress)

    def _build_entries(
        self,
        location: CacheLocation,
        namespace: CacheNamespace,
        epoch: int,
        request: EntryRequest,
        rows: NDArray[np.intp],
        begin: int,
        count: int,
        stop: Callable[[], bool],
        progress: Progress,
    ) -> EpochEntries:
        store = CacheStore(location, namespace, self.sink, name=self._arena_name(namespace, epoch))
        try:
            store.fill(request, host=self.host, progress=progress, stop=stop, peers=self.peers)
        except BaseException as error:
            store.close()
            if isinstance(error, FillStopped):
                store.remove_unfinished()
            raise
        refs = np.full(count, MISSING_REF, np.int64)
        refs[rows] = store.find(request.keys)
        return EpochEntries(store, begin, refs)

    def _refreshed_rows(self, draws: SampleDraws, modes: Sequence[CacheMode]) -> NDArray[np.intp]:
        is_refreshed = np.array(
            [modes[group.dataset_index] is CacheMode.EACH_EPOCH for group in self.requirements.corpus.order.groups]
        )
        return np.flatnonzero(is_refreshed[draws.group])

    def _arena_name(self, namespace: CacheNamespace, epoch: int | str) -> str:
        return f"{namespace.name}-{run_digest(self.requirements.corpus)}-epoch{epoch}"


def run_digest(corpus: Corpus) -> str:
    """Eight digits that tell runs with other data, settings or seeds apart: their epochs are not each other's."""
    digest = hashlib.blake2b(str(corpus.seed).encode(), digest_size=4)
    for dataset in corpus.datasets:
        digest.update(f"{dataset.samples.fingerprint} {dataset.settings.model_dump_json()}\n".encode())
    return digest.hexdigest()

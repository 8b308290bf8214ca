"""Caches of datasets with `refresh_each_epoch`: each epoch's entries are encoded into separate arenas."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.run_context import RunContext
from supertuner.cache.entries import MISSING_REF, CacheEntries, EntryRefs, EntryRequest
from supertuner.cache.keys import CacheNamespace
from supertuner.cache.location import CacheLocation
from supertuner.cache.store import CacheStore, FillStopped
from supertuner.core.errors import ArenaBusyError, ArenaMissingError
from supertuner.core.events import MeasurementEvent, NullSink
from supertuner.data.cache_policy import CacheMode
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.train.encoding import cache_plan as plans
from supertuner.train.encoding.encoders import LazyEncoders, text_inputs_for


@dataclass(frozen=True, eq=False, slots=True)
class EpochEntries:
    """One epoch's entries of one kind."""

    store: CacheStore
    begin: int
    refs: EntryRefs
    """By position minus `begin`; MISSING_REF where the sample's dataset is not refreshed each epoch."""

    def find(self, positions: NDArray[np.int64]) -> tuple[CacheEntries, EntryRefs]:
        """The entries and the refs of positions; MISSING_REF for positions that were not planned."""
        offsets = positions - self.begin
        is_inside = (offsets >= 0) & (offsets < len(self.refs))
        return self.store.entries, np.where(is_inside, self.refs[np.where(is_inside, offsets, 0)], MISSING_REF)


@dataclass(frozen=True, eq=False, slots=True)
class EpochCaches:
    """One epoch's own entries; None if no dataset refreshes entries of that kind."""

    media: EpochEntries | None
    text: EpochEntries | None

    def close(self) -> None:
        """Close the entries. The last process that closes them removes them."""
        for entries in (self.media, self.text):
            if entries is not None:
                entries.store.close()


@dataclass(frozen=True, eq=False, slots=True)
class EpochCacheBuilder:
    """Encodes an epoch's own entries; EpochRotation calls it on a background thread."""

    requirements: plans.CacheRequirements
    locations: dict[plans.CacheKind, CacheLocation | None]
    """Where entries of a kind are written; None if that kind is not cached."""
    encoders: LazyEncoders
    begin: int
    """The position at which the run begins or resumes."""
    until: int | None
    """The position at which the run ends; None if unknown."""
    context: RunContext
    """Its progress is shown only for the epoch that the run waits for before it begins. Peers that reach the same epoch
    at the same time encode a part of it each."""

    def build(self, epoch: int, stop: Callable[[], bool]) -> EpochCaches:
        began = time.monotonic()
        order = self.requirements.corpus.order
        first, end = order.epoch_begin(epoch), order.epoch_begin(epoch + 1)
        begin = max(first, self.begin)
        draws = order.slice(begin, max(begin, end if self.until is None else min(end, self.until)))
        media = self._build_kind("latents", epoch, draws, stop)
        try:
            text = self._build_kind("text", epoch, draws, stop)
        except BaseException:
            EpochCaches(media, None).close()
            raise
        figures = {"epoch": epoch, "samples": len(draws), "seconds": round(time.monotonic() - began, 3)}
        self.context.sink.emit(MeasurementEvent("cache.epoch", figures))
        return EpochCaches(media, text)

    def remove_leftovers(self, keep: Sequence[int]) -> None:
        """Remove arenas that a killed run with the same settings left for epochs other than `keep`."""
        for kind in plans.CACHE_KINDS:
            location, namespace = self.locations[kind], self.requirements.namespace(kind)
            if location is None:
                continue
            prefix = self._arena_name(namespace, "")
            kept_prefixes = tuple(f"{self._arena_name(namespace, epoch)}-" for epoch in keep)
            for name in os.listdir(location.home.path):
                if name.startswith(prefix) and not name.startswith(kept_prefixes):
                    try:
                        location.home.remove(name)
                    except (ArenaBusyError, ArenaMissingError):
                        continue  # another process uses it or has removed it

    def _build_kind(
        self, kind: plans.CacheKind, epoch: int, draws: SampleDraws, stop: Callable[[], bool]
    ) -> EpochEntries | None:
        location, namespace = self.locations[kind], self.requirements.namespace(kind)
        rows = self._refreshed_rows(kind, draws)
        if location is None or not len(rows):
            return None
        request, begin = self._request(kind, epoch, draws.take(rows)), int(draws.position[0])
        context = self.context if begin <= self.begin else replace(self.context, progress=NullSink())
        store = CacheStore(location, namespace, context, name=self._arena_name(namespace, epoch))
        try:
            store.fill(request, stop=stop)
        except BaseException as error:
            store.close()
            if isinstance(error, FillStopped):
                store.remove_unfinished()
            raise
        refs = np.full(len(draws), MISSING_REF, np.int64)
        refs[rows] = store.find(request.keys)
        return EpochEntries(store, begin, refs)

    def _request(self, kind: plans.CacheKind, epoch: int, jobs: SampleDraws) -> EntryRequest:
        corpus, namespace = self.requirements.corpus, self.requirements.namespace(kind)
        if kind == "latents":
            keys = plans.media_keys(corpus, jobs, namespace)
            return plans.media_request(self.encoders, jobs, keys, f"encoding samples of epoch {epoch}")
        texts = text_inputs_for(corpus, jobs)
        keys = namespace.entry_keys(text.cache_key_bytes() for text in texts)
        make = partial(self.encoders.make_texts, texts)
        return EntryRequest(keys, make, title=f"encoding captions of epoch {epoch}")

    def _refreshed_rows(self, kind: plans.CacheKind, draws: SampleDraws) -> NDArray[np.intp]:
        """Rows of `draws` whose dataset refreshes entries of a kind each epoch."""
        modes, groups = self.requirements.modes(kind), self.requirements.corpus.order.groups
        is_refreshed = np.array([modes[group.dataset_index] is CacheMode.EACH_EPOCH for group in groups])
        return np.flatnonzero(is_refreshed[draws.group])

    def _arena_name(self, namespace: CacheNamespace, epoch: int | str) -> str:
        return f"{namespace.name}-{run_digest(self.requirements.corpus)}-epoch{epoch}"


def run_digest(corpus: Corpus) -> str:
    """Eight hexadecimal digits; runs with different data, settings or seeds, and so different epochs, have others."""
    digest = hashlib.blake2b(str(corpus.seed).encode(), digest_size=4)
    for dataset in corpus.datasets:
        digest.update(f"{dataset.samples.fingerprint} {dataset.settings.model_dump_json()}\n".encode())
    return digest.hexdigest()

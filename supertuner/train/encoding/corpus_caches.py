"""Opening the caches of a corpus: what is missing is encoded where it is kept, and loaded where it is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome, default_home
from supertuner.arena.node_peers import NO_PEERS, NodePeers
from supertuner.arena.reader import ArenaReader
from supertuner.cache.capacity import CacheLocation
from supertuner.cache.entries import CacheEntries
from supertuner.cache.epoch_rotation import EpochRotation
from supertuner.cache.fill import EntryRequest
from supertuner.cache.keys import EntryKeys
from supertuner.cache.repair import copying_request, repair_entries
from supertuner.cache.store import CacheStore
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import DecisionEvent, MeasurementEvent, Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.data.cache_policy import CacheMode, cache_policy_warnings
from supertuner.data.corpus import Corpus
from supertuner.train.encoding.cache_dirs import CachePlacement, cache_placement
from supertuner.train.encoding.cache_plan import (
    CACHE_KINDS,
    CacheKind,
    CachePlan,
    CacheRequirements,
    build_cache_plan,
    cache_requirements,
    require_supported_buckets,
)
from supertuner.train.encoding.coordination import EncodingCoordinator, open_store_as_helper
from supertuner.train.encoding.encoders import EncodingSpec, LazyDecoderPool, LazyEncoders
from supertuner.train.encoding.entry_tables import EntryTables, map_tables
from supertuner.train.encoding.epochs import EpochCacheBuilder, EpochCaches, run_digest
from supertuner.train.encoding.plan_arena import map_plan as mapped_plan


@dataclass(frozen=True, eq=False, slots=True)
class CorpusCaches:
    """Everything that makes and opens the caches of one corpus."""

    config: RunConfig
    requirements: CacheRequirements
    plan: CachePlan | None
    """None once all caches are open."""
    encoders: LazyEncoders
    decoders: LazyDecoderPool
    run_folder: Path
    life: ArenaLifetime
    host: HostFacts
    sink: Sink
    progress: Progress
    on_attach: Callable[[int, int], None] | None = None
    coordinator: EncodingCoordinator | None = None
    """With the other processes of this node that open the same caches; None: there are none."""
    plan_reader: ArenaReader | None = None
    """The arena that the plan lies in, if it is shared."""

    def placement(self, kind: CacheKind) -> CachePlacement | None:
        """Where entries of a kind live; None if they are not cached."""
        cache = self.config.cache_config
        storage = cache.vae_cache_type if kind == "latents" else cache.text_cache_type
        return (
            None
            if storage == "none"
            else cache_placement(storage, self.config, self.run_folder, self.life, self.on_attach)
        )

    def keys(self, kind: CacheKind) -> EntryKeys:
        """Keys of all entries of a kind that are cached once."""
        return self._required_plan.keys(kind)

    def open(self, kind: CacheKind, *, check: bool = False, load: bool = True) -> CacheStore | None:
        """The store of all entries of a kind that are cached once, everything in it; None if the kind is not cached.

        The encoder is dropped afterwards, unless it is needed on the way. With `check`, entries that are there are
        checked too; without `load` they are left where they are kept.
        """
        placement = self.placement(kind)
        store = None if placement is None else self._open_store(kind, placement, check, load)
        if kind == "text" and self.coordinator is None:
            self._warn_truncated(self.encoders.truncated_captions)
        if not self.requirements.uses_mode(kind, CacheMode.EACH_EPOCH) and not self.requirements.uses_mode(
            kind, CacheMode.ON_THE_FLY
        ):
            self.encoders.release(kind)
            if kind == "latents":
                self.decoders.close()
        return store

    def build_tables(self, media: CacheStore | None, text: CacheStore | None) -> tuple[EntryTables, ArenaReader | None]:
        """Where batches find what these stores hold, and the arena that it lies in, if it is shared."""
        corpus = self.requirements.corpus
        if self.coordinator is None:
            entries = [CacheEntries() if store is None else store.entries for store in (media, text)]
            return EntryTables.build(corpus, self._required_plan, *entries), None
        tables_reader = self.coordinator.share_tables(self._required_plan, media, text)
        with closing_on_error(tables_reader):
            self._warn_truncated(self.coordinator.wait_until_opened(self.encoders.truncated_captions))
        assert self.plan_reader is not None
        self.plan_reader.close()  # nobody is still to come for it
        return map_tables(corpus, tables_reader), tables_reader

    def without_plan(self) -> CorpusCaches:
        """The same once all caches are open: the plan's memory is free then."""
        return replace(self, plan=None)

    @property
    def _required_plan(self) -> CachePlan:
        assert self.plan is not None, "the plan is gone"
        return self.plan

    def _warn_truncated(self, count: int) -> None:
        if count:
            message = f"{count} captions are longer than the model reads; their ends are left out"
            self.sink.emit(WarningEvent("captions", message))

    def _request(self, kind: CacheKind) -> EntryRequest:
        if kind == "latents":
            return self._required_plan.media_request(self.requirements.corpus, self.decoders, self.encoders)
        return self._required_plan.text_request(self.encoders)

    def open_epoch_rotation(self, begin: int, until: int | None) -> EpochRotation[EpochCaches] | None:
        """The entries of `refresh_each_epoch`, those of the first epoch made; None if no dataset asks for it."""
        if not any(self.requirements.uses_mode(kind, CacheMode.EACH_EPOCH) for kind in CACHE_KINDS):
            return None
        order = self.requirements.corpus.order
        builder = EpochCacheBuilder(
            requirements=self.requirements,
            media_location=_epoch_location(self.placement("latents")),
            text_location=_epoch_location(self.placement("text")),
            decoders=self.decoders,
            encoders=self.encoders,
            begin=begin,
            until=until,
            host=self.host,
            sink=self.sink,
            progress=self.progress,
            peers=self._peers,
        )
        first = order.epoch_at(begin)
        builder.remove_leftovers((first, first + 1))
        epochs = None if until is None else order.epoch_at(max(0, until - 1)) + 1
        rotation = EpochRotation(builder.build, epochs=epochs, sink=self.sink)
        try:
            rotation.get_epoch(first)
        except BaseException:
            rotation.close()
            raise
        return rotation

    @property
    def _peers(self) -> NodePeers:
        return NO_PEERS if self.coordinator is None else self.coordinator.peers

    def _open_store(self, kind: CacheKind, placement: CachePlacement, check: bool, load: bool) -> CacheStore:
        if self.coordinator is not None and not self._peers.is_first:
            assert load and not check, "caches are checked and built by one process"
            return open_store_as_helper(
                self.coordinator,
                self.requirements,
                kind,
                placement,
                partial(self._request, kind),
                host=self.host,
                sink=self.sink,
                progress=self.progress,
            )
        began, namespace, request = time.monotonic(), self.requirements.namespace(kind), self._request(kind)
        self.sink.emit(DecisionEvent(f"cache.{namespace.kind}", str(placement.primary.home.path), placement.reason))
        primary = CacheStore(placement.primary, namespace, self.sink)
        with closing_on_error(primary):
            if check:
                repair_entries(primary, request, host=self.host, progress=self.progress, sink=self.sink)
            primary.fill(request, host=self.host, progress=self.progress, peers=self._peers)
            store = self._load_working_copy(primary, placement, request) if load else primary
        with closing_on_error(store):
            figures = {
                "entries": len(request.keys),
                "made": primary.entries_made,
                "seconds": round(time.monotonic() - began, 3),
            }
            self.sink.emit(MeasurementEvent(f"cache.{namespace.kind}", figures))
            if self.coordinator is not None:
                self.coordinator.announce_store(kind, store)
        return store

    def _load_working_copy(self, primary: CacheStore, placement: CachePlacement, request: EntryRequest) -> CacheStore:
        if placement.working_copy is None:
            return primary
        working_copy = CacheStore(placement.working_copy, primary.namespace, self.sink)
        with closing_on_error(working_copy):
            copies = copying_request(primary, request, host=self.host, progress=self.progress, sink=self.sink)
            working_copy.fill(copies, host=self.host, progress=self.progress, peers=self._peers)
        primary.close()
        return working_copy


@contextmanager
def open_corpus_caches(
    config: RunConfig,
    corpus: Corpus,
    encoding: EncodingSpec,
    *,
    run_folder: Path,
    host: HostFacts,
    sink: Sink,
    progress: Progress,
    until: int | None = None,
    life: ArenaLifetime = "run",
    on_attach: Callable[[int, int], None] | None = None,
    peers: NodePeers = NO_PEERS,
) -> Iterator[CorpusCaches]:
    """What makes and opens a corpus's caches; leaving it ends its threads and frees the encoders.

    `life` is how long entries stay that are not persistent. `attached` is told the address and the bytes of entries in
    unified memory as they come into use.
    """
    require_supported_buckets(corpus, encoding.family, encoding.model)
    for warning in cache_policy_warnings([dataset.settings for dataset in corpus.datasets], config.cache_config):
        sink.emit(warning)
    requirements = cache_requirements(config, corpus, encoding.fingerprints, encoding.dtype)
    with ExitStack() as stack:
        coordinator, plan_reader = None, None
        if peers.local_world_size > 1:
            home, title = ArenaHome(config.arena.home or default_home()), f"{run_digest(corpus)} until {until}"
            coordinator = EncodingCoordinator(peers, home, title, progress)
            plan_reader = coordinator.share_plan(corpus, lambda: build_cache_plan(requirements, until))
            stack.callback(plan_reader.close)
        encoders = LazyEncoders(encoding)
        stack.callback(encoders.close)
        decoders = LazyDecoderPool(corpus, config.loader.num_workers or max(1, host.cpus() // peers.local_world_size))
        stack.callback(decoders.close)
        yield CorpusCaches(  # nobody here holds on to the plan, which is large
            config=config,
            requirements=requirements,
            plan=build_cache_plan(requirements, until) if plan_reader is None else mapped_plan(corpus, plan_reader),
            encoders=encoders,
            decoders=decoders,
            run_folder=run_folder,
            life=life,
            host=host,
            sink=sink,
            progress=progress,
            on_attach=on_attach,
            coordinator=coordinator,
            plan_reader=plan_reader,
        )


def _epoch_location(placement: CachePlacement | None) -> CacheLocation | None:
    """Entries of one epoch are nothing to keep."""
    return None if placement is None else replace(placement.working_copy or placement.primary, life="run")


@contextmanager
def closing_on_error(store: CacheStore | ArenaReader) -> Iterator[None]:
    try:
        yield
    except BaseException:
        store.close()
        raise

"""Opens the caches of a corpus: encodes missing entries, loads them where they are read from, and serves batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome, default_home
from supertuner.arena.reader import ArenaReader
from supertuner.arena.run_context import RunContext
from supertuner.cache.entries import CacheEntries, EntryRequest
from supertuner.cache.epoch_rotation import EpochRotation
from supertuner.cache.keys import EntryKeys
from supertuner.cache.location import CacheLocation, CachePlacement, cache_placement
from supertuner.cache.repair import copying_request, repair_entries
from supertuner.cache.store import CacheStore
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import DecisionEvent, MeasurementEvent, WarningEvent
from supertuner.data.cache_policy import CacheMode, cache_policy_warnings
from supertuner.data.corpus import Corpus
from supertuner.data.decode.decode_memory import decode_memory_limit
from supertuner.train.encoding import cache_plan as plans
from supertuner.train.encoding.cache_lookup import EncodedCorpus, EntryTables
from supertuner.train.encoding.encoders import EncodingSpec, LazyEncoders
from supertuner.train.encoding.epochs import EpochCacheBuilder, EpochCaches, run_digest
from supertuner.train.encoding.node_sharing import EncodingCoordinator, map_plan, map_tables


@contextmanager
def open_encoded_corpus(
    config: RunConfig,
    corpus: Corpus,
    encoding: EncodingSpec,
    context: RunContext,
    *,
    begin: int = 0,
    until: int | None = None,
    on_attach: Callable[[int, int], None] | None = None,
) -> Iterator[EncodedCorpus]:
    """Encode what is not cached yet and yield the corpus that serves batches; on exit, remove what ends with the run.

    Training starts or resumes at position `begin` and ends at `until`; samples that it never draws are not encoded. The
    context's peers encode together, each sample once; processes of other runs wait for them. The encoders are released
    before this yields, unless a dataset needs them during training. `on_attach` is called with the address and bytes of
    every arena in unified memory.
    """
    with ExitStack() as stack:
        opening = open_corpus_caches(config, corpus, encoding, context, until=until, on_attach=on_attach)
        caches = stack.enter_context(opening)
        entries = []
        for kind in plans.CACHE_KINDS:
            store = caches.open(kind)
            entries.append(CacheEntries() if store is None else store.entries)
            if store is not None:
                stack.callback(store.close)
        media, text = entries
        tables, tables_reader = caches.build_tables(media, text)
        if tables_reader is not None:
            stack.callback(tables_reader.close)
        caches = replace(caches, plan=None)  # frees the plan's memory
        if caches.requirements.encodes_in_training("latents"):
            caches.encoders.decoders()  # start the threads now, from this thread, not in the middle of a batch
        epochs = caches.open_epoch_rotation(begin, until)
        if epochs is not None:
            stack.callback(epochs.close)
        yield EncodedCorpus(caches.requirements, tables, media, text, epochs, caches.encoders)


@contextmanager
def open_corpus_caches(
    config: RunConfig,
    corpus: Corpus,
    encoding: EncodingSpec,
    context: RunContext,
    *,
    until: int | None = None,
    life: ArenaLifetime = "run",
    on_attach: Callable[[int, int], None] | None = None,
) -> Iterator[CorpusCaches]:
    """Plan a corpus's caches; on exit, end the threads and free the encoders.

    `life` is the lifetime of entries that are not persistent. See `open_encoded_corpus` for `until` and `on_attach`.
    """
    plans.require_supported_buckets(corpus, encoding.family, encoding.model)
    for warning in cache_policy_warnings([dataset.settings for dataset in corpus.datasets], config.cache_config):
        context.sink.emit(warning)
    requirements = plans.cache_requirements(config, corpus, encoding.fingerprints, encoding.dtype)
    local_world_size = context.peers.local_world_size
    with ExitStack() as stack:
        coordinator, plan_reader = None, None
        if local_world_size > 1:
            home, title = ArenaHome(config.arena.home or default_home()), f"{run_digest(corpus)} until {until}"
            coordinator = EncodingCoordinator(context, home, title)
            plan_reader = coordinator.share_plan(corpus, lambda: plans.build_cache_plan(requirements, until))
            stack.callback(plan_reader.close)
        threads = config.loader.num_workers or max(1, context.host.cpus() // local_world_size)
        encoders = LazyEncoders(encoding, corpus, threads, decode_memory_limit(context.host, local_world_size))
        stack.callback(encoders.close)
        yield CorpusCaches(  # no variable of this function refers to the plan, so that the caller can free it
            config=config,
            requirements=requirements,
            plan=plans.build_cache_plan(requirements, until) if plan_reader is None else map_plan(corpus, plan_reader),
            encoders=encoders,
            life=life,
            context=context,
            on_attach=on_attach,
            coordinator=coordinator,
            plan_reader=plan_reader,
        )


@dataclass(frozen=True, eq=False, slots=True)
class CorpusCaches:
    """Fills and opens the caches of one corpus."""

    config: RunConfig
    requirements: plans.CacheRequirements
    plan: plans.CachePlan | None
    """None once all caches are open."""
    encoders: LazyEncoders
    life: ArenaLifetime
    context: RunContext
    on_attach: Callable[[int, int], None] | None = None
    coordinator: EncodingCoordinator | None = None
    """Coordinates with other processes of this node that open the same caches; None if there are none."""
    plan_reader: ArenaReader | None = None
    """The arena that contains the plan, if the plan is shared."""

    def placement(self, kind: plans.CacheKind) -> CachePlacement | None:
        """Where entries of a kind are stored; None if they are not cached."""
        cache = self.config.cache_config
        storage = cache.vae_cache_type if kind == "latents" else cache.text_cache_type
        if storage == "none":
            return None
        return cache_placement(storage, self.config, self.context.run_dir, self.life, self.on_attach)

    def keys(self, kind: plans.CacheKind) -> EntryKeys:
        """Keys of all entries of a kind that are cached once."""
        return self._required_plan.keys(kind)

    def open(self, kind: plans.CacheKind, *, check: bool = False, load: bool = True) -> CacheStore | None:
        """Fill and open the store of all entries of a kind that are cached once; None if the kind is not cached.

        With `check`, existing entries are verified, too. Without `load`, entries stay where they are kept instead of
        being copied to memory. The encoder is released afterwards unless training needs it.
        """
        placement = self.placement(kind)
        store = None if placement is None else self._open_store(kind, placement, check, load)
        if kind == "text" and self.coordinator is None:
            self._warn_truncated(self.encoders.truncated_captions)
        if not self.requirements.encodes_in_training(kind):
            self.encoders.release(kind)
        return store

    def build_tables(self, media: CacheEntries, text: CacheEntries) -> tuple[EntryTables, ArenaReader | None]:
        """The lookup tables of these entries, and the arena that contains them if they are shared."""
        corpus = self.requirements.corpus
        if self.coordinator is None:
            return EntryTables.build(corpus, self._required_plan, media, text), None
        tables_reader = self.coordinator.share_tables(self._required_plan, media, text)
        with closing_on_error(tables_reader):
            self._warn_truncated(self.coordinator.wait_until_opened(self.encoders.truncated_captions))
        assert self.plan_reader is not None
        self.plan_reader.close()  # every process has mapped the plan
        return map_tables(corpus, tables_reader), tables_reader

    def open_epoch_rotation(self, begin: int, until: int | None) -> EpochRotation[EpochCaches] | None:
        """The entries of `refresh_each_epoch` datasets, with the first epoch's encoded; None without such datasets."""
        if not any(CacheMode.EACH_EPOCH in self.requirements.modes(kind) for kind in plans.CACHE_KINDS):
            return None
        order = self.requirements.corpus.order
        locations = {kind: _epoch_location(self.placement(kind)) for kind in plans.CACHE_KINDS}
        for kind, location in locations.items():
            if location is not None and CacheMode.EACH_EPOCH in self.requirements.modes(kind):
                reason = "refresh_each_epoch: encoded during the epoch before, and removed after their use"
                self.context.sink.emit(DecisionEvent(f"cache.{kind}.each_epoch", str(location.home.path), reason))
        builder = EpochCacheBuilder(self.requirements, locations, self.encoders, begin, until, self.context)
        first = order.epoch_at(begin)
        builder.remove_leftovers((first, first + 1))
        epochs = None if until is None else order.epoch_at(max(0, until - 1)) + 1
        rotation = EpochRotation(builder.build, epochs=epochs, sink=self.context.sink)
        with closing_on_error(rotation):
            rotation.get_epoch(first)
        return rotation

    @property
    def _required_plan(self) -> plans.CachePlan:
        assert self.plan is not None, "the plan was freed"
        return self.plan

    def _warn_truncated(self, count: int) -> None:
        if count:
            message = f"{count} captions are longer than the model's limit; their ends are cut off"
            self.context.sink.emit(WarningEvent("captions", message))

    def _open_store(self, kind: plans.CacheKind, placement: CachePlacement, check: bool, load: bool) -> CacheStore:
        if self.coordinator is not None and not self.context.peers.is_first:
            assert load and not check, "only a single process verifies caches or leaves them unloaded"
            create_request = partial(self._required_plan.request, kind, self.encoders)
            return self.coordinator.open_store_as_helper(self.requirements, kind, placement, create_request)
        began, namespace, sink = time.monotonic(), self.requirements.namespace(kind), self.context.sink
        request = self._required_plan.request(kind, self.encoders)
        if len(request.keys):
            sink.emit(DecisionEvent(f"cache.{namespace.kind}", str(placement.primary.home.path), placement.reason))
        primary = CacheStore(placement.primary, namespace, self.context)
        with closing_on_error(primary):
            if check:
                repair_entries(primary, request)
            primary.fill(request)
            store = self._load_working_copy(primary, placement, request) if load else primary
        with closing_on_error(store):
            seconds = round(time.monotonic() - began, 3)
            figures = {"entries": len(request.keys), "made": primary.entries_made, "seconds": seconds}
            sink.emit(MeasurementEvent(f"cache.{namespace.kind}", figures))
            if self.coordinator is not None:
                self.coordinator.announce_store(kind, store)
        return store

    def _load_working_copy(self, primary: CacheStore, placement: CachePlacement, request: EntryRequest) -> CacheStore:
        """Copy the entries to where they are read from and close `primary`; or return `primary` if that is there."""
        if placement.working_copy is None:
            return primary
        working_copy = CacheStore(placement.working_copy, primary.namespace, self.context)
        with closing_on_error(working_copy):
            working_copy.fill(copying_request(primary, request))
        primary.close()
        return working_copy


def _epoch_location(placement: CachePlacement | None) -> CacheLocation | None:
    """Where one epoch's entries are written: where entries are read from, and only until they are closed."""
    return None if placement is None else replace(placement.working_copy or placement.primary, life="run")


@contextmanager
def closing_on_error(resource: CacheStore | ArenaReader | EpochRotation[EpochCaches]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        resource.close()
        raise

"""Opening the caches of a corpus: what is missing is encoded where it is kept, and loaded where it is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from supertuner.arena.format import Life
from supertuner.arena.home import Home, default_home
from supertuner.arena.peers import ALONE, Peers
from supertuner.arena.reader import Reader
from supertuner.cache.capacity import Place
from supertuner.cache.entries import Entries
from supertuner.cache.epoch_rotation import Rotation
from supertuner.cache.fill import Wanted
from supertuner.cache.keys import Keys
from supertuner.cache.repair import loaded, mend
from supertuner.cache.store import Store
from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Decided, Measured, Progress, Sink, Warned
from supertuner.core.host import Host
from supertuner.data.cache_policy import How, doubts
from supertuner.data.corpus import Corpus
from supertuner.train.encoding.cache_dirs import Places, places
from supertuner.train.encoding.cache_plan import KINDS, Needs, Plan, What, needs_of, plan_of, require_buckets
from supertuner.train.encoding.coordination import Together, helped
from supertuner.train.encoding.encoders import Encoders, Encoding, LazyDecoders
from supertuner.train.encoding.epochs import Epoch, EpochMaker, run_digest
from supertuner.train.encoding.plan_arena import mapped as mapped_plan
from supertuner.train.encoding.tables import Tables, mapped


@dataclass(frozen=True, eq=False, slots=True)
class Caching:
    """Everything that makes and opens the caches of one corpus."""

    config: RunConfig
    needs: Needs
    plan: Plan | None
    """None once all caches are open."""
    encoders: Encoders
    decoders: LazyDecoders
    run_folder: Path
    life: Life
    host: Host
    sink: Sink
    progress: Progress
    attached: Callable[[int, int], None] | None = None
    together: Together | None = None
    """With the other processes of this node that open the same caches; None: there are none."""
    plan_held: Reader | None = None
    """The arena that the plan lies in, if it is shared."""

    def places(self, what: What) -> Places | None:
        """Where entries of a kind live; None if they are not cached."""
        cache = self.config.cache_config
        kind = cache.vae_cache_type if what == "latents" else cache.text_cache_type
        return None if kind == "none" else places(kind, self.config, self.run_folder, self.life, self.attached)

    def keys(self, what: What) -> Keys:
        """Keys of all entries of a kind that are cached once."""
        return self._planned.keys(what)

    def open(self, what: What, *, check: bool = False, load: bool = True) -> Store | None:
        """The store of all entries of a kind that are cached once, everything in it; None if the kind is not cached.

        The encoder is dropped afterwards, unless it is needed on the way. With `check`, entries that are there are
        checked too; without `load` they are left where they are kept.
        """
        where = self.places(what)
        store = None if where is None else self._open(what, where, check, load)
        if what == "text" and self.together is None:
            self._tell_cut(self.encoders.cut)
        if not self.needs.any_is(what, How.EACH_EPOCH) and not self.needs.any_is(what, How.AT_USE):
            self.encoders.drop(what)
            if what == "latents":
                self.decoders.close()
        return store

    def tables(self, media: Store | None, text: Store | None) -> tuple[Tables, Reader | None]:
        """Where batches find what these stores hold, and the arena that it lies in, if it is shared."""
        corpus = self.needs.corpus
        if self.together is None:
            entries = [Entries() if store is None else store.entries for store in (media, text)]
            return Tables.of(corpus, self._planned, *entries), None
        held = self.together.tables(self._planned, media, text)
        with _closed_on_error(held):
            self._tell_cut(self.together.arrived(self.encoders.cut))
        assert self.plan_held is not None
        self.plan_held.close()  # nobody is still to come for it
        return mapped(corpus, held), held

    def without_plan(self) -> Caching:
        """The same once all caches are open: the plan's memory is free then."""
        return replace(self, plan=None)

    @property
    def _planned(self) -> Plan:
        assert self.plan is not None, "the plan is gone"
        return self.plan

    def _tell_cut(self, count: int) -> None:
        if count:
            message = f"{count} captions are longer than the model reads; their ends are left out"
            self.sink.emit(Warned("captions", message))

    def _wanted(self, what: What) -> Wanted:
        if what == "latents":
            return self._planned.media_wanted(self.needs.corpus, self.decoders, self.encoders)
        return self._planned.text_wanted(self.encoders)

    def epochs(self, begin: int, until: int | None) -> Rotation[Epoch] | None:
        """The entries of `refresh_each_epoch`, those of the first epoch made; None if no dataset asks for it."""
        if not any(self.needs.any_is(what, How.EACH_EPOCH) for what in KINDS):
            return None
        order = self.needs.corpus.order
        maker = EpochMaker(
            needs=self.needs,
            media_place=_for_epochs(self.places("latents")),
            text_place=_for_epochs(self.places("text")),
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
        maker.remove_leftovers((first, first + 1))
        epochs = None if until is None else order.epoch_at(max(0, until - 1)) + 1
        rotation = Rotation(maker.make, epochs=epochs, sink=self.sink)
        try:
            rotation.at(first)
        except BaseException:
            rotation.close()
            raise
        return rotation

    @property
    def _peers(self) -> Peers:
        return ALONE if self.together is None else self.together.peers

    def _open(self, what: What, where: Places, check: bool, load: bool) -> Store:
        if self.together is not None and not self._peers.first:
            assert load and not check, "caches are checked and built by one process"
            return helped(
                self.together,
                self.needs,
                what,
                where,
                partial(self._wanted, what),
                host=self.host,
                sink=self.sink,
                progress=self.progress,
            )
        began, space, wanted = time.monotonic(), self.needs.space(what), self._wanted(what)
        self.sink.emit(Decided(f"cache.{space.what}", str(where.kept.home.path), where.why))
        kept = Store(where.kept, space, self.sink)
        with _closed_on_error(kept):
            if check:
                mend(kept, wanted, host=self.host, progress=self.progress, sink=self.sink)
            kept.fill(wanted, host=self.host, progress=self.progress, peers=self._peers)
            store = self._loaded(kept, where, wanted) if load else kept
        with _closed_on_error(store):
            figures = {"entries": len(wanted.keys), "made": kept.made, "seconds": round(time.monotonic() - began, 3)}
            self.sink.emit(Measured(f"cache.{space.what}", figures))
            if self.together is not None:
                self.together.tell_store(what, store)
        return store

    def _loaded(self, kept: Store, where: Places, wanted: Wanted) -> Store:
        if where.shared is None:
            return kept
        shared = Store(where.shared, kept.space, self.sink)
        with _closed_on_error(shared):
            copies = loaded(kept, wanted, host=self.host, progress=self.progress, sink=self.sink)
            shared.fill(copies, host=self.host, progress=self.progress, peers=self._peers)
        kept.close()
        return shared


@contextmanager
def open_caching(
    config: RunConfig,
    corpus: Corpus,
    encoding: Encoding,
    *,
    run_folder: Path,
    host: Host,
    sink: Sink,
    progress: Progress,
    until: int | None = None,
    life: Life = "run",
    attached: Callable[[int, int], None] | None = None,
    peers: Peers = ALONE,
) -> Iterator[Caching]:
    """What makes and opens a corpus's caches; leaving it ends its threads and frees the encoders.

    `life` is how long entries stay that are not persistent. `attached` is told the address and the bytes of entries in
    unified memory as they come into use.
    """
    require_buckets(corpus, encoding.family, encoding.model)
    for doubt in doubts([part.settings for part in corpus.parts], config.cache_config):
        sink.emit(doubt)
    needs = needs_of(config, corpus, encoding.identities, encoding.dtype)
    with ExitStack() as opened:
        together, held = None, None
        if peers.count > 1:
            home, title = Home(config.arena.home or default_home()), f"{run_digest(corpus)} until {until}"
            together = Together(peers, home, title, progress)
            held = together.plan(corpus, lambda: plan_of(needs, until))
            opened.callback(held.close)
        encoders = Encoders(encoding)
        opened.callback(encoders.close)
        decoders = LazyDecoders(corpus, config.loader.num_workers or max(1, host.cpus() // peers.count))
        opened.callback(decoders.close)
        yield Caching(  # nobody here holds on to the plan, which is large
            config=config,
            needs=needs,
            plan=plan_of(needs, until) if held is None else mapped_plan(corpus, held),
            encoders=encoders,
            decoders=decoders,
            run_folder=run_folder,
            life=life,
            host=host,
            sink=sink,
            progress=progress,
            attached=attached,
            together=together,
            plan_held=held,
        )


def _for_epochs(where: Places | None) -> Place | None:
    """Entries of one epoch are nothing to keep."""
    return None if where is None else replace(where.shared or where.kept, life="run")


@contextmanager
def _closed_on_error(store: Store | Reader) -> Iterator[None]:
    try:
        yield
    except BaseException:
        store.close()
        raise

"""Opening the caches of a corpus: what is missing is encoded where it is kept, and loaded where it is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from supertuner.arena.format import Life
from supertuner.arena.peers import ALONE, Peers
from supertuner.cache.filling import Wanted
from supertuner.cache.keys import Space
from supertuner.cache.mending import loaded, mend
from supertuner.cache.room import Place
from supertuner.cache.rotation import Rotation
from supertuner.cache.store import Store
from supertuner.config.tree import RunConfig
from supertuner.core.events import Decided, Measured, Progress, Sink, Warned
from supertuner.core.host import Host
from supertuner.data.corpus import Corpus
from supertuner.train.caching.encoders import Encoders, Encoding, LazyDecoders
from supertuner.train.caching.epochs import Epoch, EpochMaker
from supertuner.train.caching.needs import KINDS, Needs, What, needs_of, require_buckets
from supertuner.train.caching.places import Places, places
from supertuner.train.caching.treatment import How, doubts


@dataclass(frozen=True, eq=False, slots=True)
class Caching:
    """Everything that makes and opens the caches of one corpus."""

    config: RunConfig
    needs: Needs
    encoders: Encoders
    decoders: LazyDecoders
    run_folder: Path
    life: Life
    host: Host
    sink: Sink
    progress: Progress
    attached: Callable[[int, int], None] | None = None
    peers: Peers = ALONE
    """Processes of this node that make and open the same caches."""

    def places(self, what: What) -> Places | None:
        """Where entries of a kind live; None if they are not cached."""
        cache = self.config.cache_config
        kind = cache.vae_cache_type if what == "latents" else cache.text_cache_type
        return None if kind == "none" else places(kind, self.config, self.run_folder, self.life, self.attached)

    def open(self, what: What, *, check: bool = False, load: bool = True) -> Store | None:
        """The store of all entries of a kind that are cached once, everything in it; None if the kind is not cached.

        The encoder is dropped afterwards, unless it is needed on the way. With `check`, entries that are there are
        checked too; without `load` they are left where they are kept.
        """
        wanted = self._wanted(what)
        store = self._open(self.places(what), self.needs.space(what), wanted, check, load)
        if what == "text" and self.encoders.cut:
            message = f"{self.encoders.cut} captions are longer than the model reads; their ends are left out"
            self.sink.emit(Warned("captions", message))
        if not self.needs.any_is(what, How.EACH_EPOCH) and not self.needs.any_is(what, How.AT_USE):
            self.encoders.drop(what)
            if what == "latents":
                self.decoders.close()
        return store

    def _wanted(self, what: What) -> Wanted:
        if what == "latents":
            return self.needs.media_wanted(self.decoders, self.encoders)
        return self.needs.text_wanted(self.encoders)

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
            peers=self.peers,
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

    def _open(self, where: Places | None, space: Space, wanted: Wanted, check: bool, load: bool) -> Store | None:
        if where is None:
            return None
        began = time.monotonic()
        self.sink.emit(Decided(f"cache.{space.what}", str(where.kept.home.path), where.why))
        kept = Store(where.kept, space, self.sink)
        with _closed_on_error(kept):
            if check:
                mend(kept, wanted, host=self.host, progress=self.progress, sink=self.sink)
            kept.fill(wanted, host=self.host, progress=self.progress, peers=self.peers)
            store = self._loaded(kept, where, wanted) if load else kept
        figures = {"entries": len(wanted.keys), "made": kept.made, "seconds": round(time.monotonic() - began, 3)}
        self.sink.emit(Measured(f"cache.{space.what}", figures))
        return store

    def _loaded(self, kept: Store, where: Places, wanted: Wanted) -> Store:
        if where.shared is None:
            return kept
        shared = Store(where.shared, kept.space, self.sink)
        with _closed_on_error(shared):
            copies = loaded(kept, wanted, host=self.host, progress=self.progress, sink=self.sink)
            shared.fill(copies, host=self.host, progress=self.progress, peers=self.peers)
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
    needs = needs_of(config, corpus, encoding.identities, encoding.dtype, until)
    with ExitStack() as opened:
        encoders = Encoders(encoding)
        opened.callback(encoders.close)
        decoders = LazyDecoders(corpus, config.loader.num_workers or max(1, host.cpus() // peers.count))
        opened.callback(decoders.close)
        yield Caching(config, needs, encoders, decoders, run_folder, life, host, sink, progress, attached, peers)


def _for_epochs(where: Places | None) -> Place | None:
    """Entries of one epoch are nothing to keep."""
    return None if where is None else replace(where.shared or where.kept, life="run")


@contextmanager
def _closed_on_error(store: Store) -> Iterator[None]:
    try:
        yield
    except BaseException:
        store.close()
        raise

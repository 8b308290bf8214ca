"""Opening the caches of a corpus: what is missing is encoded where it is kept, and loaded where it is shared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from supertuner.arena.format import Life
from supertuner.cache.filling import Wanted
from supertuner.cache.keys import Space
from supertuner.cache.mending import loaded, mend
from supertuner.cache.room import Place
from supertuner.cache.rotation import Rotation
from supertuner.cache.store import Store
from supertuner.config.tree import RunConfig
from supertuner.core.events import Decided, Measured, Progress, Sink
from supertuner.core.host import Host
from supertuner.data.corpus import Corpus
from supertuner.train.caching_encoders import Encoders, Encoding, LazyDecoders
from supertuner.train.caching_epochs import Epoch, EpochMaker
from supertuner.train.caching_needs import Needs, needs_of, require_buckets
from supertuner.train.caching_places import Places, places
from supertuner.train.caching_treatment import How, doubts


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

    def media_places(self) -> Places | None:
        kind = self.config.cache_config.vae_cache_type
        return None if kind == "none" else places(kind, self.config, self.run_folder, self.life)

    def text_places(self) -> Places | None:
        kind = self.config.cache_config.text_cache_type
        return None if kind == "none" else places(kind, self.config, self.run_folder, self.life)

    def media(self, *, check: bool = False, load: bool = True) -> Store | None:
        """The store of all latents that are cached once, everything in it; the encoder is dropped if it is done."""
        wanted = self.needs.media_wanted(self.decoders, self.encoders)
        store = self._open(self.media_places(), self.needs.media_space, wanted, check, load)
        if not self.needs.media_is(How.EACH_EPOCH) and not self.needs.media_is(How.AT_USE):
            self.encoders.drop_media()
            self.decoders.close()
        return store

    def text(self, *, check: bool = False, load: bool = True) -> Store | None:
        wanted = self.needs.text_wanted(self.encoders)
        store = self._open(self.text_places(), self.needs.text_space, wanted, check, load)
        if not self.needs.text_is(How.EACH_EPOCH) and not self.needs.text_is(How.AT_USE):
            self.encoders.drop_text()
        return store

    def epochs(self, begin: int, until: int | None) -> Rotation[Epoch] | None:
        """The entries of `refresh_each_epoch`, those of the first epoch made; None if no dataset asks for it."""
        if not self.needs.media_is(How.EACH_EPOCH) and not self.needs.text_is(How.EACH_EPOCH):
            return None
        order = self.needs.corpus.order
        media, text = self.media_places(), self.text_places()
        maker = EpochMaker(
            needs=self.needs,
            media_place=_for_epochs(media),
            text_place=_for_epochs(text),
            decoders=self.decoders,
            encoders=self.encoders,
            begin=begin,
            until=until,
            host=self.host,
            sink=self.sink,
            progress=self.progress,
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
            mended = mend(kept, wanted, host=self.host, progress=self.progress, sink=self.sink) if check else 0
            made = mended + kept.fill(wanted, host=self.host, progress=self.progress)
            store = self._loaded(kept, where, wanted) if load else kept
        figures = {"entries": len(wanted.keys), "made": made, "seconds": round(time.monotonic() - began, 3)}
        self.sink.emit(Measured(f"cache.{space.what}", figures))
        return store

    def _loaded(self, kept: Store, where: Places, wanted: Wanted) -> Store:
        if where.shared is None:
            return kept
        shared = Store(where.shared, kept.space, self.sink)
        with _closed_on_error(shared):
            copies = loaded(kept, wanted, host=self.host, progress=self.progress, sink=self.sink)
            shared.fill(copies, host=self.host, progress=self.progress)
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
) -> Iterator[Caching]:
    """What makes and opens a corpus's caches; leaving it ends its threads and frees the encoders.

    `life` is how long entries stay that are not persistent.
    """
    require_buckets(corpus, encoding.family, encoding.model)
    for doubt in doubts([part.settings for part in corpus.parts], config.cache_config):
        sink.emit(doubt)
    needs = needs_of(config, corpus, encoding.identities, encoding.dtype, until)
    with ExitStack() as opened:
        encoders = Encoders(encoding)
        opened.callback(encoders.close)
        decoders = LazyDecoders(corpus, config.loader.num_workers or host.cpus())
        opened.callback(decoders.close)
        yield Caching(config, needs, encoders, decoders, run_folder, life, host, sink, progress)


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

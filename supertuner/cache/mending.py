"""Entries of a store that are checked before they are used: whole ones are copied or kept, damaged ones made again."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from supertuner.cache.entries import Tensors
from supertuner.cache.filling import Places, Wanted
from supertuner.cache.store import Store
from supertuner.core.errors import ArenaDamaged, CacheError
from supertuner.core.events import Progress, Sink, Warned
from supertuner.core.host import Host

_TRIES = 2


def loaded(source: Store, wanted: Wanted, *, host: Host, progress: Progress, sink: Sink) -> Wanted:
    """The same entries, made by copying them from `source`, each checked on the way.

    A damaged one is told, made again in `source` by `wanted`'s own way, and copied from there.
    """

    def make(places: Places) -> Generator[tuple[int, Tensors], None, None]:
        rest = places
        for _ in range(_TRIES):
            damaged = []
            for place, found in _checked(source, wanted, rest):
                if isinstance(found, ArenaDamaged):
                    damaged.append(place)
                    _tell(source, found, sink)
                else:
                    yield place, found
            if not damaged:
                return
            _make_again(source, wanted, damaged, host, progress)
            rest = np.array(damaged, np.intp)
        raise CacheError(f"{source.place.home.path}: gives back other bytes than were just written; check that disk")

    return Wanted(wanted.keys, make, wanted.sizes, f"loading {source.space.what}")


def mend(store: Store, wanted: Wanted, *, host: Host, progress: Progress, sink: Sink) -> int:
    """Check the bytes of all wanted entries that are there, and make damaged ones again; how many those were."""
    present = np.flatnonzero(store.find(wanted.keys) >= 0)
    damaged = []
    with progress.phase(f"checking {store.space.what}", items=len(present), noun="entries") as phase:
        for place, found in _checked(store, wanted, present):
            if isinstance(found, ArenaDamaged):
                damaged.append(place)
                _tell(store, found, sink)
            phase.advance(items=1)
    _make_again(store, wanted, damaged, host, progress)
    return len(damaged)


def _checked(store: Store, wanted: Wanted, places: Places) -> Iterator[tuple[int, Tensors | ArenaDamaged]]:
    refs = store.find(wanted.keys[places])
    for place, ref in zip(places.tolist(), refs.tolist(), strict=True):
        yield place, store.entries.checked(ref)


def _make_again(store: Store, wanted: Wanted, damaged: list[int], host: Host, progress: Progress) -> None:
    if damaged:
        store.entries.drop(store.find(wanted.keys[np.array(damaged, np.intp)]).tolist())
        store.fill(wanted, host=host, progress=progress)


def _tell(store: Store, error: ArenaDamaged, sink: Sink) -> None:
    sink.emit(Warned(f"cache of {store.space.what}", f"{error.file}: {error.what}; that entry is made again"))

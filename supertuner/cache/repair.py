"""Entries of a store that are checked before they are used: whole ones are copied or kept, damaged ones made again."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np

from supertuner.cache.entries import MISSING, SHIFT, Tensors
from supertuner.cache.fill import Places, Wanted
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
    """Check every byte of the store's arenas, and make damaged entries again; how many those were.

    An arena that is damaged anywhere is replaced: its whole entries are copied beside those that are made again. It is
    not used any more then, and `supertuner cache prune` removes it.
    """
    spoiled = store.entries.damaged(progress)
    refs = store.find(wanted.keys)
    inside = np.flatnonzero(np.isin(refs >> SHIFT, list(spoiled)) & (refs != MISSING))
    whole: dict[int, Tensors] = {}
    for place, found in _checked(store, wanted, inside):
        if isinstance(found, ArenaDamaged):
            _tell(store, found, sink)
        else:
            whole[place] = found
    store.entries.drop(refs[inside].tolist())

    def make(places: Places) -> Generator[tuple[int, Tensors], None, None]:
        yield from ((place, whole[place]) for place in places.tolist() if place in whole)
        rest = np.array([place for place in places.tolist() if place not in whole], np.intp)
        if len(rest):
            yield from wanted.make(rest)

    if len(inside):
        store.fill(replace(wanted, make=make), host=host, progress=progress)
        store.made -= len(whole)
    return len(inside) - len(whole)


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

"""Entries of a store that are checked before they are used: whole ones are copied or kept, damaged ones made again."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np

from supertuner.cache.entries import MISSING_REF, UNIT_BITS, NamedTensors
from supertuner.cache.fill import EntryIndices, EntryRequest
from supertuner.cache.store import CacheStore
from supertuner.core.errors import ArenaDamagedError, CacheError
from supertuner.core.events import Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts

_MAX_ATTEMPTS = 2


def copying_request(
    source: CacheStore, request: EntryRequest, *, host: HostFacts, progress: Progress, sink: Sink
) -> EntryRequest:
    """The same entries, made by copying them from `source`, each checked on the way.

    A damaged one is told, made again in `source` by `wanted`'s own way, and copied from there.
    """

    def make(places: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        remaining = places
        for _ in range(_MAX_ATTEMPTS):
            damaged = []
            for index, entry in _check_entries(source, request, remaining):
                if isinstance(entry, ArenaDamagedError):
                    damaged.append(index)
                    _warn_damaged(source, entry, sink)
                else:
                    yield index, entry
            if not damaged:
                return
            _remake_entries(source, request, damaged, host, progress)
            remaining = np.array(damaged, np.intp)
        raise CacheError(f"{source.location.home.path}: gives back other bytes than were just written; check that disk")

    return EntryRequest(request.keys, make, request.relative_sizes, f"loading {source.namespace.kind}")


def repair_entries(store: CacheStore, request: EntryRequest, *, host: HostFacts, progress: Progress, sink: Sink) -> int:
    """Check every byte of the store's arenas, and make damaged entries again; how many those were.

    An arena that is damaged anywhere is replaced: its whole entries are copied beside those that are made again. It is
    not used any more then, and `supertuner cache prune` removes it.
    """
    damaged_arenas = store.entries.find_damaged_arenas(progress)
    refs = store.find(request.keys)
    affected = np.flatnonzero(np.isin(refs >> UNIT_BITS, list(damaged_arenas)) & (refs != MISSING_REF))
    intact: dict[int, NamedTensors] = {}
    for index, entry in _check_entries(store, request, affected):
        if isinstance(entry, ArenaDamagedError):
            _warn_damaged(store, entry, sink)
        else:
            intact[index] = entry
    store.entries.drop(refs[affected].tolist())

    def make(places: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        yield from ((place, intact[place]) for place in places.tolist() if place in intact)
        rest = np.array([place for place in places.tolist() if place not in intact], np.intp)
        if len(rest):
            yield from request.make(rest)

    if len(affected):
        store.fill(replace(request, make=make), host=host, progress=progress)
        store.entries_made -= len(intact)
    return len(affected) - len(intact)


def _check_entries(
    store: CacheStore, request: EntryRequest, indices: EntryIndices
) -> Iterator[tuple[int, NamedTensors | ArenaDamagedError]]:
    refs = store.find(request.keys[indices])
    for index, ref in zip(indices.tolist(), refs.tolist(), strict=True):
        yield index, store.entries.check_entry(ref)


def _remake_entries(
    store: CacheStore, request: EntryRequest, damaged: list[int], host: HostFacts, progress: Progress
) -> None:
    if damaged:
        store.entries.drop(store.find(request.keys[np.array(damaged, np.intp)]).tolist())
        store.fill(request, host=host, progress=progress)


def _warn_damaged(store: CacheStore, error: ArenaDamagedError, sink: Sink) -> None:
    sink.emit(
        WarningEvent(f"cache of {store.namespace.kind}", f"{error.file}: {error.description}; that entry is made again")
    )

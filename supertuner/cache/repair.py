"""Verifies cached entries before use: intact ones are copied or kept, damaged ones are made again."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np

from supertuner.cache.entries import MISSING_REF, UNIT_BITS, EntryIndices, EntryRequest, NamedTensors
from supertuner.cache.store import CacheStore
from supertuner.core.errors import ArenaDamagedError, CacheError
from supertuner.core.events import WarningEvent

_MAX_ATTEMPTS = 2


def copying_request(source: CacheStore, request: EntryRequest) -> EntryRequest:
    """The same entries, made by copying them from `source`, which must contain them.

    Each entry is verified before it is copied. A damaged one is reported, made again in `source` by `request`, and then
    copied.
    """

    def make(indices: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        remaining = indices
        for _ in range(_MAX_ATTEMPTS):
            damaged = []
            for index, entry in _check_entries(source, request, remaining):
                if isinstance(entry, ArenaDamagedError):
                    damaged.append(index)
                    _warn_damaged(source, entry)
                else:
                    yield index, entry
            if not damaged:
                return
            remaining = np.array(damaged, np.intp)
            source.entries.drop(source.find(request.keys[remaining]).tolist())
            source.fill(request, share_with_peers=False)
        raise CacheError(f"{source.location.home.path}: just written entries are damaged when read; check that disk")

    return EntryRequest(request.keys, make, request.relative_sizes, f"loading {source.namespace.kind}")


def repair_entries(store: CacheStore, request: EntryRequest) -> int:
    """Verify every byte of the store's arenas and make damaged entries again; returns how many were damaged.

    An arena with any damage is replaced: its intact entries are copied into the new arena with the ones made again. The
    old arena is not used any more, and `supertuner cache prune` removes it.
    """
    damaged_arenas = store.entries.find_damaged_arenas(store.context.progress)
    refs = store.find(request.keys)
    affected = np.flatnonzero(np.isin(refs >> UNIT_BITS, list(damaged_arenas)) & (refs != MISSING_REF))
    intact: dict[int, NamedTensors] = {}
    for index, entry in _check_entries(store, request, affected):
        if isinstance(entry, ArenaDamagedError):
            _warn_damaged(store, entry)
        else:
            intact[index] = entry
    store.entries.drop(refs[affected].tolist())

    def make(indices: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        yield from ((index, intact[index]) for index in indices.tolist() if index in intact)
        rest = np.array([index for index in indices.tolist() if index not in intact], np.intp)
        if len(rest):
            yield from request.make(rest)

    if len(affected):
        store.fill(replace(request, make=make), share_with_peers=False)
        store.entries_made -= len(intact)
    return len(affected) - len(intact)


def _check_entries(
    store: CacheStore, request: EntryRequest, indices: EntryIndices
) -> Iterator[tuple[int, NamedTensors | ArenaDamagedError]]:
    refs = store.find(request.keys[indices])
    for index, ref in zip(indices.tolist(), refs.tolist(), strict=True):
        yield index, store.entries.check_entry(ref)


def _warn_damaged(store: CacheStore, error: ArenaDamagedError) -> None:
    message = f"{error.file}: {error.description}; that entry is made again"
    store.context.sink.emit(WarningEvent(f"cache of {store.namespace.kind}", message))

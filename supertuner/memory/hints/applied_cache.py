"""Remembers which ranges were hinted, so that a repeated hint is a look-up; forgets them as soon as the memory may be
reused.

Addresses are reused by malloc and by torch's caching allocator, so an address identifies nothing. Entries are tied to
the storage: torch keeps one Python object per storage for as long as the storage exists. An entry whose object is the
storage's current one therefore describes the same memory, and the end of the storage removes the entry. A storage that
is resized in place has another address. Only memory that is freed and allocated again at the same address inside the
same storage must be reported with `forget`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from supertuner.memory.driver import AddressRange
from supertuner.memory.hints.issue import HintRequest
from supertuner.memory.hints.outcomes import HintOutcome
from supertuner.memory.hints.page_ranges import overlaps

if TYPE_CHECKING:
    import torch

MAX_STORAGES: Final = 1024
"""Maximum number of storages; the oldest is forgotten first. Forgetting is always safe: the hint is issued again."""


@dataclass(frozen=True, slots=True)
class _AppliedHint:
    span: AddressRange
    request: HintRequest
    outcome: HintOutcome


@dataclass(frozen=True, slots=True, eq=False)
class _StorageHints:
    """The hints that were applied to one storage."""

    storage: weakref.ref[torch.UntypedStorage]
    views: dict[Hashable, _AppliedHint] = field(default_factory=dict)


class AppliedHintCache:
    """The cache of applied hints. May be used from several threads; a look-up takes no lock, and neither does the end
    of a storage.
    """

    def __init__(self, max_storages: int = MAX_STORAGES) -> None:
        self._max_storages = max_storages
        self._lock = threading.Lock()
        self._by_storage: dict[int, _StorageHints] = {}

    def __len__(self) -> int:
        """Number of storages that are remembered."""
        return len(self._by_storage)

    def find(self, tensor: torch.Tensor, request: HintRequest) -> HintOutcome | None:
        """The outcome of the same hint for the same bytes, if they are still the same memory."""
        storage = tensor.untyped_storage()
        entry = self._by_storage.get(storage._cdata)
        if entry is None or entry.storage() is not storage:
            return None
        hinted = entry.views.get((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, request.cache_key))
        return None if hinted is None else hinted.outcome

    def store(self, tensor: torch.Tensor, request: HintRequest, span: AddressRange, outcome: HintOutcome) -> None:
        """Remember an outcome. If the driver accepted it, earlier outcomes with the same verb for the same bytes are
        dropped.
        """
        with self._lock:
            if outcome.accepted:
                self._drop_conflicting(outcome.applied_to, request)
            self._insert(tensor, request, _AppliedHint(span, request, outcome))

    def forget(self, span: AddressRange | None = None) -> None:
        """Forget everything about a range; None: everything."""
        with self._lock:
            if span is None:
                self._by_storage.clear()
                return
            for entry in self._entries():
                for key, hinted in list(entry.views.items()):
                    if overlaps(hinted.span, span):
                        entry.views.pop(key, None)

    def _insert(self, tensor: torch.Tensor, request: HintRequest, hinted: _AppliedHint) -> None:
        storage = tensor.untyped_storage()
        storage_id = storage._cdata
        entry = self._by_storage.get(storage_id)
        if entry is None or entry.storage() is not storage:
            entry = _StorageHints(weakref.ref(storage, self._remover(storage_id)))
            self._by_storage[storage_id] = entry
            if len(self._by_storage) > self._max_storages:
                # a copy of the keys, because an entry may be removed by any thread meanwhile
                for oldest in list(self._by_storage)[:1]:
                    self._by_storage.pop(oldest, None)
        entry.views[tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, request.cache_key] = hinted

    def _drop_conflicting(self, applied_to: Sequence[AddressRange], request: HintRequest) -> None:
        """Drop earlier hints with the same verb and another location for these bytes: they no longer hold."""
        for entry in self._entries():
            for key, hinted in list(entry.views.items()):
                conflicts = hinted.request.verb is request.verb and hinted.request != request
                if conflicts and any(overlaps(hinted.span, span) for span in applied_to):
                    entry.views.pop(key, None)

    def _entries(self) -> list[_StorageHints]:
        # Copy the keys first: a storage may end in any thread meanwhile, which removes its entry.
        entries = (self._by_storage.get(storage_id) for storage_id in list(self._by_storage))
        return [entry for entry in entries if entry is not None]

    def _remover(self, storage_id: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        known = self._by_storage

        def remove(gone: weakref.ref[torch.UntypedStorage]) -> None:
            entry = known.get(storage_id)
            if entry is not None and entry.storage is gone:  # a new storage may have the same id already
                known.pop(storage_id, None)

        return remove

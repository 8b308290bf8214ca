"""Which ranges were hinted already: a look-up, forgotten as soon as the memory may be another's.

Addresses are reused, by malloc and by torch's caching allocator, so an address says nothing. What is remembered hangs
on the storage: torch keeps one Python object per storage for as long as the storage lives, so an entry whose object is
the one at hand is about the same memory, and the end of the storage removes the entry. Storage that is resized in
place comes under another address; only one that is given up and taken again at the same address, inside the same
storage, must be told with `forget`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from supertuner.memory.driver import AddressRange
from supertuner.memory.hints.outcomes import HintOutcome
from supertuner.memory.hints.page_ranges import overlaps
from supertuner.memory.hints.request import HintRequest

if TYPE_CHECKING:
    import torch

MAX_STORAGES: Final = 1024
"""Storages that are remembered; the oldest is forgotten first. To forget is always safe: the hint is given again."""


@dataclass(frozen=True, slots=True)
class _AppliedHint:
    span: AddressRange
    request: HintRequest
    outcome: HintOutcome


@dataclass(frozen=True, slots=True, eq=False)
class _StorageHints:
    """What was hinted of one storage."""

    storage: weakref.ref[torch.UntypedStorage]
    views: dict[Hashable, _AppliedHint] = field(default_factory=dict)


class AppliedHintCache:
    """May be used from several threads. Looking up takes no lock, and neither does the end of a storage."""

    def __init__(self, max_storages: int = MAX_STORAGES) -> None:
        self._max_storages = max_storages
        self._lock = threading.Lock()
        self._by_storage: dict[int, _StorageHints] = {}

    def __len__(self) -> int:
        """Storages that are remembered."""
        return len(self._by_storage)

    def find(self, tensor: torch.Tensor, request: HintRequest) -> HintOutcome | None:
        """What became of the same hint for the same bytes, if they are still the same memory."""
        storage = tensor.untyped_storage()
        entry = self._by_storage.get(storage._cdata)
        if entry is None or entry.storage() is not storage:
            return None
        hinted = entry.views.get((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, request.cache_key))
        return None if hinted is None else hinted.outcome

    def store(self, tensor: torch.Tensor, request: HintRequest, span: AddressRange, outcome: HintOutcome) -> None:
        """Remember an outcome. One that the driver took makes others about the same bytes and verb untrue."""
        with self._lock:
            if outcome.accepted:
                self._drop_conflicting(outcome.applied_to, request)
            self._insert(tensor, request, _AppliedHint(span, request, outcome))

    def forget(self, span: AddressRange | None = None) -> None:
        """Remember nothing of a range any more; None: nothing at all."""
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
                for oldest in list(self._by_storage)[:1]:  # in one step: an entry may end meanwhile, in any thread
                    self._by_storage.pop(oldest, None)
        entry.views[tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, request.cache_key] = hinted

    def _drop_conflicting(self, applied_to: Sequence[AddressRange], request: HintRequest) -> None:
        """Forget other wishes for these bytes: what was preferred there is not preferred any more."""
        for entry in self._entries():
            for key, hinted in list(entry.views.items()):
                conflicts = hinted.request.verb is request.verb and hinted.request != request
                if conflicts and any(overlaps(hinted.span, span) for span in applied_to):
                    entry.views.pop(key, None)

    def _entries(self) -> list[_StorageHints]:
        # A list of keys first: a storage may end while we look, in any thread, and its entry with it.
        entries = (self._by_storage.get(number) for number in list(self._by_storage))
        return [known for known in entries if known is not None]

    def _remover(self, storage_id: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        known = self._by_storage

        def remove(gone: weakref.ref[torch.UntypedStorage]) -> None:
            entry = known.get(storage_id)
            if entry is not None and entry.storage is gone:  # a new storage may have the number already
                known.pop(storage_id, None)

        return remove

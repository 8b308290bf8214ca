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
from typing import Final

import torch

from supertuner.memory.driver import Span
from supertuner.memory.hints.outcomes import Outcome
from supertuner.memory.hints.page_ranges import overlap
from supertuner.memory.hints.request import Ask

MOST_STORAGES: Final = 1024
"""Storages that are remembered; the oldest is forgotten first. To forget is always safe: the hint is given again."""


@dataclass(frozen=True, slots=True)
class _Hinted:
    span: Span
    ask: Ask
    outcome: Outcome


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What was hinted of one storage."""

    storage: weakref.ref[torch.UntypedStorage]
    views: dict[Hashable, _Hinted] = field(default_factory=dict)


class Recall:
    """May be used from several threads. Looking up takes no lock, and neither does the end of a storage."""

    def __init__(self, most: int = MOST_STORAGES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        """Storages that are remembered."""
        return len(self._known)

    def find(self, tensor: torch.Tensor, ask: Ask) -> Outcome | None:
        """What became of the same hint for the same bytes, if they are still the same memory."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known.storage() is not storage:
            return None
        hinted = known.views.get((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, ask.name))
        return None if hinted is None else hinted.outcome

    def keep(self, tensor: torch.Tensor, ask: Ask, span: Span, outcome: Outcome) -> None:
        """Remember an outcome. One that the driver took makes others about the same bytes and verb untrue."""
        with self._lock:
            if outcome.told:
                self._drop(outcome.touched, ask)
            self._put(tensor, ask, _Hinted(span, ask, outcome))

    def forget(self, span: Span | None = None) -> None:
        """Remember nothing of a range any more; None: nothing at all."""
        with self._lock:
            if span is None:
                self._known.clear()
                return
            for known in self._all():
                for key, hinted in list(known.views.items()):
                    if overlap(hinted.span, span):
                        known.views.pop(key, None)

    def _put(self, tensor: torch.Tensor, ask: Ask, hinted: _Hinted) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        known = self._known.get(number)
        if known is None or known.storage() is not storage:
            known = _Known(weakref.ref(storage, self._remover(number)))
            self._known[number] = known
            if len(self._known) > self._most:
                for oldest in list(self._known)[:1]:  # in one step: an entry may end meanwhile, in any thread
                    self._known.pop(oldest, None)
        known.views[tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, ask.name] = hinted

    def _drop(self, touched: Sequence[Span], ask: Ask) -> None:
        """Forget other wishes for these bytes: what was preferred there is not preferred any more."""
        for known in self._all():
            for key, hinted in list(known.views.items()):
                other = hinted.ask.verb is ask.verb and hinted.ask != ask
                if other and any(overlap(hinted.span, span) for span in touched):
                    known.views.pop(key, None)

    def _all(self) -> list[_Known]:
        # A list of keys first: a storage may end while we look, in any thread, and its entry with it.
        found = (self._known.get(number) for number in list(self._known))
        return [known for known in found if known is not None]

    def _remover(self, number: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        known = self._known

        def remove(gone: weakref.ref[torch.UntypedStorage]) -> None:
            entry = known.get(number)
            if entry is not None and entry.storage is gone:  # a new storage may have the number already
                known.pop(number, None)

        return remove

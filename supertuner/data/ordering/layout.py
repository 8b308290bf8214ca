"""How one epoch is cut and shuffled: pure arithmetic between its positions and its groups' draws, both ways.

A group's draws of the epoch are cut into chunks of the batch size; a keyed bijection puts the chunks of all groups
into slots. Only a group's last chunk can be short, so there are at most as many corrections as groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supertuner.data.ordering.bijection import U64, inverse, permute

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    epoch: int
    begin: int
    """Global position of the epoch's first sample; all other positions here count from it."""
    length: int
    batch: int
    key: int
    first: I64
    """For each group, the place in its stream where the epoch begins."""
    chunk_begin: I64
    """For each group its first chunk, and at the end the number of chunks."""
    short_slots: I64
    """Slots of the short chunks, ascending."""
    short_ends: I64
    """Positions where those chunks end."""
    missing: I64
    """For each i, how many samples the first i short chunks lack."""

    @property
    def slots(self) -> int:
        return int(self.chunk_begin[-1])

    def slot_at(self, position: I64) -> I64:
        return self.numbered(position)[0]

    def slot_begin(self, slot: I64) -> I64:
        """Position where a slot begins; the slot after the last begins at the epoch's end."""
        return slot * self.batch - self.missing[np.searchsorted(self.short_slots, slot, side="left")]

    def where(self, group: I64, place: I64) -> I64:
        """Position of each place in the groups' streams: the inverse of `locate`."""
        number, offset = np.divmod(place - self.first[group], self.batch)
        slot = inverse(*self.keyed(self.chunk_begin[group] + number)).astype(np.int64)
        return self.slot_begin(slot) + offset

    def numbered(self, position: I64) -> tuple[I64, I64]:
        """The slot of each position, and its offset there."""
        return np.divmod(self._as_if_full(position), self.batch)

    def place(self, chunk: I64, offset: I64) -> tuple[I64, I64]:
        group = np.searchsorted(self.chunk_begin, chunk, side="right") - 1
        return group, self.first[group] + (chunk - self.chunk_begin[group]) * self.batch + offset

    def keyed(self, number: I64) -> tuple[U64, U64, U64]:
        return _keyed(number, self.slots, self.key)

    def _as_if_full(self, position: I64) -> I64:
        """The position as it would be if every chunk before it were full."""
        return position + self.missing[np.searchsorted(self.short_ends, position, side="right")]


def locate(parts: Sequence[tuple[Layout, I64]]) -> tuple[I64, I64]:
    """Group, and place in the group's stream, of positions in several epochs, one after the other. The network's cost
    is per call, and short epochs are many: all of them go through it together."""
    numbered = [layout.numbered(position) for layout, position in parts]
    keyed = [layout.keyed(slot) for (layout, _), (slot, _) in zip(parts, numbered, strict=True)]
    chunks = permute(*map(np.concatenate, zip(*keyed, strict=True))).astype(np.int64)
    ends = np.cumsum([len(position) for _, position in parts])[:-1]
    found = [
        layout.place(chunk, offset)
        for (layout, _), (_, offset), chunk in zip(parts, numbered, np.split(chunks, ends), strict=True)
    ]
    group, place = map(np.concatenate, zip(*found, strict=True))
    return group, place


def lay_out(epoch: int, begin: int, batch: int, key: int, first: I64, draws: I64) -> Layout:
    """The layout of an epoch that takes `draws[g]` draws of each group g, from place `first[g]` of its stream on."""
    chunks = -(-draws // batch)
    chunk_begin = np.concatenate([[0], np.cumsum(chunks)])
    short = np.flatnonzero(draws % batch)
    slots = short  # none, and then nothing need be asked of the network
    if len(short):
        slots = inverse(*_keyed(chunk_begin[short + 1] - 1, int(chunk_begin[-1]), key)).astype(np.int64)
    by_slot = np.argsort(slots)
    slots, held = slots[by_slot], (draws % batch)[short][by_slot]
    missing = np.concatenate([[0], np.cumsum(batch - held)])
    return Layout(
        epoch=epoch,
        begin=begin,
        length=int(draws.sum()),
        batch=batch,
        key=key,
        first=first,
        chunk_begin=chunk_begin,
        short_slots=slots,
        short_ends=slots * batch - missing[:-1] + held,
        missing=missing,
    )


def _keyed(number: I64, size: int, key: int) -> tuple[U64, U64, U64]:
    """Arguments of `permute` and `inverse` for numbers of one domain under one key."""
    return number.astype(np.uint64), np.full(number.shape, size, np.uint64), np.full(number.shape, key, np.uint64)

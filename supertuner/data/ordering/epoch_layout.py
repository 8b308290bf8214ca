"""Layout of one epoch: pure arithmetic from a position in the epoch to a group's draw, and back.

Each group's draws are split into chunks of the batch size, and a keyed bijection assigns the chunks of all groups to
slots. Without short chunks, position // batch_size would be the slot. Only the last chunk of a group can be short, so
at most one correction per group is needed, and positions are computed without storing the permutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from supertuner.data.ordering.bijection import U64, inverse, permute

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class EpochLayout:
    epoch: int
    begin: int
    """Global position of the epoch's first sample. All other positions here are relative to it."""
    length: int
    batch_size: int
    key: int
    stream_begin: I64
    """For each group, the index in its stream of draws at which the epoch begins."""
    chunk_begin: I64
    """For each group the index of its first chunk; the last element is the number of chunks."""
    short_slots: I64
    """Slots of the short chunks, ascending."""
    short_ends: I64
    """Positions at which these chunks end."""
    missing_before: I64
    """For each i, how many samples the first i short chunks have fewer than full ones."""

    @property
    def slot_count(self) -> int:
        return int(self.chunk_begin[-1])

    def slot_begin(self, slot: I64) -> I64:
        """Position at which a slot begins; for the slot after the last one, the epoch's length."""
        return slot * self.batch_size - self.missing_before[np.searchsorted(self.short_slots, slot, side="left")]

    def position_of(self, group: I64, stream_index: I64) -> I64:
        """Position of each draw, given by group and index in the group's stream: the inverse of `locate_positions`."""
        chunk_in_group, offset = np.divmod(stream_index - self.stream_begin[group], self.batch_size)
        slot = inverse(*self.permutation_args(self.chunk_begin[group] + chunk_in_group)).astype(np.int64)
        return self.slot_begin(slot) + offset

    def slot_and_offset(self, position: I64) -> tuple[I64, I64]:
        """The slot of each position, and the offset within the slot."""
        # the position that each position would have if every chunk before it were full
        padded = position + self.missing_before[np.searchsorted(self.short_ends, position, side="right")]
        return np.divmod(padded, self.batch_size)

    def stream_index(self, chunk: I64, offset: I64) -> tuple[I64, I64]:
        """Group and index in the group's stream of each draw, given by chunk and offset within the chunk."""
        group = np.searchsorted(self.chunk_begin, chunk, side="right") - 1
        return group, self.stream_begin[group] + (chunk - self.chunk_begin[group]) * self.batch_size + offset

    def permutation_args(self, index: I64) -> tuple[U64, U64, U64]:
        return _permutation_args(index, self.slot_count, self.key)


def locate_positions(parts: Sequence[tuple[EpochLayout, I64]]) -> tuple[I64, I64]:
    """Group and index in the group's stream of positions in several epochs, concatenated.

    All epochs share one call of `permute`, because its cost is per call and short epochs are many.
    """
    layouts = [layout for layout, _ in parts]
    slots, offsets = zip(*[layout.slot_and_offset(position) for layout, position in parts], strict=True)
    arguments = [layout.permutation_args(slot) for layout, slot in zip(layouts, slots, strict=True)]
    chunks = permute(*map(np.concatenate, zip(*arguments, strict=True))).astype(np.int64)
    ends = np.cumsum([len(position) for _, position in parts])[:-1]
    rows = zip(layouts, np.split(chunks, ends), offsets, strict=True)
    located = [layout.stream_index(chunk, offset) for layout, chunk, offset in rows]
    group, stream_index = map(np.concatenate, zip(*located, strict=True))
    return group, stream_index


def build_epoch_layout(epoch: int, begin: int, batch_size: int, key: int, stream_begin: I64, draws: I64) -> EpochLayout:
    """Layout of an epoch that takes `draws[g]` draws of each group g, from index `stream_begin[g]` of its stream."""
    chunks = -(-draws // batch_size)
    chunk_begin = np.concatenate([[0], np.cumsum(chunks)])
    short = np.flatnonzero(draws % batch_size)
    slots = short  # empty: no slot to compute
    if len(short):
        slots = inverse(*_permutation_args(chunk_begin[short + 1] - 1, int(chunk_begin[-1]), key)).astype(np.int64)
    by_slot = np.argsort(slots)
    slots, chunk_lengths = slots[by_slot], (draws % batch_size)[short][by_slot]
    missing = np.concatenate([[0], np.cumsum(batch_size - chunk_lengths)])
    return EpochLayout(
        epoch=epoch,
        begin=begin,
        length=int(draws.sum()),
        batch_size=batch_size,
        key=key,
        stream_begin=stream_begin,
        chunk_begin=chunk_begin,
        short_slots=slots,
        short_ends=slots * batch_size - missing[:-1] + chunk_lengths,
        missing_before=missing,
    )


def _permutation_args(index: I64, size: int, key: int) -> tuple[U64, U64, U64]:
    """Arguments of `permute` and `inverse` for indices of one domain under one key."""
    return index.astype(np.uint64), np.full(index.shape, size, np.uint64), np.full(index.shape, key, np.uint64)

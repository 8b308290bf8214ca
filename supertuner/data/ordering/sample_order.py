"""SampleOrder: the sample at any position, as a pure function of seed and datasets; no earlier position is replayed.

A group is the samples of one dataset in one bucket. Its draws are an endless stream in which each n consecutive draws
(a cycle) are a new shuffle of its n samples. An epoch takes the next rate × n draws of each group, so that a fractional
weight omits no sample and repeats none early. `epoch_layout` orders the draws within an epoch. Positions number the
draws from the beginning of the first epoch through all epochs, independent of the number of processes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from supertuner.core.errors import SourceError
from supertuner.data.ordering.bijection import derive_keys, hash_key, permute
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.epoch_layout import I64, EpochLayout, build_epoch_layout, locate_positions

MAX_WEIGHT_DENOMINATOR = 1_000_000
"""Rates are exact fractions with denominators up to this, so that sums of draws over epochs fit into 64 bits."""

SLOTS_PER_CALL = 256
"""Slots computed together when batches are listed: enough to amortise numpy's cost per call."""


def draws_per_epoch(repeats: int, weight: float) -> Fraction:
    """Draws of each sample per epoch. A weight is read as the decimal it prints as: 0.1 is exactly 1/10."""
    return repeats * Fraction(str(weight)).limit_denominator(MAX_WEIGHT_DENOMINATOR)


@dataclass(frozen=True, eq=False, slots=True)
class BucketGroup:
    """The samples of one dataset that share a bucket."""

    dataset_index: int
    """Index of the dataset in the corpus."""
    dataset_id: str
    bucket: Bucket
    sample_indices: NDArray[np.uint32]
    """Indices of the samples, ascending; a view of memory that all processes share."""
    draws_per_epoch: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class SampleDraw:
    """The draw at one position."""

    position: int
    epoch: int
    dataset_index: int
    sample: int
    bucket: Bucket
    cycle: int
    """How many times the sample was drawn before. Equals the epoch if repeats and weight are 1."""


@dataclass(frozen=True, eq=False, slots=True)
class SampleDraws:
    """The draws at several positions, as arrays of equal length. `group` is an index into SampleOrder.groups."""

    position: I64
    epoch: I64
    group: I64
    sample: I64
    cycle: I64

    def __len__(self) -> int:
        return len(self.position)

    def take(self, rows: I64 | slice) -> SampleDraws:
        return SampleDraws(self.position[rows], self.epoch[rows], self.group[rows], self.sample[rows], self.cycle[rows])


class SampleOrder:
    """The order of all samples of all datasets. Immutable."""

    def __init__(self, groups: Sequence[BucketGroup], *, seed: int, batch_size: int, drop_last: bool = False) -> None:
        used = [group for group in groups if len(group.sample_indices)]
        self.groups = tuple(sorted(used, key=lambda group: (group.dataset_id, group.bucket)))
        self.seed, self.batch_size, self.drop_last = seed, batch_size, drop_last
        self._group_sizes = np.array([len(g.sample_indices) for g in self.groups], np.int64)
        rates = [g.draws_per_epoch for g in self.groups]
        draws = [len(g.sample_indices) * rate.numerator for g, rate in zip(self.groups, rates, strict=True)]
        divided = [divmod(count, rate.denominator) for count, rate in zip(draws, rates, strict=True)]
        self._whole_draws = np.array([whole for whole, _ in divided], np.int64)
        self._remainder_draws = np.array([remainder for _, remainder in divided], np.int64)
        self._rate_denominators = np.array([rate.denominator for rate in rates], np.int64)
        names: list[tuple[int | str, ...]] = [(g.dataset_id, str(g.bucket.kind), *g.bucket.shape) for g in self.groups]
        self._group_keys = np.array([hash_key("group", seed, *name) for name in names], np.uint64)
        # Different phases prevent that the fractional draws of all groups round up in the same epoch.
        phase = [hash_key("phase", seed, *name) % rate.denominator for name, rate in zip(names, rates, strict=True)]
        self._phase = np.array(phase, np.int64)
        self.epoch_layout = lru_cache(maxsize=4)(self._build_layout)
        if not self.groups:
            raise SourceError("no sample is left to train on; the list of set-aside samples says why")
        if len(self.never_drawn()) == len(self.groups):
            problem = f"loader.drop_last leaves nothing: no bucket has {batch_size} samples (train.batch_size)"
            raise SourceError(f"{problem}; lower the batch size or set drop_last to false")

    def never_drawn(self) -> list[BucketGroup]:
        """Groups that cannot fill one batch in any epoch and that `drop_last` therefore always drops."""
        max_draws = self._drop_partial_batches(self._whole_draws + (self._remainder_draws > 0))
        return [group for group, draws in zip(self.groups, max_draws, strict=True) if not draws]

    def epoch_begin(self, epoch: int) -> int:
        """Position of the epoch's first sample, in closed form, so that a resumed run computes it directly."""
        drawn = self._stream_begin(epoch)
        longer = drawn - epoch * self._whole_draws  # how many of these epochs took one draw more than `_whole_draws`
        short_draws = self._drop_partial_batches(self._whole_draws)
        long_draws = self._drop_partial_batches(self._whole_draws + 1)
        return int(((epoch - longer) * short_draws + longer * long_draws).sum())

    def epoch_length(self, epoch: int) -> int:
        return self.epoch_begin(epoch + 1) - self.epoch_begin(epoch)

    def epoch_at(self, position: int) -> int:
        """The epoch that contains a position."""
        assert position >= 0, "positions start at 0"
        high = 1
        while self.epoch_begin(high) <= position:
            high *= 2
        return bisect_right(range(high), position, key=self.epoch_begin) - 1

    def draw_at(self, position: int) -> SampleDraw:
        draws = self.slice(position, position + 1)
        group = self.groups[int(draws.group[0])]
        return SampleDraw(
            position, int(draws.epoch[0]), group.dataset_index, int(draws.sample[0]), group.bucket, int(draws.cycle[0])
        )

    def slice(self, begin: int, end: int) -> SampleDraws:
        """The draws at positions `begin` to `end` (exclusive), across epochs."""
        parts: list[tuple[EpochLayout, I64]] = []
        epoch = self.epoch_at(begin)
        while begin < end:
            layout = self.epoch_layout(epoch)
            stop = min(end, layout.begin + layout.length)
            if stop > begin:
                parts.append((layout, np.arange(begin - layout.begin, stop - layout.begin)))
                begin = stop
            epoch += 1
        return self._draws(parts) if parts else SampleDraws(*[np.zeros(0, np.int64)] * 5)

    def batches(self, begin: int = 0, end: int | None = None) -> Iterator[SampleDraws]:
        """Single-bucket batches from `begin` to `end`: the chunks of the epochs' layouts.

        The first is shorter if `begin` is inside a chunk.
        """
        epoch = self.epoch_at(begin)
        while end is None or begin < end:
            layout = self.epoch_layout(epoch)
            for batch in self._epoch_batches(layout, begin - layout.begin):
                remaining = len(batch) if end is None else end - begin
                if remaining <= 0:
                    return
                yield batch if remaining >= len(batch) else batch.take(slice(0, remaining))
                begin += min(remaining, len(batch))
            epoch += 1

    def _epoch_batches(self, layout: EpochLayout, begin: int) -> Iterator[SampleDraws]:
        first = int(layout.slot_and_offset(np.array([begin]))[0][0])
        for slot in range(first, layout.slot_count, SLOTS_PER_CALL):
            edges = layout.slot_begin(np.arange(slot, min(slot + SLOTS_PER_CALL, layout.slot_count) + 1))
            edges[0] = max(int(edges[0]), begin)
            draws = self._draws([(layout, np.arange(edges[0], edges[-1]))])
            for left, right in zip(edges[:-1] - edges[0], edges[1:] - edges[0], strict=True):
                yield draws.take(slice(int(left), int(right)))

    def _draws(self, parts: Sequence[tuple[EpochLayout, I64]]) -> SampleDraws:
        """The draws at positions of several epochs, which are relative to their epoch's begin."""
        group, stream_index = locate_positions(parts)
        sizes = self._group_sizes[group]
        cycle, index_in_group = np.divmod(stream_index, sizes)
        keys = derive_keys(self._group_keys[group], cycle.astype(np.uint64))
        index_in_group = permute(index_in_group.astype(np.uint64), sizes.astype(np.uint64), keys).astype(np.int64)
        sample = np.empty(len(group), np.int64)
        for group_index in np.unique(group):
            rows = group == group_index
            sample[rows] = self.groups[group_index].sample_indices[index_in_group[rows]]
        position = np.concatenate([layout.begin + within for layout, within in parts])
        epoch = np.concatenate([np.full(len(within), layout.epoch) for layout, within in parts])
        return SampleDraws(position, epoch, group, sample, cycle)

    def _build_layout(self, epoch: int) -> EpochLayout:
        first = self._stream_begin(epoch)
        draws = self._drop_partial_batches(self._stream_begin(epoch + 1) - first)
        key = hash_key("chunks", self.seed, epoch)
        return build_epoch_layout(epoch, self.epoch_begin(epoch), self.batch_size, key, first, draws)

    def _stream_begin(self, epoch: int) -> I64:
        """Draws taken from each group's stream before `epoch`: ⌊epoch · n · rate + phase⌋ in exact arithmetic."""
        return epoch * self._whole_draws + (epoch * self._remainder_draws + self._phase) // self._rate_denominators

    def _drop_partial_batches(self, draws: I64) -> I64:
        return draws - draws % self.batch_size if self.drop_last else draws

"""Splits a window into shares of ranks and micro-batches; each position is used exactly once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.sample_order import SampleDraws, SampleOrder


@dataclass(frozen=True, eq=False, slots=True)
class MicroBatch:
    """Samples of one bucket that go through the model together, ordered by position."""

    bucket: Bucket
    draws: SampleDraws

    def __len__(self) -> int:
        return len(self.draws)


def shard_window(window: range, rank: int, world_size: int) -> range:
    """The positions of `window` that `rank` processes; the shares of ranks differ by at most one sample.

    Shares are contiguous, because neighbouring positions have the same bucket and so share a micro-batch.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    begin, end = (window.start + len(window) * r // world_size for r in (rank, rank + 1))
    return range(begin, end)


def micro_batches(order: SampleOrder, window: range, size: int) -> list[MicroBatch]:
    """Micro-batches of at most `size` samples that cover `window`, with buckets in order of first appearance.

    Samples of a bucket are collected from the whole window, across datasets and epochs, so that at most one micro-batch
    of each bucket is smaller than `size`.
    """
    return split_micro_batches(order, order.slice(window.start, window.stop), size)


def split_micro_batches(order: SampleOrder, draws: SampleDraws, size: int) -> list[MicroBatch]:
    """The same for draws that are computed already."""
    rows_by_bucket: dict[Bucket, list[int]] = {}
    for row, group in enumerate(draws.group):
        rows_by_bucket.setdefault(order.groups[group].bucket, []).append(row)
    return [
        MicroBatch(bucket, draws.take(np.array(bucket_rows[begin : begin + size])))
        for bucket, bucket_rows in rows_by_bucket.items()
        for begin in range(0, len(bucket_rows), size)
    ]


def single_micro_batch(order: SampleOrder, draws: SampleDraws) -> MicroBatch:
    """Draws that already have a single bucket, as those of `SampleOrder.batches` do, as one micro-batch."""
    bucket = order.groups[int(draws.group[0])].bucket
    assert all(order.groups[group].bucket == bucket for group in np.unique(draws.group)), "several buckets"
    return MicroBatch(bucket, draws)

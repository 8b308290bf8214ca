"""A window of the order cut for training: pure; whatever the cut, each position of the window is used exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.order import Draws, Order


@dataclass(frozen=True, eq=False, slots=True)
class MicroBatch:
    """Samples of one bucket that go through the model together, in the order of their positions."""

    bucket: Bucket
    draws: Draws

    def __len__(self) -> int:
        return len(self.draws)


def share(window: range, rank: int, ranks: int) -> range:
    """The positions of `window` that process `rank` of `ranks` works on; shares differ by one sample at most.

    Shares are contiguous: neighbours in the order share a bucket, and so a micro-batch.
    """
    assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
    cut = [window.start + len(window) * r // ranks for r in (rank, rank + 1)]
    return range(cut[0], cut[1])


def micro_batches(order: Order, window: range, size: int) -> list[MicroBatch]:
    """Single-bucket pieces of at most `size` samples that cover `window`, buckets in the order of first appearance.

    Samples of a bucket are gathered from the whole window, across datasets and epochs, so that no more than one piece
    of each bucket is smaller than `size`.
    """
    return cut(order, order.slice(window.start, window.stop), size)


def cut(order: Order, draws: Draws, size: int) -> list[MicroBatch]:
    """The same of draws that are at hand."""
    rows: dict[Bucket, list[int]] = {}
    for row, group in enumerate(draws.group):
        rows.setdefault(order.groups[group].bucket, []).append(row)
    return [
        MicroBatch(bucket, draws.take(np.array(found[begin : begin + size])))
        for bucket, found in rows.items()
        for begin in range(0, len(found), size)
    ]


def single(order: Order, draws: Draws) -> MicroBatch:
    """Draws that are of one bucket already, as the order's own batches are."""
    bucket = order.groups[int(draws.group[0])].bucket
    assert all(order.groups[group].bucket == bucket for group in np.unique(draws.group)), "a batch has one bucket"
    return MicroBatch(bucket, draws)

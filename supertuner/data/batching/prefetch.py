"""Prefetches batches in a known order, at most a fixed number ahead; an error is raised when its batch is requested.

No thread polls: each request for a batch submits the next one to the decoder pool, so the number of batches in progress
is bounded by construction, and a consumer that stops requesting stops the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from supertuner.core.closing import CloseOnExit, close_on_error
from supertuner.data.batching.decoder_pool import DecodedBatch, DecoderPool, PendingBatch
from supertuner.data.ordering.micro_batches import MicroBatch


class BatchPrefetcher(CloseOnExit):
    """An iterator over batches, and a context manager whose exit cancels pending batches without waiting for them.

    Several prefetchers may share one decoder pool, which the prefetcher does not close. After an error it is exhausted,
    as a generator would be.
    """

    def __init__(self, decoder_pool: DecoderPool, micro_batches: Iterable[MicroBatch], batches_ahead: int) -> None:
        assert batches_ahead >= 0, f"batches_ahead is {batches_ahead}"
        self._decoder_pool, self._batches_ahead = decoder_pool, batches_ahead
        self._micro_batches = iter(micro_batches)
        self._pending: deque[PendingBatch] = deque()
        self._submit_until(batches_ahead)

    def __iter__(self) -> Iterator[DecodedBatch]:
        return self

    def __next__(self) -> DecodedBatch:
        self._submit_until(self._batches_ahead + 1)
        if not self._pending:
            raise StopIteration
        with close_on_error(self):
            return self._pending.popleft().result()

    def close(self) -> None:
        """Submit no more batches and cancel pending ones."""
        self._micro_batches = iter(())
        while self._pending:
            self._pending.popleft().cancel()

    def _submit_until(self, limit: int) -> None:
        while len(self._pending) < limit:
            if (micro_batch := next(self._micro_batches, None)) is None:
                return
            self._pending.append(self._decoder_pool.submit(micro_batch))

"""The known next batches, made ahead: at most so many, in order, and an error is raised where its batch is asked for.

There is no thread that guesses or polls: asking for a batch first starts the one that thereby may be started, so work
in hand is bounded by construction. Whoever stops asking stops the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from supertuner.config.settings.data import LoaderSettings
from supertuner.core.events import DecisionEvent, Sink
from supertuner.core.host import HostFacts
from supertuner.data.batching.decoder_pool import DecodedBatch, DecoderPool, PendingBatch
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.micro_batches import MicroBatch


class BatchPrefetcher:
    """An iterator over batches, and a context manager: leaving it drops what was begun and waits for no batch.

    The decoders are not its own: they may serve several. After an error it is finished, as a generator would be.
    """

    def __init__(self, decoder_pool: DecoderPool, micro_batches: Iterable[MicroBatch], batches_ahead: int) -> None:
        assert batches_ahead >= 0, "batches cannot be made behind"
        self._decoder_pool = decoder_pool
        self._micro_batches = iter(micro_batches)
        self._batches_ahead = batches_ahead
        self._pending: deque[PendingBatch] = deque()
        self._submit_until(batches_ahead)

    def __iter__(self) -> Iterator[DecodedBatch]:
        return self

    def __next__(self) -> DecodedBatch:
        self._submit_until(self._batches_ahead + 1)
        if not self._pending:
            raise StopIteration
        try:
            return self._pending.popleft().result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Start nothing more, and drop what has not begun."""
        self._micro_batches = iter(())
        while self._pending:
            self._pending.popleft().cancel()

    def __enter__(self) -> BatchPrefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit_until(self, limit: int) -> None:
        while len(self._pending) < limit:
            micro_batch = next(self._micro_batches, None)
            if micro_batch is None:
                return
            self._pending.append(self._decoder_pool.submit(micro_batch))


@contextmanager
def open_prefetcher(
    corpus: Corpus, micro_batches: Iterable[MicroBatch], settings: LoaderSettings, *, host: HostFacts, sink: Sink
) -> Iterator[BatchPrefetcher]:
    """The batches of `plan`, made ahead as the settings say; leaving ends the threads."""
    threads = settings.num_workers or host.cpus()
    reason = "as configured" if settings.num_workers else "the CPUs this process may use"
    sink.emit(DecisionEvent("loader.num_workers", threads, reason))
    with (
        DecoderPool(corpus, threads) as decoder_pool,
        BatchPrefetcher(decoder_pool, micro_batches, settings.batches_ahead) as batches,
    ):
        yield batches

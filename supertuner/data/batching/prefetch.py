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
from supertuner.core.events import Decided, Sink
from supertuner.core.host import Host
from supertuner.data.batching.batches import Batch, Decoders, Pending
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.windows import MicroBatch


class Prefetcher:
    """An iterator over batches, and a context manager: leaving it drops what was begun and waits for no batch.

    The decoders are not its own: they may serve several. After an error it is finished, as a generator would be.
    """

    def __init__(self, decoders: Decoders, plan: Iterable[MicroBatch], ahead: int) -> None:
        assert ahead >= 0, "batches cannot be made behind"
        self._decoders = decoders
        self._plan = iter(plan)
        self._ahead = ahead
        self._begun: deque[Pending] = deque()
        self._fill(ahead)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._fill(self._ahead + 1)
        if not self._begun:
            raise StopIteration
        try:
            return self._begun.popleft().result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Start nothing more, and drop what has not begun."""
        self._plan = iter(())
        while self._begun:
            self._begun.popleft().cancel()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, most: int) -> None:
        while len(self._begun) < most:
            micro = next(self._plan, None)
            if micro is None:
                return
            self._begun.append(self._decoders.start(micro))


@contextmanager
def prefetched(
    corpus: Corpus, plan: Iterable[MicroBatch], settings: LoaderSettings, *, host: Host, sink: Sink
) -> Iterator[Prefetcher]:
    """The batches of `plan`, made ahead as the settings say; leaving ends the threads."""
    threads = settings.num_workers or host.cpus()
    reason = "as configured" if settings.num_workers else "the CPUs this process may use"
    sink.emit(Decided("loader.num_workers", threads, reason))
    with Decoders(corpus, threads) as decoders, Prefetcher(decoders, plan, settings.ahead) as batches:
        yield batches

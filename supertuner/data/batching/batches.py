"""Batches: samples of one bucket in one tensor, made by several threads; the same whatever the number of threads.

Decoders release Python's lock, so threads use all CPUs and write straight into the batch: no process, no copy between
processes. Torch's own threads are turned off there, where they would only compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from types import TracebackType
from typing import TYPE_CHECKING

from supertuner.core.types import MediaKind
from supertuner.data.batching.render import caption_of, render
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.windows import MicroBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    bucket: Bucket
    media: torch.Tensor
    """uint8 BCHW of pictures, uint8 BCFHW of clips, float32 BCT of sound."""
    captions: tuple[str, ...]
    datasets: tuple[int, ...]
    """For each sample its dataset's place in the corpus."""
    samples: tuple[int, ...]
    """For each sample its number in its dataset."""
    keys: tuple[str, ...]
    """For each sample its name in its dataset."""
    positions: tuple[int, ...]
    """For each sample its position in the order."""
    turns: tuple[int, ...]
    """For each sample the turn that its changes and its caption were drawn for."""

    def __len__(self) -> int:
        return len(self.positions)


class Pending:
    """A batch in the making."""

    def __init__(self, batch: Batch, rows: Sequence[Future[None]]) -> None:
        self._batch = batch
        self._rows = rows

    def result(self) -> Batch:
        """The batch, when all its samples are there; the first sample's error if one could not be made."""
        for row in self._rows:
            row.result()
        return self._batch

    def cancel(self) -> None:
        for row in self._rows:
            row.cancel()


class Decoders:
    """Threads that make batches of a corpus. A context manager: leaving it ends the threads."""

    def __init__(self, corpus: Corpus, threads: int) -> None:
        self._corpus = corpus
        self.threads = threads
        self._pool = pinned_pool(threads)

    def start(self, micro: MicroBatch) -> Pending:
        """Begin a batch and return at once. Samples are made in the order of the batches that were started."""
        import torch

        draws, corpus = micro.draws, self._corpus
        groups = [corpus.order.groups[group] for group in draws.group]
        samples, turns = draws.sample.tolist(), draws.cycle.tolist()
        parts = [corpus.parts[group.dataset] for group in groups]
        dtype = torch.float32 if micro.bucket.kind is MediaKind.AUDIO else torch.uint8
        media = torch.empty((len(micro), *micro.bucket.shape), dtype=dtype)
        batch = Batch(
            bucket=micro.bucket,
            media=media,
            captions=tuple(caption_of(corpus.seed, *which) for which in zip(parts, samples, turns, strict=True)),
            datasets=tuple(group.dataset for group in groups),
            samples=tuple(samples),
            keys=tuple(part.samples.key(sample) for part, sample in zip(parts, samples, strict=True)),
            positions=tuple(draws.position.tolist()),
            turns=tuple(turns),
        )
        rows = [
            self._pool.submit(render, corpus.seed, parts[i], samples[i], turns[i], micro.bucket, media[i])
            for i in range(len(micro))
        ]
        return Pending(batch, rows)

    def make(self, micro: MicroBatch) -> Batch:
        """A batch, waited for."""
        return self.start(micro).result()

    def close(self) -> None:
        """End the threads; what they are in the middle of is finished, what has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Decoders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pinned_pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which torch computes alone, while the rest of the process keeps its number of threads.

    Torch's setting is per thread once a thread has looked at it, and the number set last is what a new thread finds:
    hence the look, the setting, and the restoring, in this order.
    """
    import torch

    before = torch.get_num_threads()
    ready = Barrier(threads + 1)

    def pin() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode", initializer=pin)
    for _ in range(threads):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(before)
    return pool

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
from supertuner.data.batching.render import caption_for_sample, render_sample
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.micro_batches import MicroBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, slots=True)
class DecodedBatch:
    bucket: Bucket
    media: torch.Tensor
    """uint8 BCHW of pictures, uint8 BCFHW of clips, float32 BCT of sound."""
    captions: tuple[str, ...]
    dataset_indices: tuple[int, ...]
    """For each sample its dataset's place in the corpus."""
    sample_indices: tuple[int, ...]
    """For each sample its number in its dataset."""
    sample_keys: tuple[str, ...]
    """For each sample its name in its dataset."""
    positions: tuple[int, ...]
    """For each sample its position in the order."""
    cycles: tuple[int, ...]
    """For each sample the turn that its changes and its caption were drawn for."""

    def __len__(self) -> int:
        return len(self.positions)


class PendingBatch:
    """A batch in the making."""

    def __init__(self, batch: DecodedBatch, row_futures: Sequence[Future[None]]) -> None:
        self._batch = batch
        self._row_futures = row_futures

    def result(self) -> DecodedBatch:
        """The batch, when all its samples are there; the first sample's error if one could not be made."""
        for row in self._row_futures:
            row.result()
        return self._batch

    def cancel(self) -> None:
        for row in self._row_futures:
            row.cancel()


class DecoderPool:
    """Threads that make batches of a corpus. A context manager: leaving it ends the threads."""

    def __init__(self, corpus: Corpus, threads: int) -> None:
        self._corpus = corpus
        self.threads = threads
        self._pool = single_threaded_torch_pool(threads)

    def submit(self, micro_batch: MicroBatch) -> PendingBatch:
        """Begin a batch and return at once. Samples are made in the order of the batches that were started."""
        import torch

        draws, corpus = micro_batch.draws, self._corpus
        groups = [corpus.order.groups[group] for group in draws.group]
        samples, cycles = draws.sample.tolist(), draws.cycle.tolist()
        datasets = [corpus.datasets[group.dataset_index] for group in groups]
        dtype = torch.float32 if micro_batch.bucket.kind is MediaKind.AUDIO else torch.uint8
        media = torch.empty((len(micro_batch), *micro_batch.bucket.shape), dtype=dtype)
        batch = DecodedBatch(
            bucket=micro_batch.bucket,
            media=media,
            captions=tuple(
                caption_for_sample(corpus.seed, *sample_args)
                for sample_args in zip(datasets, samples, cycles, strict=True)
            ),
            dataset_indices=tuple(group.dataset_index for group in groups),
            sample_indices=tuple(samples),
            sample_keys=tuple(dataset.samples.key(sample) for dataset, sample in zip(datasets, samples, strict=True)),
            positions=tuple(draws.position.tolist()),
            cycles=tuple(cycles),
        )
        row_futures = [
            self._pool.submit(
                render_sample, corpus.seed, datasets[i], samples[i], cycles[i], micro_batch.bucket, media[i]
            )
            for i in range(len(micro_batch))
        ]
        return PendingBatch(batch, row_futures)

    def decode(self, micro_batch: MicroBatch) -> DecodedBatch:
        """A batch, waited for."""
        return self.submit(micro_batch).result()

    def close(self) -> None:
        """End the threads; what they are in the middle of is finished, what has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def single_threaded_torch_pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which torch computes alone, while the rest of the process keeps its number of threads.

    Torch's setting is per thread once a thread has looked at it, and the number set last is what a new thread finds:
    hence the look, the setting, and the restoring, in this order.
    """
    import torch

    previous_threads = torch.get_num_threads()
    ready = Barrier(threads + 1)

    def limit_torch_threads() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode", initializer=limit_torch_threads)
    for _ in range(threads):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(previous_threads)
    return pool

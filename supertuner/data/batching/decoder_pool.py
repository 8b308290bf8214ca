"""DecoderPool: threads that decode samples of one bucket into one tensor; results do not depend on their number.

Decoders release the GIL, so threads use all CPUs and write directly into the batch, without worker processes and
without copies between them. The memory of the samples that are decoded at once is bounded. Torch's intra-op threads
are disabled in these threads, where they would only compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import TYPE_CHECKING

from supertuner.core.closing import CloseOnExit
from supertuner.core.host import HostFacts
from supertuner.core.types import MediaKind
from supertuner.data.batching.render import caption_for_sample, render_sample
from supertuner.data.corpus import Corpus
from supertuner.data.decode.decode_memory import DecodeMemory, decode_memory_limit
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.micro_batches import MicroBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, slots=True)
class DecodedBatch:
    """Samples of one bucket, decoded and augmented. Tuples have one element per sample."""

    bucket: Bucket
    media: torch.Tensor
    """uint8 [B, C, H, W] for images, uint8 [B, C, F, H, W] for clips, float32 [B, C, T] for audio."""
    captions: tuple[str, ...]
    dataset_indices: tuple[int, ...]
    """Index of the sample's dataset in the corpus."""
    sample_indices: tuple[int, ...]
    """Index of the sample in its dataset."""
    sample_keys: tuple[str, ...]
    """Name of the sample in its dataset."""
    positions: tuple[int, ...]
    """Position of the sample in the order."""
    cycles: tuple[int, ...]
    """The cycle whose augmentation and caption were drawn."""

    def __len__(self) -> int:
        return len(self.positions)


class PendingBatch:
    """A batch that is being decoded."""

    def __init__(self, batch: DecodedBatch, row_futures: Sequence[Future[None]]) -> None:
        self._batch, self._row_futures = batch, row_futures

    def result(self) -> DecodedBatch:
        """Wait for the batch. Raises the error of the first sample that failed."""
        for row in self._row_futures:
            row.result()
        return self._batch

    def cancel(self) -> None:
        for row in self._row_futures:
            row.cancel()


class DecoderPool(CloseOnExit):
    """Threads that decode batches of a corpus. A context manager whose exit ends the threads."""

    def __init__(self, corpus: Corpus, threads: int, memory_bytes: int | None = None) -> None:
        """`memory_bytes` bounds the memory of decoding; None: a share of what this host has available."""
        self._corpus = corpus
        self._memory = DecodeMemory(decode_memory_limit(HostFacts()) if memory_bytes is None else memory_bytes)
        self.threads = threads
        self._pool = single_threaded_torch_pool(threads)

    def submit(self, micro_batch: MicroBatch) -> PendingBatch:
        """Start decoding a batch and return immediately. Samples are decoded in the order of submission."""
        import torch

        draws, bucket, corpus = micro_batch.draws, micro_batch.bucket, self._corpus
        dataset_indices = [corpus.order.groups[group].dataset_index for group in draws.group]
        samples, cycles = draws.sample.tolist(), draws.cycle.tolist()
        rows = list(zip([corpus.datasets[index] for index in dataset_indices], samples, cycles, strict=True))
        dtype = torch.float32 if bucket.kind is MediaKind.AUDIO else torch.uint8
        media = torch.empty((len(micro_batch), *bucket.shape), dtype=dtype)
        batch = DecodedBatch(
            bucket=bucket,
            media=media,
            captions=tuple(caption_for_sample(corpus.seed, *row) for row in rows),
            dataset_indices=tuple(dataset_indices),
            sample_indices=tuple(samples),
            sample_keys=tuple(dataset.samples.key(sample) for dataset, sample, _ in rows),
            positions=tuple(draws.position.tolist()),
            cycles=tuple(cycles),
        )
        futures = [
            self._pool.submit(render_sample, corpus.seed, *row, bucket, media[i], self._memory)
            for i, row in enumerate(rows)
        ]
        return PendingBatch(batch, futures)

    def decode(self, micro_batch: MicroBatch) -> DecodedBatch:
        """Decode a batch and wait for it."""
        return self.submit(micro_batch).result()

    def close(self) -> None:
        """End the threads: samples in progress are finished, pending ones are cancelled."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def single_threaded_torch_pool(threads: int) -> ThreadPoolExecutor:
    """A pool in whose threads torch uses one intra-op thread; other threads of the process keep their number.

    Torch's setting becomes local to a thread when the thread first reads it, and a new thread starts with the number
    that was set last by any thread. Hence each pool thread first reads the number and then sets it to 1, and this
    thread restores its own number after all pool threads have done so.
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

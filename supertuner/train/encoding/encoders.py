"""The family's encoders at work: made when something must be encoded, on a thread of their own, dropped afterwards.

Samples are encoded one by one and on one thread: the bits of an entry follow from its sample alone, not from what was
encoded beside it, before a kill or after, ahead or at use.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from supertuner.cache.entries import NamedTensors
from supertuner.cache.fill import EntryIndices, EntryMaker
from supertuner.core.errors import BrokenMediaError, CacheError
from supertuner.data.batching.decoder_pool import DecodedBatch, DecoderPool
from supertuner.data.batching.prefetch import BatchPrefetcher
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.micro_batches import MicroBatch
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.models.spec import Family, ImageTextEncoder, MediaEncoder, ModelDescription, TextEncoder
from supertuner.step.precision import latent_storage_dtype
from supertuner.train.encoding.text_inputs import TextInput
from supertuner.memory.out_of_memory import explain_out_of_memory

T = TypeVar("T")

SAMPLES_AHEAD = 4
"""Samples decoded ahead of the one that is being encoded, for each thread that decodes."""


@dataclass(frozen=True, slots=True)
class EncoderFingerprints:
    """Fingerprints of the files that decide what the encoders compute."""

    media: str
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class EncodingSpec:
    """By what, where and in which precision samples are encoded."""

    family: Family
    model: ModelDescription
    fingerprints: EncoderFingerprints
    device: torch.device
    dtype: torch.dtype
    """What the forward pass computes in. Captions are encoded in it; latents are kept in it, or in bf16 for fp16."""
    out_of_memory_remedy: Callable[[str], str] = str
    """What to do where the device's memory is full, made of what needs less of it."""


class LazyEncoders:
    """Usable from any thread. Close it, or drop what is not needed any more."""

    def __init__(self, spec: EncodingSpec) -> None:
        self._spec = spec
        self._media_encoder: MediaEncoder | None = None
        self._text_encoder: TextEncoder | None = None
        self._truncated_captions = 0
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="encode", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def encode_media(self, sample: torch.Tensor, reference: torch.Tensor | None = None) -> NamedTensors:
        """The entry of one sample (no batch dimension), and of what it was made from."""
        shape = "×".join(map(str, sample.shape))
        remedy = partial(self._spec.out_of_memory_remedy, "lower the dataset's resolution or frames")
        with explain_out_of_memory(f"encoding a sample of {shape} does", remedy):
            return self._run_on_thread(lambda: self._run_media_encoder(sample, reference))

    def encode_text(self, text_input: TextInput) -> NamedTensors:
        remedy = partial(self._spec.out_of_memory_remedy, "free the device: other processes may use it")
        with explain_out_of_memory("the text encoder does", remedy):
            return self._run_on_thread(lambda: self._run_text_encoder(text_input))

    @property
    def truncated_captions(self) -> int:
        """How many captions were longer than the model reads."""
        return self._truncated_captions + (0 if self._text_encoder is None else self._text_encoder.truncated_captions)

    def release(self, kind: str) -> None:
        """Free the encoder of latents or text; it is made again if it is needed again."""
        if kind == "latents":
            self._media_encoder = None
        else:
            self._truncated_captions, self._text_encoder = self.truncated_captions, None
        _free_memory(self._spec.device)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._media_encoder, self._text_encoder = None, None
        _free_memory(self._spec.device)

    def _run_on_thread(self, work: Callable[[], T]) -> T:
        return self._pool.submit(work).result()

    def _run_media_encoder(self, sample: torch.Tensor, reference: torch.Tensor | None) -> NamedTensors:
        if self._media_encoder is None:
            self._media_encoder = self._spec.family.build_media_encoder(self._spec.model, self._spec.device)
        dtype = latent_storage_dtype(self._spec.dtype)
        with torch.no_grad():
            fields = self._media_encoder.encode(sample[None])
            if reference is not None:
                fields["condition"] = self._media_encoder.encode(reference[None])["latents"]
        return {
            name: _to_cpu(tensor[0].to(dtype) if tensor.is_floating_point() else tensor[0])
            for name, tensor in fields.items()
        }

    def _run_text_encoder(self, text_input: TextInput) -> NamedTensors:
        spec = self._spec
        if self._text_encoder is None:
            self._text_encoder = spec.family.build_text_encoder(spec.model, spec.device, spec.dtype)
        with torch.no_grad():
            if (reference := text_input.load_reference()) is None:
                fields = self._text_encoder.encode([text_input.caption])[0]
            else:
                assert isinstance(self._text_encoder, ImageTextEncoder), "only models that edit are given pictures"
                fields = self._text_encoder.encode_with_images([text_input.caption], [reference])[0]
        return {name: _to_cpu(tensor) for name, tensor in fields.items()}


class LazyDecoderPool:
    """Threads that decode, started when first asked for."""

    def __init__(self, corpus: Corpus, threads: int) -> None:
        self._corpus, self._threads = corpus, threads
        self._pool: DecoderPool | None = None

    def __call__(self) -> DecoderPool:
        if self._pool is None:
            self._pool = DecoderPool(self._corpus, self._threads)
        return self._pool

    def close(self) -> None:
        """End the threads; asking again starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def media_entry_maker(
    corpus: Corpus, jobs: SampleDraws, decoders: LazyDecoderPool, encoders: LazyEncoders
) -> EntryMaker:
    """Makes entries of `jobs`: threads decode ahead, the encoder encodes."""

    def make(places: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        groups = corpus.order.groups
        micro_batches = (
            MicroBatch(groups[int(jobs.group[p])].bucket, jobs.take(slice(p, p + 1))) for p in places.tolist()
        )
        decoder_pool = decoders()
        with BatchPrefetcher(decoder_pool, micro_batches, SAMPLES_AHEAD * decoder_pool.threads) as batches:
            for index in places.tolist():
                with broken_media_as_cache_error():
                    batch = next(batches)
                    reference = load_reference_for(corpus, batch, 0)
                yield index, encoders.encode_media(batch.media[0], reference)

    return make


def load_reference_for(corpus: Corpus, batch: DecodedBatch, row: int) -> torch.Tensor | None:
    """The picture that a sample of a batch was made from, if it has one."""
    references = corpus.datasets[batch.dataset_indices[row]].references
    return None if references is None else references.load_image(batch.sample_indices[row])


def text_entry_maker(texts: Sequence[TextInput], encoders: LazyEncoders) -> EntryMaker:
    def make(places: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        for index in places.tolist():
            with broken_media_as_cache_error():
                entry = encoders.encode_text(texts[index])
            yield index, entry

    return make


@contextmanager
def broken_media_as_cache_error() -> Generator[None, None, None]:
    """A file that passed staging and does not decode: the remedy is to let staging look deeper."""
    try:
        yield
    except BrokenMediaError as error:
        remedy = 'set check: "decode" for that dataset, and staging sets such files aside; or remove the file'
        raise CacheError(f"{error}; {remedy}") from error


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

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

from supertuner.cache.entries import Tensors
from supertuner.cache.fill import Make, Places
from supertuner.core.errors import BrokenMedia, CacheError
from supertuner.data.batching.batches import Batch, Decoders
from supertuner.data.batching.prefetch import Prefetcher
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.order import Draws
from supertuner.data.ordering.windows import MicroBatch
from supertuner.models.spec import Family, MediaEncoder, Model, PictureTextEncoder, TextEncoder
from supertuner.step.precision import stored_dtype
from supertuner.train.encoding.text_inputs import Told
from supertuner.train.out_of_memory import fitting

T = TypeVar("T")

AHEAD = 4
"""Samples decoded ahead of the one that is being encoded, for each thread that decodes."""


@dataclass(frozen=True, slots=True)
class Identities:
    """Fingerprints of the files that decide what the encoders compute."""

    media: str
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class Encoding:
    """By what, where and in which precision samples are encoded."""

    family: Family
    model: Model
    identities: Identities
    device: torch.device
    dtype: torch.dtype
    """What the forward pass computes in. Captions are encoded in it; latents are kept in it, or in bf16 for fp16."""
    remedy: Callable[[str], str] = str
    """What to do where the device's memory is full, made of what needs less of it."""


class Encoders:
    """Usable from any thread. Close it, or drop what is not needed any more."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._media: MediaEncoder | None = None
        self._text: TextEncoder | None = None
        self._cut = 0
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="encode", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def media(self, sample: torch.Tensor, original: torch.Tensor | None = None) -> Tensors:
        """The entry of one sample (no batch dimension), and of what it was made from."""
        shape = "×".join(map(str, sample.shape))
        less = partial(self._encoding.remedy, "lower the dataset's resolution or frames")
        with fitting(f"encoding a sample of {shape} does", less):
            return self._alone(lambda: self._encode_media(sample, original))

    def text(self, told: Told) -> Tensors:
        less = partial(self._encoding.remedy, "free the device: other processes may use it")
        with fitting("the text encoder does", less):
            return self._alone(lambda: self._encode_text(told))

    @property
    def cut(self) -> int:
        """How many captions were longer than the model reads."""
        return self._cut + (0 if self._text is None else self._text.cut)

    def drop(self, what: str) -> None:
        """Free the encoder of latents or text; it is made again if it is needed again."""
        if what == "latents":
            self._media = None
        else:
            self._cut, self._text = self.cut, None
        _free(self._encoding.device)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._media, self._text = None, None
        _free(self._encoding.device)

    def _alone(self, work: Callable[[], T]) -> T:
        return self._pool.submit(work).result()

    def _encode_media(self, sample: torch.Tensor, original: torch.Tensor | None) -> Tensors:
        if self._media is None:
            self._media = self._encoding.family.media_encoder(self._encoding.model, self._encoding.device)
        dtype = stored_dtype(self._encoding.dtype)
        with torch.no_grad():
            fields = self._media.encode(sample[None])
            if original is not None:
                fields["condition"] = self._media.encode(original[None])["latents"]
        return {name: _kept(one[0].to(dtype) if one.is_floating_point() else one[0]) for name, one in fields.items()}

    def _encode_text(self, told: Told) -> Tensors:
        of = self._encoding
        if self._text is None:
            self._text = of.family.text_encoder(of.model, of.device, of.dtype)
        with torch.no_grad():
            if (picture := told.picture()) is None:
                fields = self._text.encode([told.caption])[0]
            else:
                assert isinstance(self._text, PictureTextEncoder), "only models that edit are given pictures"
                fields = self._text.encode_of([told.caption], [picture])[0]
        return {name: _kept(one) for name, one in fields.items()}


class LazyDecoders:
    """Threads that decode, started when first asked for."""

    def __init__(self, corpus: Corpus, threads: int) -> None:
        self._corpus, self._threads = corpus, threads
        self._made: Decoders | None = None

    def __call__(self) -> Decoders:
        if self._made is None:
            self._made = Decoders(self._corpus, self._threads)
        return self._made

    def close(self) -> None:
        """End the threads; asking again starts new ones."""
        if self._made is not None:
            self._made.close()
            self._made = None


def media_maker(corpus: Corpus, jobs: Draws, decoders: LazyDecoders, encoders: Encoders) -> Make:
    """Makes entries of `jobs`: threads decode ahead, the encoder encodes."""

    def make(places: Places) -> Generator[tuple[int, Tensors], None, None]:
        groups = corpus.order.groups
        plan = (MicroBatch(groups[int(jobs.group[p])].bucket, jobs.take(slice(p, p + 1))) for p in places.tolist())
        crew = decoders()
        with Prefetcher(crew, plan, AHEAD * crew.threads) as batches:
            for place in places.tolist():
                with broken_at_caching():
                    batch = next(batches)
                    original = original_of(corpus, batch, 0)
                yield place, encoders.media(batch.media[0], original)

    return make


def original_of(corpus: Corpus, batch: Batch, row: int) -> torch.Tensor | None:
    """The picture that a sample of a batch was made from, if it has one."""
    originals = corpus.parts[batch.datasets[row]].originals
    return None if originals is None else originals.picture(batch.samples[row])


def text_maker(texts: Sequence[Told], encoders: Encoders) -> Make:
    def make(places: Places) -> Generator[tuple[int, Tensors], None, None]:
        for place in places.tolist():
            with broken_at_caching():
                made = encoders.text(texts[place])
            yield place, made

    return make


@contextmanager
def broken_at_caching() -> Generator[None, None, None]:
    """A file that passed staging and does not decode: the remedy is to let staging look deeper."""
    try:
        yield
    except BrokenMedia as error:
        remedy = 'set check: "decode" for that dataset, and staging sets such files aside; or remove the file'
        raise CacheError(f"{error}; {remedy}") from error


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""Runs the family's VAE and text encoder on samples and captions; encoders are loaded on first use and released after.

Samples are encoded one by one on one thread, so that the bits of an entry depend on its sample alone: not on the rest
of a batch, on an interruption, or on whether it is encoded ahead or when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from supertuner.cache.entries import EntryIndices, NamedTensors
from supertuner.core.errors import BrokenMediaError, CacheError
from supertuner.data.batching.decoder_pool import DecodedBatch, DecoderPool
from supertuner.data.batching.prefetch import BatchPrefetcher
from supertuner.data.batching.render import caption_for_sample
from supertuner.data.corpus import Corpus
from supertuner.data.corpus.reference_images import ReferenceImages
from supertuner.data.ordering.micro_batches import MicroBatch
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.memory.out_of_memory import explain_out_of_memory, release_unused_memory
from supertuner.models.spec import Family, ImageTextEncoder, MediaEncoder, ModelDescription, TextEncoder
from supertuner.step.precision import latent_storage_dtype

SAMPLES_AHEAD = 4
"""Samples that are decoded ahead of the encoder, per decoding thread."""


@dataclass(frozen=True, slots=True)
class EncoderFingerprints:
    """Digests of the files that determine what the encoders compute."""

    media: str
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class EncodingSpec:
    """Which encoders encode samples, on which device, and in which precision."""

    family: Family
    model: ModelDescription
    fingerprints: EncoderFingerprints
    device: torch.device
    dtype: torch.dtype
    """Precision of the forward pass. Captions are encoded in it; latents are stored in it, or in bf16 if it is fp16."""
    out_of_memory_remedy: Callable[[str], str] = str
    """Extends a remedy for a full device by what else uses its memory."""


@dataclass(frozen=True, slots=True)
class TextInput:
    """What the text encoder receives for a sample. Samples with equal inputs share one cache entry."""

    caption: str
    references: ReferenceImages | None = None
    """For editing models: the dataset's reference images."""
    sample_index: int = 0
    """Which reference image. 0 without references, so that equal captions compare equal."""

    @classmethod
    def for_sample(cls, caption: str, references: ReferenceImages | None, sample: int) -> TextInput:
        return cls(caption) if references is None else cls(caption, references, sample)

    def cache_key_bytes(self) -> bytes:
        """Everything that determines the encoding, except the encoder's own fingerprint."""
        caption = self.caption.encode()
        if self.references is None:
            return caption
        return caption + b"\0" + self.references.cache_key_bytes(self.sample_index)

    def load_reference(self) -> torch.Tensor | None:
        return None if self.references is None else self.references.load_image(self.sample_index)


def text_inputs_for(corpus: Corpus, draws: SampleDraws, variations: int | None = None) -> list[TextInput]:
    """The text input of each draw, with the caption that its cycle draws.

    With `variations`, the order of shuffled tags is that of the cycle modulo this number, as in cached texts.
    """
    text_inputs = []
    for group, sample, cycle in zip(draws.group.tolist(), draws.sample.tolist(), draws.cycle.tolist(), strict=True):
        dataset = corpus.dataset_of_group(group)
        tag_cycle = None if variations is None else cycle % variations
        caption = caption_for_sample(corpus.seed, dataset, sample, cycle, tag_cycle)
        text_inputs.append(TextInput.for_sample(caption, dataset.references, sample))
    return text_inputs


class LazyEncoders:
    """Decodes and encodes the samples of a corpus. VAE, text encoder and decoding threads start on first use.

    Thread-safe: both encoders run on one thread of this object.
    """

    def __init__(self, spec: EncodingSpec, corpus: Corpus, decoding_threads: int, decoding_bytes: int) -> None:
        """`decoding_bytes` bounds the memory of samples that are decoded at once."""
        self.corpus = corpus
        self._spec, self._decoding_threads, self._decoding_bytes = spec, decoding_threads, decoding_bytes
        self._decoders: DecoderPool | None = None
        self._media_encoder: MediaEncoder | None = None
        self._text_encoder: TextEncoder | None = None
        self._truncated_captions = 0
        threads = (torch.get_num_threads(),)
        self._pool = ThreadPoolExecutor(1, "encode", initializer=torch.set_num_threads, initargs=threads)

    def encode_batch(self, micro_batch: MicroBatch) -> NamedTensors:
        """The latents of all samples of a micro-batch."""
        with _broken_media_as_cache_error():
            batch = self.decoders().decode(micro_batch)
            references = [self._load_reference(batch, row) for row in range(len(batch))]
        rows = [self._encode_media(*pair) for pair in zip(batch.media, references, strict=True)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def encode_text(self, text_input: TextInput) -> NamedTensors:
        remedy = partial(self._spec.out_of_memory_remedy, "free the device: other processes may use it")
        with explain_out_of_memory("the text encoder does", remedy):
            return self._pool.submit(self._run_text_encoder, text_input).result()

    def make_media(self, jobs: SampleDraws, indices: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        """Makes the latents of `jobs` by index: threads decode ahead, the VAE encodes one sample after the other."""
        numbers, groups, decoders = indices.tolist(), self.corpus.order.groups, self.decoders()
        micro_batches = (MicroBatch(groups[int(jobs.group[i])].bucket, jobs.take(slice(i, i + 1))) for i in numbers)
        with BatchPrefetcher(decoders, micro_batches, SAMPLES_AHEAD * decoders.threads) as batches:
            for index in numbers:
                with _broken_media_as_cache_error():
                    batch = next(batches)
                    reference = self._load_reference(batch, 0)
                yield index, self._encode_media(batch.media[0], reference)

    def make_texts(
        self, texts: Sequence[TextInput], indices: EntryIndices
    ) -> Generator[tuple[int, NamedTensors], None, None]:
        """Makes the encodings of `texts` by index."""
        for index in indices.tolist():
            with _broken_media_as_cache_error():
                entry = self.encode_text(texts[index])
            yield index, entry

    def decoders(self) -> DecoderPool:
        """The threads that decode media."""
        if self._decoders is None:
            self._decoders = DecoderPool(self.corpus, self._decoding_threads, self._decoding_bytes)
        return self._decoders

    @property
    def truncated_captions(self) -> int:
        """How many encoded captions were longer than the model's limit and were cut off."""
        return self._truncated_captions + (0 if self._text_encoder is None else self._text_encoder.truncated_captions)

    def release(self, kind: str) -> None:
        """Free what encodes `latents` or `text`; it is loaded again when it is needed again."""
        if kind == "latents":
            self._media_encoder = None
            self._close_decoders()
        else:
            self._truncated_captions, self._text_encoder = self.truncated_captions, None
        release_unused_memory(self._spec.device)

    def close(self) -> None:
        self._close_decoders()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._media_encoder, self._text_encoder = None, None
        release_unused_memory(self._spec.device)

    def _close_decoders(self) -> None:
        if self._decoders is not None:
            self._decoders.close()
            self._decoders = None

    def _load_reference(self, batch: DecodedBatch, row: int) -> torch.Tensor | None:
        """The reference image of a sample of a batch; None if its dataset has none."""
        references = self.corpus.datasets[batch.dataset_indices[row]].references
        return None if references is None else references.load_image(batch.sample_indices[row])

    def _encode_media(self, sample: torch.Tensor, reference: torch.Tensor | None) -> NamedTensors:
        """The entry of one sample (no batch dimension), with its reference image's latents as `condition`."""
        shape = "×".join(map(str, sample.shape))
        remedy = partial(self._spec.out_of_memory_remedy, "lower the dataset's resolution or frames")
        with explain_out_of_memory(f"encoding a sample of {shape} does", remedy):
            return self._pool.submit(self._run_media_encoder, sample, reference).result()

    def _run_media_encoder(self, sample: torch.Tensor, reference: torch.Tensor | None) -> NamedTensors:
        if self._media_encoder is None:
            self._media_encoder = self._spec.family.build_media_encoder(self._spec.model, self._spec.device)
        dtype = latent_storage_dtype(self._spec.dtype)
        with torch.no_grad():
            fields = self._media_encoder.encode(sample[None])
            if reference is not None:
                fields["condition"] = self._media_encoder.encode(reference[None])["latents"]
        return {name: _to_cpu(t[0].to(dtype) if t.is_floating_point() else t[0]) for name, t in fields.items()}

    def _run_text_encoder(self, text_input: TextInput) -> NamedTensors:
        spec = self._spec
        if self._text_encoder is None:
            self._text_encoder = spec.family.build_text_encoder(spec.model, spec.device, spec.dtype)
        with torch.no_grad():
            if (reference := text_input.load_reference()) is None:
                fields = self._text_encoder.encode([text_input.caption])[0]
            else:
                assert isinstance(self._text_encoder, ImageTextEncoder), "only editing models have reference images"
                fields = self._text_encoder.encode_with_images([text_input.caption], [reference])[0]
        return {name: _to_cpu(tensor) for name, tensor in fields.items()}


@contextmanager
def _broken_media_as_cache_error() -> Generator[None, None, None]:
    """Convert BrokenMediaError of a file that passed staging into a CacheError with the remedy: a stricter check."""
    try:
        yield
    except BrokenMediaError as error:
        remedy = 'set check: "decode" for that dataset, so that staging sets such files aside; or remove the file'
        raise CacheError(f"{error}; {remedy}") from error


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()

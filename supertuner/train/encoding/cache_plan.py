"""Which latents and text encodings of a corpus are cached, and under which keys. Nothing is opened or encoded here.

Media: for each bucket group, every sample in each variation that is kept. Text: captions are listed from the samples,
not drawn: every caption that can be chosen, with the trigger word, and the empty one where captions can be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.cache.entries import EntryIndices, EntryRequest
from supertuner.cache.keys import CacheNamespace, EntryKeys, empty_keys
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError
from supertuner.data.batching.augment import AugmentationParams
from supertuner.data.batching.captions import DROPPED_CAPTION, choose_caption_index, possible_captions
from supertuner.data.batching.render import augmentation_for_sample, rng_for_sample, transform_key_bytes
from supertuner.data.cache_policy import CacheMode, DatasetCachePolicy, dataset_cache_policy, varying_media_settings
from supertuner.data.corpus import Corpus, CorpusDataset
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.models.spec import Family, ModelDescription
from supertuner.step.precision import latent_storage_dtype
from supertuner.train.encoding.encoders import EncoderFingerprints, LazyEncoders, TextInput

if TYPE_CHECKING:
    import torch


CacheKind: TypeAlias = Literal["latents", "text"]
CACHE_KINDS: tuple[CacheKind, ...] = ("latents", "text")
NO_KEY = b""
"""In an array of keys: this entry is not needed."""


@dataclass(frozen=True, eq=False, slots=True)
class CacheRequirements:
    """What follows from the settings alone: the cache policy of each dataset and the namespaces of the keys."""

    corpus: Corpus
    policies: tuple[DatasetCachePolicy, ...]
    """For each dataset of the corpus."""
    media_namespace: CacheNamespace
    text_namespace: CacheNamespace

    def namespace(self, kind: CacheKind) -> CacheNamespace:
        return self.media_namespace if kind == "latents" else self.text_namespace

    def modes(self, kind: CacheKind) -> list[CacheMode]:
        """For each dataset, the mode of its entries of a kind."""
        return [policy.media_mode if kind == "latents" else policy.text_mode for policy in self.policies]

    def encodes_in_training(self, kind: CacheKind) -> bool:
        """Whether entries of a kind are encoded during training: each epoch, or when they are used."""
        return any(mode is not CacheMode.CACHED for mode in self.modes(kind))


@dataclass(frozen=True, eq=False, slots=True)
class MediaPlan:
    """All latents that are cached once: for each bucket group, each sample in each variation that is kept."""

    jobs: SampleDraws
    """What to encode: group, sample and cycle. The other columns have no meaning."""
    keys: EntryKeys
    """One per job; NO_KEY if the entry is not needed."""
    job_offsets: tuple[int | None, ...]
    """For each group, the index of its first job; None if the group is not cached."""
    variations: tuple[int, ...]
    """For each group, how many variations of a sample are kept."""


@dataclass(frozen=True, eq=False, slots=True)
class CaptionTable:
    """The texts that each sample of a dataset can have."""

    dataset: CorpusDataset
    offsets: NDArray[np.int64]
    """For each sample, where its texts begin in `text_indices`; the last element is the total."""
    text_indices: NDArray[np.int32]
    """Indices into TextPlan.texts: for each sample its captions, each in every variation that is kept."""
    variations: int
    empty_text_indices: NDArray[np.int32]
    """For each sample the index of its text without a caption, which is used where captions are dropped."""

    def text_index(self, seed: int, sample: int, cycle: int) -> int | None:
        """Index of the text that a sample has in a cycle; None if the sample was not planned."""
        begin, rules = int(self.offsets[sample]), self.dataset.settings.captions
        count = (int(self.offsets[sample + 1]) - begin) // self.variations
        if not count:
            return None
        caption_index = 0
        if count > 1 or rules.dropout:
            caption_index = choose_caption_index(count, rules, rng_for_sample(seed, self.dataset, sample, cycle))
        if caption_index == DROPPED_CAPTION:
            return int(self.empty_text_indices[sample])
        return int(self.text_indices[begin + caption_index * self.variations + cycle % self.variations])


@dataclass(frozen=True, eq=False, slots=True)
class TextPlan:
    """All text inputs that are cached once, without duplicates."""

    texts: Sequence[TextInput]
    tables: tuple[CaptionTable | None, ...]
    """For each dataset; None if its captions are not cached once."""


@dataclass(frozen=True, eq=False, slots=True)
class CachePlan:
    """All entries that are cached once. As large as the corpus, and not needed after the caches are filled."""

    media: MediaPlan
    text: TextPlan
    text_keys: EntryKeys

    def request(self, kind: CacheKind, encoders: LazyEncoders) -> EntryRequest:
        if kind == "text":
            make = partial(encoders.make_texts, self.text.texts)
            return EntryRequest(self.text_keys, make, title="encoding captions")
        keys, jobs = self.media.keys, self.media.jobs
        if not (needed := keys != NO_KEY).all():
            keys, jobs = keys[needed], jobs.take(np.flatnonzero(needed))
        return media_request(encoders, jobs, keys, "encoding samples")

    def keys(self, kind: CacheKind) -> EntryKeys:
        """Keys of all entries of a kind that are cached once."""
        return self.media.keys[self.media.keys != NO_KEY] if kind == "latents" else self.text_keys


def cache_requirements(
    config: RunConfig, corpus: Corpus, fingerprints: EncoderFingerprints, dtype: torch.dtype
) -> CacheRequirements:
    policies = tuple(dataset_cache_policy(dataset.settings, config.cache_config) for dataset in corpus.datasets)
    namespaces = cache_namespaces(fingerprints, dtype)
    return CacheRequirements(corpus, policies, namespaces["latents"], namespaces["text"])


def cache_namespaces(fingerprints: EncoderFingerprints, dtype: torch.dtype) -> dict[CacheKind, CacheNamespace]:
    """The namespaces of the entries that these encoders make for a run that computes in `dtype`."""
    return {
        "latents": CacheNamespace("latents", fingerprints.media, _dtype_name(latent_storage_dtype(dtype))),
        "text": CacheNamespace("text", fingerprints.text, _dtype_name(dtype)),
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build_cache_plan(requirements: CacheRequirements, until: int | None = None) -> CachePlan:
    """Plan all entries. `until` is the position at which the run ends: samples drawn only later are omitted."""
    text = _build_text_plan(requirements, until)
    text_keys = requirements.text_namespace.entry_keys(text_input.cache_key_bytes() for text_input in text.texts)
    return CachePlan(_build_media_plan(requirements, until), text, text_keys)


def _samples_drawn_before(corpus: Corpus, until: int | None) -> list[NDArray[np.int64]] | None:
    """For each group the samples drawn before a position; None if that is at least an epoch, and so all samples."""
    if until is None or until >= corpus.order.epoch_length(0):
        return None
    draws = corpus.order.slice(0, until)
    return [np.unique(draws.sample[draws.group == number]) for number in range(len(corpus.order.groups))]


def _build_media_plan(requirements: CacheRequirements, until: int | None) -> MediaPlan:
    corpus, groups = requirements.corpus, requirements.corpus.order.groups
    drawn = _samples_drawn_before(corpus, until)
    group_policies = [requirements.policies[group.dataset_index] for group in groups]
    variations = tuple(policy.media_variations for policy in group_policies)
    parts, job_offsets, count = [np.zeros((3, 0), np.int64)], [], 0
    for number, group in enumerate(groups):
        cached = group_policies[number].media_mode is CacheMode.CACHED
        job_offsets.append(count if cached else None)
        if cached:
            sample = np.tile(group.sample_indices.astype(np.int64), variations[number])
            cycle = np.repeat(np.arange(variations[number], dtype=np.int64), len(group.sample_indices))
            parts.append(np.stack([np.full(len(sample), number, np.int64), sample, cycle]))
            count += len(sample)
    unused = np.zeros(count, np.int64)
    jobs = SampleDraws(unused, unused, *np.concatenate(parts, axis=1))
    keys = media_keys(corpus, jobs, requirements.media_namespace)
    for number, begin in enumerate(job_offsets):
        if drawn is not None and begin is not None:
            rows = slice(begin, begin + variations[number] * len(groups[number].sample_indices))
            keys[rows][~np.isin(jobs.sample[rows], drawn[number])] = NO_KEY
    return MediaPlan(jobs, keys, tuple(job_offsets), variations)


def media_keys(corpus: Corpus, draws: SampleDraws, namespace: CacheNamespace) -> EntryKeys:
    """The cache key of each draw's latents: from the file's bytes, the bucket, and the augmentation of its cycle."""
    keys = np.zeros(len(draws), empty_keys().dtype)
    digests: dict[int, NDArray[np.uint64]] = {}
    for number in np.unique(draws.group):
        rows = np.flatnonzero(draws.group == number)
        group = corpus.order.groups[int(number)]
        dataset = corpus.datasets[group.dataset_index]
        if group.dataset_index not in digests:
            digests[group.dataset_index] = dataset.samples.content_digests()
        content = [row.tobytes() for row in digests[group.dataset_index][draws.sample[rows]]]
        if (references := dataset.references) is not None:
            samples = draws.sample[rows].tolist()
            content = [row + references.cache_key_bytes(i) for row, i in zip(content, samples, strict=True)]
        keys[rows] = _group_keys(corpus.seed, dataset, group.bucket, content, draws.take(rows), namespace)
    return keys


def _group_keys(
    seed: int, dataset: CorpusDataset, bucket: Bucket, rows: list[bytes], draws: SampleDraws, namespace: CacheNamespace
) -> EntryKeys:
    """Keys of draws of one group. Without augmentation all share one transform: a million keys take about a second."""
    if not varying_media_settings(dataset.settings):
        return namespace.entry_keys(rows, transform_key_bytes(dataset.settings, bucket, AugmentationParams()))
    keys = np.zeros(len(draws), empty_keys().dtype)
    for at, (row, sample, cycle) in enumerate(zip(rows, draws.sample.tolist(), draws.cycle.tolist(), strict=True)):
        augmentation = augmentation_for_sample(seed, dataset, sample, cycle)
        keys[at] = namespace.entry_keys([row], transform_key_bytes(dataset.settings, bucket, augmentation))[0]
    return keys


def media_request(encoders: LazyEncoders, jobs: SampleDraws, keys: EntryKeys, title: str) -> EntryRequest:
    """Requests the latents of `jobs`. Their sizes are proportional to the number of values in their media."""
    volumes = np.zeros(len(encoders.corpus.order.groups))
    for number, group in enumerate(encoders.corpus.order.groups):
        references = encoders.corpus.datasets[group.dataset_index].references
        reference_volume = 0 if references is None else 3 * prod(references.image_size(group.bucket))
        volumes[number] = prod(group.bucket.shape) + reference_volume

    def sizes(indices: EntryIndices) -> NDArray[np.float64]:
        return volumes[jobs.group[indices]]

    return EntryRequest(keys, partial(encoders.make_media, jobs), sizes, title)


def _build_text_plan(requirements: CacheRequirements, until: int | None) -> TextPlan:
    corpus = requirements.corpus
    texts: dict[TextInput, int] = {}
    drawn, tables = _samples_drawn_before(corpus, until), list[CaptionTable | None]()
    for dataset_index, (dataset, policy) in enumerate(zip(corpus.datasets, requirements.policies, strict=True)):
        if policy.text_mode is not CacheMode.CACHED:
            tables.append(None)
            continue
        used = np.unique(dataset.members.samples)
        if drawn is not None:
            groups = [g for g, group in enumerate(corpus.order.groups) if group.dataset_index == dataset_index]
            used = np.unique(np.concatenate([np.zeros(0, np.int64), *(drawn[g] for g in groups)]))
        tables.append(_build_caption_table(corpus.seed, dataset, used, policy.text_variations, texts))
    return TextPlan(tuple(texts), tuple(tables))


def _build_caption_table(
    seed: int, dataset: CorpusDataset, used: NDArray[np.integer[Any]], variations: int, texts: dict[TextInput, int]
) -> CaptionTable:
    """`texts` gives each distinct text input of the corpus an index; new ones are added to it."""
    rules, sample_count = dataset.settings.captions, len(dataset.samples)
    counts, text_indices = np.zeros(sample_count, np.int64), list[int]()
    empty_text_indices = np.zeros(sample_count, np.int32)

    def index_of(text: str, sample: int) -> int:
        return texts.setdefault(TextInput.for_sample(text, dataset.references, sample), len(texts))

    for sample in used.tolist():
        if rules.dropout:
            empty_text_indices[sample] = index_of("", sample)
        captions = dataset.samples.captions(sample)
        if rules.shuffle_tags:
            rngs = [rng_for_sample(seed, dataset, sample, variation) for variation in range(variations)]
            by_variation = [possible_captions(captions, rules, rng) for rng in rngs]
        else:
            by_variation = [possible_captions(captions, rules)] * variations
        sample_texts = [index_of(text, sample) for caption in zip(*by_variation, strict=True) for text in caption]
        counts[sample] = len(sample_texts)
        text_indices += sample_texts
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return CaptionTable(dataset, offsets, np.array(text_indices, np.int32), variations, empty_text_indices)


def require_supported_buckets(corpus: Corpus, family: Family, model: ModelDescription) -> None:
    """Raise ModelError, with dataset, bucket, reason and remedy, for the first bucket that the model cannot take."""
    _require_references(corpus, model)
    for group in corpus.order.groups:
        bucket = group.bucket
        where = f"datasets[{group.dataset_id}], bucket {bucket.label} ({len(group.sample_indices)} samples)"
        if bucket.kind not in model.media_kinds:
            kinds = " and ".join(sorted(model.media_kinds))
            raise ModelError(f"{where}: {model.title} is trained on {kinds}, not on {bucket.kind}; remove that dataset")
        if (reason := family.unsupported_reason(model, bucket.shape)) is not None:
            raise ModelError(f"{where}: {reason}; change bucket_step, resolution or frames of that dataset")


def _require_references(corpus: Corpus, model: ModelDescription) -> None:
    resolutions = {dataset.settings.conditioning_resolution for dataset in corpus.datasets}
    for dataset in corpus.datasets:
        key_path = f"datasets[{dataset.settings.id}]"
        if model.edits_images and dataset.references is None:
            raise ModelError(f"{key_path}: {model.title} learns to edit images; name their folder in conditioning_dir")
        if not model.edits_images and dataset.references is not None:
            raise ModelError(f"{key_path}: {model.title} does not take reference images; remove conditioning_dir")
        if model.edits_images and len(resolutions) > 1:
            raise ModelError(f"{key_path}: conditioning_resolution must be equal in all datasets: they share batches")

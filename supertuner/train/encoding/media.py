"""Which encoded media a corpus needs, under which keys, and where a batch finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from supertuner.cache.entries import EntryRefs
from supertuner.cache.keys import CacheNamespace, EntryKeys, empty_keys
from supertuner.data.batching.augment import AugmentationParams
from supertuner.data.batching.render import augmentation_for_sample
from supertuner.data.cache_policy import CacheMode, DatasetCachePolicy
from supertuner.data.content_key import transform_key_bytes, varying_media_settings
from supertuner.data.corpus import Corpus, CorpusDataset
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.sample_order import SampleDraws

NO_KEY = b""


@dataclass(frozen=True, eq=False, slots=True)
class MediaPlan:
    """Everything that is cached once: for each group its samples in each turn that is kept."""

    jobs: SampleDraws
    """What to make: group, sample and turn (`cycle`); the other columns have no meaning."""
    keys: EntryKeys
    """One for each job; NO_KEY for what is not needed."""
    job_offsets: tuple[int | None, ...]
    """For each group of the order, where its jobs begin; None if it is not cached."""
    variations: tuple[int, ...]
    """For each group, how many turns are kept."""


class MediaTable:
    """From draws to entries: arrays, no hashing."""

    def __init__(
        self, corpus: Corpus, job_offsets: Sequence[int | None], variations: Sequence[int], refs: EntryRefs
    ) -> None:
        """`begins` and `turns` are the plan's, and `refs` has one for each of its jobs."""
        self._sample_indices = [group.sample_indices for group in corpus.order.groups]
        self._variations = variations
        self._refs = [
            None
            if begin is None
            else refs[begin : begin + variation_count * len(members)].reshape(variation_count, len(members))
            for begin, variation_count, members in zip(job_offsets, variations, self._sample_indices, strict=True)
        ]

    def is_cached(self, group: int) -> bool:
        return self._refs[group] is not None

    def find(self, group: int, samples: NDArray[np.int64], cycles: NDArray[np.int64]) -> EntryRefs:
        """Where the entries of samples of one group are."""
        table = self._refs[group]
        assert table is not None, f"group {group} is not cached"
        columns = np.searchsorted(self._sample_indices[group], samples.astype(np.uint32))
        refs: EntryRefs = table[cycles % self._variations[group], columns]
        return refs


def build_media_plan(
    corpus: Corpus, policies: Sequence[DatasetCachePolicy], namespace: CacheNamespace, until: int | None
) -> MediaPlan:
    """Jobs and keys. With `until`, a position inside the first epoch, only samples drawn before it."""
    drawn = samples_drawn_before(corpus, until)
    groups = corpus.order.groups
    group_policies = [policies[group.dataset_index] for group in groups]
    variations = tuple(policy.media_variations for policy in group_policies)
    jobs, job_offsets, count = [], [], 0
    for number, group in enumerate(groups):
        cached = group_policies[number].media_mode is CacheMode.CACHED
        job_offsets.append(count if cached else None)
        if cached:
            jobs.append(_group_jobs(number, group.sample_indices, variations[number]))
            count += len(jobs[-1])
    all_jobs = _concatenate_jobs(jobs)
    keys = media_keys(corpus, all_jobs, namespace)
    for number, begin in enumerate(job_offsets):
        if drawn is not None and begin is not None:
            rows = slice(begin, begin + variations[number] * len(groups[number].sample_indices))
            keys[rows][~np.isin(all_jobs.sample[rows], drawn[number])] = NO_KEY
    return MediaPlan(all_jobs, keys, tuple(job_offsets), variations)


def media_keys(corpus: Corpus, draws: SampleDraws, namespace: CacheNamespace) -> EntryKeys:
    """The key of each draw's media, from its bytes, its bucket and the change of its turn."""
    keys = np.zeros(len(draws), empty_keys().dtype)
    contents: dict[int, NDArray[np.uint64]] = {}
    for number in np.unique(draws.group).tolist():
        rows = np.flatnonzero(draws.group == number)
        group = corpus.order.groups[number]
        dataset = corpus.datasets[group.dataset_index]
        if group.dataset_index not in contents:
            contents[group.dataset_index] = dataset.samples.content_digests()
        content = [row.tobytes() for row in contents[group.dataset_index][draws.sample[rows]]]
        if (references := dataset.references) is not None:
            samples = draws.sample[rows].tolist()
            content = [row + references.cache_key_bytes(sample) for row, sample in zip(content, samples, strict=True)]
        keys[rows] = _group_keys(corpus.seed, dataset, group.bucket, content, draws.take(rows), namespace)
    return keys


def _group_keys(
    seed: int, dataset: CorpusDataset, bucket: Bucket, rows: list[bytes], draws: SampleDraws, namespace: CacheNamespace
) -> EntryKeys:
    """Keys of draws of one group. Samples that never change share a transform, and a million take a second."""
    if not varying_media_settings(dataset.settings):
        return namespace.entry_keys(rows, transform_key_bytes(dataset.settings, bucket, AugmentationParams()))
    keys = np.zeros(len(draws), empty_keys().dtype)
    for at, (row, sample, cycle) in enumerate(zip(rows, draws.sample.tolist(), draws.cycle.tolist(), strict=True)):
        augmentation = augmentation_for_sample(seed, dataset, sample, cycle)
        keys[at] = namespace.entry_keys([row], transform_key_bytes(dataset.settings, bucket, augmentation))[0]
    return keys


def relative_job_sizes(corpus: Corpus, jobs: SampleDraws) -> Callable[[NDArray[np.intp]], NDArray[np.float64]]:
    """For places of jobs, how large their latents are in relation to each other: like the media that they are of."""
    volume = np.array(
        [_media_volume(corpus.datasets[group.dataset_index], group.bucket) for group in corpus.order.groups]
    )

    def sizes(places: NDArray[np.intp]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = volume[jobs.group[places]]
        return found

    return sizes


def _media_volume(dataset: CorpusDataset, bucket: Bucket) -> float:
    reference_volume = 0 if dataset.references is None else 3 * prod(dataset.references.image_size(bucket))
    return float(prod(bucket.shape) + reference_volume)


def samples_drawn_before(corpus: Corpus, until: int | None) -> list[NDArray[np.int64]] | None:
    """For each group the samples drawn before a position; None if that is at least an epoch, and so all of them."""
    if until is None or until >= corpus.order.epoch_length(0):
        return None
    draws = corpus.order.slice(0, until)
    return [np.unique(draws.sample[draws.group == number]) for number in range(len(corpus.order.groups))]


def _group_jobs(group: int, sample_indices: NDArray[np.uint32], variations: int) -> SampleDraws:
    sample = np.tile(sample_indices.astype(np.int64), variations)
    cycle = np.repeat(np.arange(variations, dtype=np.int64), len(sample_indices))
    none = np.zeros(len(sample), np.int64)
    return SampleDraws(none, none, np.full(len(sample), group, np.int64), sample, cycle)


def _concatenate_jobs(jobs: Sequence[SampleDraws]) -> SampleDraws:
    if not jobs:
        return _group_jobs(0, np.zeros(0, np.uint32), 1)
    columns = (
        (group_jobs.position, group_jobs.epoch, group_jobs.group, group_jobs.sample, group_jobs.cycle)
        for group_jobs in jobs
    )
    return SampleDraws(*map(np.concatenate, zip(*columns, strict=True)))

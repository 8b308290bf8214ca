"""BucketMembers: the samples of each bucket, in ascending order, as one table that all processes of a node share.

The table takes a few bytes per sample. For a large dataset, the first process writes it into a separate arena next to
the dataset's, and the other processes map it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome
from supertuner.arena.reader import ArenaReader
from supertuner.config.settings.data import DatasetSettings
from supertuner.core.waiting import waiting_for_other_ranks
from supertuner.data.ordering.bucket_assignment import bucket_indices, bucket_table
from supertuner.data.ordering.buckets import NO_BUCKET, Bucket, Int32Array
from supertuner.data.ordering.sample_collection import SampleCollection, slice_metadata

BLOCK_SAMPLES = 1 << 18
"""Samples assigned at once: small enough for the CPU's cache, large enough to amortise numpy's cost per call."""

SHARED_MIN_ENTRIES = 1 << 18
"""Datasets with fewer entries are not shared: an arena would cost more than the megabyte it saves."""

TABLE_VERSION = 1

BUILD_WAIT_S = 600.0
"""Longest wait for another process that builds the table, which takes seconds."""


@dataclass(frozen=True, eq=False, slots=True)
class BucketMembers:
    buckets: tuple[Bucket, ...]
    """The buckets that have samples."""
    offsets: NDArray[np.int64]
    """For each bucket, where its samples begin in `samples`; the last element is their total number."""
    samples: NDArray[np.uint32]
    unassigned: NDArray[np.uint32]
    """Samples without a bucket."""

    def samples_in(self, bucket_index: int) -> NDArray[np.uint32]:
        return self.samples[self.offsets[bucket_index] : self.offsets[bucket_index + 1]]


def assign_buckets(settings: DatasetSettings, samples: SampleCollection) -> BucketMembers:
    """Compute the table of a dataset; takes about 0.1 s per million samples."""
    table, columns = bucket_table(settings), _bucket_index_columns(settings, samples)
    samples_by_bucket: dict[Bucket, list[NDArray[np.uint32]]] = {}
    for column in columns:
        order = np.argsort(_narrow(column), kind="stable").astype(np.uint32)
        ends = np.cumsum(np.bincount(column - NO_BUCKET))
        for number, (begin, end) in enumerate(pairwise(ends)):  # NO_BUCKET sorts first and is skipped
            if end > begin:
                samples_by_bucket.setdefault(table[number], []).append(order[begin:end])
    # Neighbouring resolutions can share a size, but a bucket contains a sample only once.
    lists = samples_by_bucket.values()
    parts = [arrays[0] if len(arrays) == 1 else np.unique(np.concatenate(arrays)) for arrays in lists]
    unassigned = np.all([column == NO_BUCKET for column in columns], axis=0)
    return BucketMembers(
        tuple(samples_by_bucket),
        np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64),
        np.concatenate(parts) if parts else np.zeros(0, np.uint32),
        np.flatnonzero(unassigned).astype(np.uint32),
    )


def shared_bucket_members(
    settings: DatasetSettings,
    samples: SampleCollection,
    home: ArenaHome,
    life: ArenaLifetime = "until_removed",
    shared_min_entries: int = SHARED_MIN_ENTRIES,
) -> BucketMembers:
    """The table of a dataset. That of a large dataset is mapped from an arena, which the first process builds."""
    if len(samples) * len(settings.resolution) < shared_min_entries:
        return assign_buckets(settings, samples)
    table = bucket_table(settings)
    name = bucket_arena_name(settings, samples)
    with waiting_for_other_ranks("another process that assigns samples to buckets"):
        reader_or_build = home.attach_or_build(name, life=life, wait_s=BUILD_WAIT_S)
    if isinstance(reader_or_build, ArenaReader):
        return _map_members(reader_or_build, table)
    with reader_or_build as build:
        members = assign_buckets(settings, samples)
        build.put_table("begins", members.offsets)
        build.put_table("samples", members.samples)
        build.put_table("left_out", members.unassigned)
        build.put_table("buckets", _table_indices(members.buckets, table))
        build.seal({"holds": "buckets", "dataset": samples.id, "version": TABLE_VERSION})
        return _map_members(home.attach(name), table)


def _map_members(reader: ArenaReader, table: tuple[Bucket, ...]) -> BucketMembers:
    with reader:  # the views keep the memory mapped; the lock can be released
        buckets = tuple(table[table_index] for table_index in reader.table("buckets"))
        return BucketMembers(buckets, reader.table("begins"), reader.table("samples"), reader.table("left_out"))


def bucket_arena_name(settings: DatasetSettings, samples: SampleCollection) -> str:
    """The dataset's id and a digest of what the table depends on: the staged samples and the bucket settings."""
    fields = {"resolution", "resolution_mode", "bucket_step", "max_aspect_ratio", "upscale", "frames", "fps", "audio"}
    rules: dict[str, Any] = settings.model_dump(mode="json", include=fields)
    rules |= {"kind": settings.dataset_type, "version": TABLE_VERSION, "of": samples.fingerprint}
    digest = hashlib.blake2b(json.dumps(rules, sort_keys=True).encode(), digest_size=8).hexdigest()
    return f"{samples.id[:64]}.buckets-{digest}"


def _bucket_index_columns(settings: DatasetSettings, samples: SampleCollection) -> list[Int32Array]:
    """The arrays of `bucket_indices`, computed block by block."""
    blocks = [
        bucket_indices(settings, slice_metadata(samples, begin, min(begin + BLOCK_SAMPLES, len(samples))))
        for begin in range(0, max(1, len(samples)), BLOCK_SAMPLES)
    ]
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


def _narrow(column: Int32Array) -> NDArray[np.int16] | Int32Array:
    """As 16-bit integers if possible: numpy sorts them by radix, five times as fast."""
    small = not column.size or int(column.max()) <= np.iinfo(np.int16).max
    return column.astype(np.int16) if small else column


def _table_indices(buckets: tuple[Bucket, ...], table: tuple[Bucket, ...]) -> NDArray[np.int32]:
    index_by_bucket = {bucket: index for index, bucket in enumerate(table)}
    return np.array([index_by_bucket[bucket] for bucket in buckets], np.int32)

"""Which samples are in which bucket, as one table that all processes of a node share: ascending within a bucket.

The table is a few bytes per sample; that of a large dataset lies in an arena of its own beside the dataset's, made by
the process that comes first, so that no further process pays for it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.format import Life
from supertuner.arena.home import Home
from supertuner.arena.reader import Reader
from supertuner.config.settings.data import Dataset
from supertuner.data.ordering.assign import block_of, bucket_numbers, bucket_table
from supertuner.data.ordering.buckets import NO_BUCKET, Bucket, Ints
from supertuner.data.samples import Samples

BLOCK = 1 << 18
"""Samples assigned at once: small enough for the CPU's cache, large enough that numpy's cost per call vanishes."""

SHARED_FROM = 1 << 18
"""Datasets with fewer entries keep the table to themselves: an arena would cost more than the megabyte it saves."""

TABLE_VERSION = 1

BUILD_WAIT_S = 600.0
"""Longest wait for another process that makes the table; it takes seconds."""


@dataclass(frozen=True, eq=False, slots=True)
class Members:
    buckets: tuple[Bucket, ...]
    """Those that have samples."""
    begins: NDArray[np.int64]
    """Where each bucket's samples begin in `samples`, and at the end their number."""
    samples: NDArray[np.uint32]
    left_out: NDArray[np.uint32]
    """Samples that have no bucket."""

    def of(self, number: int) -> NDArray[np.uint32]:
        return self.samples[self.begins[number] : self.begins[number + 1]]


def members_of(settings: Dataset, samples: Samples) -> Members:
    """The table of a dataset, computed: about a tenth of a second for each million samples."""
    columns = _numbers(settings, samples)
    table = bucket_table(settings)
    found: dict[Bucket, list[NDArray[np.uint32]]] = {}
    for column in columns:
        order = np.argsort(_narrow(column), kind="stable").astype(np.uint32)
        ends = np.cumsum(np.bincount(column - NO_BUCKET))
        for number, (begin, end) in enumerate(pairwise(ends)):  # those without a bucket come first, and are left out
            if end > begin:
                found.setdefault(table[number], []).append(order[begin:end])
    # Neighbouring resolutions can share a size: a sample is in a bucket once.
    parts = [one[0] if len(one) == 1 else np.unique(np.concatenate(one)) for one in found.values()]
    nowhere = np.all([column == NO_BUCKET for column in columns], axis=0)
    return Members(
        tuple(found),
        np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64),
        np.concatenate(parts) if parts else np.zeros(0, np.uint32),
        np.flatnonzero(nowhere).astype(np.uint32),
    )


def shared_members(
    settings: Dataset, samples: Samples, home: Home, life: Life = "until_removed", shared_from: int = SHARED_FROM
) -> Members:
    """The table of a dataset; of a large one, mapped from the arena that the first process makes."""
    if len(samples) * len(settings.resolution) < shared_from:
        return members_of(settings, samples)
    table = bucket_table(settings)
    name = table_name(settings, samples)
    found = home.attach_or_build(name, life=life, wait_s=BUILD_WAIT_S)
    if isinstance(found, Reader):
        return _mapped(found, table)
    with found as build:
        made = members_of(settings, samples)
        build.put_table("begins", made.begins)
        build.put_table("samples", made.samples)
        build.put_table("left_out", made.left_out)
        build.put_table("buckets", _places(made.buckets, table))
        build.seal({"holds": "buckets", "dataset": samples.id, "version": TABLE_VERSION})
        return _mapped(home.attach(name), table)


def _mapped(reader: Reader, table: tuple[Bucket, ...]) -> Members:
    with reader:  # views keep the memory; the lock need not last
        buckets = tuple(table[place] for place in reader.table("buckets"))
        return Members(buckets, reader.table("begins"), reader.table("samples"), reader.table("left_out"))


def table_name(settings: Dataset, samples: Samples) -> str:
    """The arena's name says whose table it is and what it depends on: the staged samples and the rules of buckets."""
    fields = {"resolution", "resolution_mode", "bucket_step", "max_aspect_ratio", "upscale", "frames", "fps", "audio"}
    rules: dict[str, Any] = settings.model_dump(mode="json", include=fields)
    rules |= {"kind": settings.dataset_type, "version": TABLE_VERSION, "of": samples.fingerprint}
    digest = hashlib.blake2b(json.dumps(rules, sort_keys=True).encode(), digest_size=8).hexdigest()
    return f"{samples.id[:64]}.buckets-{digest}"


def _numbers(settings: Dataset, samples: Samples) -> list[Ints]:
    """The columns of bucket numbers, block by block."""
    blocks = [
        bucket_numbers(settings, block_of(samples, begin, min(begin + BLOCK, len(samples))))
        for begin in range(0, max(1, len(samples)), BLOCK)
    ]
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


def _narrow(column: Ints) -> NDArray[np.int16] | Ints:
    """Numpy sorts 16-bit numbers by radix: five times as fast."""
    small = not column.size or int(column.max()) <= np.iinfo(np.int16).max
    return column.astype(np.int16) if small else column


def _places(buckets: tuple[Bucket, ...], table: tuple[Bucket, ...]) -> NDArray[np.int32]:
    places = {bucket: place for place, bucket in enumerate(table)}
    return np.array([places[bucket] for bucket in buckets], np.int32)
